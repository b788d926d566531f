"""Single checks of `pivotrl preflight`. Each yields its problems, with what to do; none needs a GPU or torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from launch import memory
from launch.jobs import Job, world_size
from launch.model_files import importable, raw_config
from launch.render import script
from pivotrl import fp8, stage_state
from pivotrl.config import Config
from pivotrl.errors import UserError
from pivotrl.stages import ROLLOUT_STAGES, STAGES, optimizer_section
from pivotrl.validation import get

_CAPABILITY = {"h100": (9, 0), "h200": (9, 0), "b200": (10, 0)}  # of conf/cluster
_SBATCH_SECONDS = 30


def unsupported(cfg: Config, stages: Sequence[str]) -> Iterator[str]:
    """What the schema allows and the policy refuses once it runs (`pivotrl.policy`)."""
    if not any(STAGES[s].policy for s in stages):
        return
    raw = raw_config(cfg)
    if raw is not None and importable("torch"):
        from pivotrl.models.registry import family_for
        from pivotrl.models.rope import Rope

        try:
            family_for(raw).to_megatron_kwargs(raw)
            Rope.of(raw).check(cfg.model.context_length)
        except UserError as error:
            yield f"model.path={cfg.model.path}: {error}"
    if cfg.precision.fp8 in fp8.RECIPES:
        yield from _fp8(cfg, cfg.precision.fp8, raw)


def _fp8(cfg: Config, recipe: str, raw: dict[str, Any] | None) -> Iterator[str]:
    """What the cluster's GPUs and the model's sizes say to a recipe; its install is the nodes' (checked on start)."""
    capability = _CAPABILITY.get(cfg.cluster.name)
    if capability and (
        problem := fp8.machine_problem(recipe, fp8.Machine(capability, fp8.RECIPES[recipe].version, None))
    ):
        yield problem
    if raw is not None:
        try:
            yield from fp8.size_problems(recipe, memory.read_model(raw.get("text_config", raw)).dims, cfg.parallel)
        except UserError:
            return  # told above


def verifier(cfg: Config) -> Iterator[str]:
    """The verifier's name and options."""
    from pivotrl.verifiers.registry import get_verifier

    try:
        get_verifier(cfg.domain.verifier)
    except UserError as error:
        yield str(error)


def fits_memory(cfg: Config, stages: Sequence[str]) -> Iterator[str]:
    """Whether trainer and engine fit one GPU, by `launch.memory`."""
    limit, raw = cfg.cluster.gpu_memory_gib, raw_config(cfg)
    if limit is None or raw is None or not cfg.cluster.gpus_per_node:
        return
    try:
        model = memory.read_model(raw.get("text_config", raw))
    except UserError as error:
        yield f"no estimate of memory: {error}"
        return
    engine, share = memory.engine_gib(model, cfg), cfg.generation.gpu_memory_utilization * limit
    if any("generation" in STAGES[s].config for s in stages) and (needed := sum(engine.values())) > share:
        yield (
            f"generation: the engine needs {needed:.0f} GiB a GPU ({_parts(engine)}), but gets gpu_memory_utilization "
            f"{cfg.generation.gpu_memory_utilization:g} of {limit:g} GiB = {share:.0f}: raise "
            "generation.tensor_parallel or gpu_memory_utilization, or lower model.context_length"
        )
    world = world_size(cfg)
    for stage in stages:
        rollouts = stage in ROLLOUT_STAGES
        if not STAGES[stage].policy or (not rollouts and get(cfg, f"{stage}.steps") == 0):
            continue
        section = optimizer_section(stage)
        optimizer = get(cfg, f"{section}.optimizer")
        parts = memory.training_gib(model, cfg, world, optimizer)
        if rollouts:
            parts["sleeping engine"] = memory.ASLEEP_GIB
        remedy = "raise parallel.tensor, pipeline, context or expert, or cluster.nodes"
        remedy += "" if optimizer.recompute else f"; set {section}.optimizer.recompute=true"
        yield from _too_much(stage, parts, limit, remedy)
    if any(stage in stages for stage in ROLLOUT_STAGES):
        yield from _too_much(
            "the refit", memory.refit_gib(model, cfg, world), limit, "raise generation.tensor_parallel"
        )


def _too_much(what: str, parts: dict[str, float], limit: float, remedy: str) -> Iterator[str]:
    if (needed := sum(parts.values())) > limit:
        yield (
            f"memory: {what} needs {needed:.0f} GiB a GPU ({_parts(parts)}), cluster.gpu_memory_gib is {limit:g}: "
            f"{remedy}"
        )


def _parts(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} {gib:.1f}" for name, gib in parts.items() if gib >= 0.05)


def results_continue(cfg: Config, run_dir: Path, stages: Sequence[str]) -> Iterator[str]:
    """Interrupted stages of another configuration, which a stage refuses to mix with its own; results of another
    version of PivotRL, where the user has not said what to do with them."""
    for stage in stages:
        directory = run_dir / stage
        try:
            why = stage_state.why_stale(cfg, directory, stage_state.record_of(cfg, stage, run_dir))
        except UserError as error:
            yield str(error)
            continue
        if why and not stage_state.is_done(directory):
            yield (
                f"{directory} holds an interrupted {stage} of another configuration ({'; '.join(why[:4])}): undo the "
                "change, choose another run_dir=..., or move that folder away"
            )


def policies_exist(cfg: Config, run_dir: Path, stages: Sequence[str]) -> Iterator[str]:
    """Evaluation of a policy that no stage of this submission trains and no earlier run has left."""
    if "evaluate" not in stages:
        return
    for policy, stage in (("sft", "sft"), ("pivotrl", "train"), ("e2e", "e2e")):
        checkpoint = run_dir / stage / "checkpoint"
        if policy in cfg.evaluate.policies and stage not in stages and not checkpoint.exists():
            rest = ",".join(p for p in cfg.evaluate.policies if p != policy)
            yield (
                f"evaluate.policies has {policy}, but {checkpoint} does not exist: run the job `{stage}`, "
                f"or set evaluate.policies=[{rest}]"
            )


def environment(cfg: Config) -> Iterator[str]:
    """Variables and files that a job needs from the submitting shell."""
    c = cfg.cluster
    if cfg.tracking.wandb == "online":
        netrc = Path.home() / ".netrc"
        if "WANDB_API_KEY" not in os.environ and not netrc.is_file():
            yield "tracking.wandb=online needs WANDB_API_KEY in your shell (or `wandb login`); or set tracking=offline"
        elif "WANDB_API_KEY" in os.environ and "WANDB_API_KEY" not in c.environment:
            yield "tracking.wandb=online, but cluster.environment does not let WANDB_API_KEY into the job: add it there"
    if cfg.tracking.tensorboard and c.container.kind == "none" and not importable("tensorboardX"):
        yield "tracking.tensorboard=true needs tensorboardX: pip install 'pivotrl[tensorboard]', or set it to false"
    image = c.container.image
    if image and image.startswith(("/", "./", "~")) and not Path(image).expanduser().is_file():
        yield f"cluster.container.image={image}: no such file"
    if c.container.kind == "none" and c.python and not Path(c.python).is_file() and not shutil.which(c.python):
        yield f"cluster.python={c.python}: no such program on this machine"


def scheduler(cfg: Config, jobs: Sequence[Job], overrides: Sequence[str]) -> Iterator[str]:
    """`sbatch --test-only` of every script, where SLURM is here; the site's own words for what it refuses."""
    if shutil.which("sbatch") is None:
        print("note: no sbatch on this machine, so SLURM's own limits are not checked")
        return
    for job in jobs:
        text = script(cfg, job, overrides, Path(cfg.run_dir) / "slurm")
        try:
            done = subprocess.run(
                ["sbatch", "--test-only"],
                input=text,
                capture_output=True,
                text=True,
                timeout=_SBATCH_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            yield f"sbatch does not answer within {_SBATCH_SECONDS} s: is the SLURM controller down? (`scontrol ping`)"
            return
        if done.returncode:
            said = "; ".join(line.removeprefix("sbatch: ") for line in done.stderr.strip().splitlines()[-2:])
            yield (
                f"sbatch refuses the job {job.name}: {said}. "
                "Set cluster.partition, account, nodes and time_limit to what `sinfo` shows"
            )
            return
