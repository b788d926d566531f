"""The jobs that a cluster runs: which stages each one goes through, and which follow which. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pivotrl.config import Config
from pivotrl.errors import UserError
from pivotrl.stages import STAGES
from pivotrl.strict import suggestion

PIPELINE = "pipeline"


@dataclass(frozen=True)
class Job:
    """One submission. Stages whose result is up to date are skipped, so a job may begin before its own stage."""

    name: str
    script: str  # in slurm/
    stages: tuple[str, ...]
    after: tuple[str, ...] = ()  # jobs of a pipeline that must have ended well


_TO_PIVOTS = ("turns", "warmup", "profile", "select")

JOBS = {
    job.name: job
    for job in (
        Job("profile", "profile_pivot.sh", _TO_PIVOTS),
        Job("train", "train_pivot.sh", (*_TO_PIVOTS, "train"), ("profile",)),
        Job("sft", "sft.sh", ("turns", "warmup", "sft"), ("profile",)),
        Job("evaluate", "evaluate.sh", ("evaluate", "report"), ("train", "sft")),
    )
}


def jobs_for(name: str) -> list[Job]:
    """The jobs of "pipeline" in order of submission, or the one of that name (a job's, or a stage's on its own).

    Raises UserError for any other name.
    """
    if name == PIPELINE:
        return list(JOBS.values())
    if name in JOBS:
        return [JOBS[name]]
    if name in STAGES:
        return [Job(name, "stage.sh", (name,))]
    known = [*JOBS, PIPELINE, *(s for s in STAGES if s not in JOBS)]
    raise UserError(f"no job {name!r}.{suggestion(name, known)} There are: {', '.join(known)}")


def stages_of(jobs: Sequence[Job]) -> list[str]:
    """Every stage of `jobs` once, in the order in which they run."""
    return list(dict.fromkeys(stage for job in jobs for stage in job.stages))


def processes_per_node(cfg: Config) -> int:
    return cfg.cluster.gpus_per_node or cfg.cluster.processes_per_node


def world_size(cfg: Config) -> int:
    """Processes of a job: one a GPU."""
    return cfg.cluster.nodes * processes_per_node(cfg)
