"""The study as jobs of a cluster (`--slurm`): one a seed for what its arms share, then one for each arm.

Each call does what can be done now: records of arms that have finished, jobs for what has none or whose job failed. An
arm that needs another one's result (`sft_kl`) is submitted by the call that finds it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.arms import Arm
from experiments.plan import Study, Work
from launch import preflight, render
from launch.commands import refuse, submit
from launch.follow import State, ask_slurm
from launch.jobs import Job
from pivotrl import stage_state
from pivotrl.config import Config
from pivotrl.configuration import load_config
from pivotrl.errors import UserError
from pivotrl.io import read_json, write_json

Ask = Callable[[str], State | None]  # a job's id -> what SLURM says of it


@dataclass(frozen=True)
class Standing:
    """A piece of work and what has become of it so far."""

    work: Work
    cfg: Config
    done: bool
    job_id: str | None = None  # of its last job
    state: State | None = None  # of that job, where SLURM knows it

    @property
    def open(self) -> bool:
        """Whether it has to be submitted."""
        return not self.done and (self.state is None or self.state.ended)

    @property
    def job(self) -> Job:
        return Job(f"{self.work.name}-seed{self.work.seed}", "stage.sh", self.work.stages)

    def told(self) -> str:
        """How its last job stands, for a person; empty where there was none that is known."""
        return self.state.told(f"job {self.job_id}") if self.state is not None else ""


def standing(work: Work, ask: Ask = ask_slurm) -> Standing:
    """How far `work` is: by its folder, and by SLURM for the job that an earlier call has noted there."""
    cfg = load_config(list(work.overrides))
    if all(stage_state.up_to_date(cfg, stage) for stage in work.stages):
        return Standing(work, cfg, done=True)
    note = _note(work)
    job_id = str(read_json(note)["job"]) if note.exists() else None
    return Standing(work, cfg, False, job_id, ask(job_id) if job_id is not None else None)


def _note(work: Work) -> Path:
    return work.folder / "slurm" / "job.json"


def submit_study(
    study: Study, arms: Sequence[Arm], seeds: Sequence[int], dry_run: bool = False, ask: Ask = ask_slurm
) -> list[Path]:
    """Record what is done and submit what can run; returns the records written.

    Raises UserError, before anything is queued, with every problem that preflight finds.
    """
    if shutil.which("sbatch") is None:
        raise UserError("no sbatch on this machine: go to a login node, or leave --slurm out to run here")
    plans = [_SeedPlan.of(study, arms, seed, ask) for seed in seeds]
    refuse(list(dict.fromkeys(problem for plan in plans for problem in plan.problems())))
    written = [path for plan in plans for path in plan.go(study, dry_run)]
    if len(written) == len(arms) * len(seeds):
        print("Every arm is recorded. Tables and figures: make results", flush=True)
    else:
        print("The same command again records what has finished, and submits what failed or waits.", flush=True)
    return written


@dataclass(frozen=True)
class _SeedPlan:
    seed: int
    shared: Standing
    arms: list[tuple[Arm, Standing | None]]  # None: waits for the arm that it matches

    @classmethod
    def of(cls, study: Study, arms: Sequence[Arm], seed: int, ask: Ask) -> _SeedPlan:
        shared = standing(study.shared_work(seed), ask)
        if shared.done:
            study.require_start(seed)
        found: list[tuple[Arm, Standing | None]] = []
        for arm in arms:
            study.link(seed, arm)
            matched = None if arm.matches is None else study.folder(seed, arm.matches) / "evaluate"
            waits = matched is not None and not stage_state.is_done(matched)
            found.append((arm, None if waits else standing(study.arm_work(seed, arm), ask)))
        return cls(seed, shared, found)

    def problems(self) -> list[str]:
        """Preflight of all that is to be submitted; arms together with what they share, where that is not done."""
        before = [] if self.shared.done else [self.shared.job]
        wanted = [s for _, s in self.arms if s is not None and s.open]
        jobs = [(s, [*before, s.job]) for s in wanted]
        if self.shared.open and not wanted:
            jobs = [(self.shared, before)]
        return [text for s, together in jobs for text in preflight.problems(s.cfg, together, s.work.overrides)]

    def go(self, study: Study, dry_run: bool) -> list[Path]:
        print(f"seed {self.seed}", flush=True)
        first = _advance(self.shared, [], dry_run)
        after = [first] if first is not None else []
        written = []
        for arm, found in self.arms:
            if found is None:
                print(f"  {arm.name}: waits for {arm.matches}", flush=True)
            elif found.done:
                written.append(study.record(self.seed, arm))
                print(f"  {arm.name}: done -> {written[-1]}", flush=True)
            else:
                _advance(found, after, dry_run)
        return written


def _advance(found: Standing, after: Sequence[str], dry_run: bool) -> str | None:
    """Submit what is open. Returns the id of the job that others have to wait for; None: done, or a dry run."""
    work, known = found.work, found.told()
    if found.done:
        print(f"  {work.name}: done", flush=True)
        return None
    if not found.open:
        print(f"  {work.name}: {known}", flush=True)
        return found.job_id
    before = f"{known}; " if known else ""
    then = f" after {', '.join(after)}" if after else ""
    if dry_run:
        print(f"  {work.name}: {before}would submit {', '.join(work.stages)}", flush=True)
        return None
    folder = work.folder / "slurm"
    script = render.script(found.cfg, found.job, work.overrides, folder)
    job_id = submit(folder / f"{found.job.name}.sbatch", script, after)
    write_json(_note(work), {"job": job_id})
    print(f"  {work.name}: {before}job {job_id}{then}, {', '.join(work.stages)}", flush=True)
    return job_id
