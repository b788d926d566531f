"""Single checks of `pivotrl preflight`. Each yields its problems, with what to do; none needs a GPU or torch."""

from __future__ import annotations

import heapq
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from launch import memory
from launch.jobs import Job, world_size
from launch.render import script
from pivotrl import fp8, stage_state
from pivotrl.config import Config
from pivotrl.errors import UserError
from pivotrl.io import read_json
from pivotrl.stages import STAGES

_CAPABILITY = {"h100": (9, 0), "h200": (9, 0), "b200": (10, 0)}  # of conf/cluster
_LOCAL_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/run")
_SAMPLES = 4  # longest and shortest turns that are rendered with the real tokenizer
_TURNS_READ = 200_000
_SBATCH_SECONDS = 30
_FREE_MARGIN_GIB = 1.0


def raw_config(cfg: Config) -> dict[str, Any] | None:
    """config.json of the model, or None where it cannot be read (`conflicts` tells that)."""
    if cfg.model.path.startswith("builtin:"):
        return None
    try:
        raw = json.loads((Path(cfg.model.path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return raw if isinstance(raw, dict) else None


def unsupported(cfg: Config, stages: Sequence[str]) -> Iterator[str]:
    """What the schema allows and the policy refuses once it runs (`pivotrl.policy`)."""
    if not any(STAGES[s].policy for s in stages):
        return
    raw = raw_config(cfg)
    if raw is not None and _importable("torch"):
        from pivotrl.models.dims import rope_theta
        from pivotrl.models.registry import family_for

        try:
            family_for(raw).to_megatron_kwargs(raw)
            rope_theta(raw)
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


def model_files(cfg: Config) -> Iterator[str]:
    """Weights, tokenizer and template of the model folder, and that the template can be rendered."""
    from pivotrl.models.builtin import resolve_model

    if not cfg.model.path.startswith("builtin:") and raw_config(cfg) is None:
        return  # `conflicts` has told it
    try:
        folder = resolve_model(cfg.model.path)
    except UserError as error:
        yield str(error)
        return
    if not _importable("transformers"):
        return
    from pivotrl.rendering.chat import Renderer

    try:
        Renderer(folder, cfg.model.chat_template, cfg.domain.action_format)
    except UserError as error:
        yield str(error)


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
    if (needed := sum(engine.values())) > share:
        yield (
            f"generation: the engine needs {needed:.0f} GiB a GPU ({_parts(engine)}), but gets gpu_memory_utilization "
            f"{cfg.generation.gpu_memory_utilization:g} of {limit:g} GiB = {share:.0f}: raise "
            "generation.tensor_parallel or gpu_memory_utilization, or lower model.context_length"
        )
    if not any(STAGES[s].policy for s in stages):
        return
    parts = memory.training_gib(model, cfg, world_size(cfg))
    if "train" in stages:
        parts["engine's share"] = share
    if (needed := sum(parts.values())) > limit:
        yield (
            f"memory: training needs {needed:.0f} GiB a GPU ({_parts(parts)}), cluster.gpu_memory_gib is {limit:g}: "
            "raise parallel.tensor, pipeline or expert, or cluster.nodes; set algorithm.optimizer.recompute=true; "
            "or lower generation.gpu_memory_utilization"
        )


def _parts(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} {gib:.1f}" for name, gib in parts.items() if gib >= 0.05)


def turns_fit(cfg: Config, run_dir: Path) -> Iterator[str]:
    """Whether the longest and shortest turns, rendered with the real tokenizer, leave room for an action."""
    path = run_dir / "turns" / "turns.jsonl"
    if not path.is_file() or not _importable("transformers"):
        return
    with path.open("rb") as file:
        rows = [line for _, line in zip(range(_TURNS_READ), file, strict=False) if line.strip()]
    shortest = heapq.nsmallest(_SAMPLES, ((len(r), r) for r in rows))
    longest = heapq.nlargest(_SAMPLES, ((len(r), r) for r in rows))
    if not rows:
        yield f"{path} has no turns: run `pivotrl turns` again"
        return
    from pivotrl.models.builtin import resolve_model
    from pivotrl.rendering.chat import Renderer
    from pivotrl.trajectories.schema import Turn

    try:
        turns = {row: Turn.from_json(json.loads(row)) for _, row in (*shortest, *longest)}
    except (ValueError, KeyError, TypeError) as error:
        yield f"{path}: a row is no turn ({type(error).__name__}: {error}); run `pivotrl turns` again"
        return
    try:
        renderer = Renderer(resolve_model(cfg.model.path), cfg.model.chat_template, cfg.domain.action_format)

        room = cfg.model.context_length - cfg.sampling.max_new_tokens
        tokens = {row: len(renderer.prompt_ids(turn.messages, turn.tools)) for row, turn in turns.items()}
    except UserError as error:
        yield f"{path}: {error}"
        return
    least, most = min(tokens.values()), max(tokens.values())
    if least > room:
        yield (
            f"model.context_length={cfg.model.context_length}: even the shortest turns of {path} have {least} tokens, "
            f"and sampling.max_new_tokens={cfg.sampling.max_new_tokens} leaves {room}: raise model.context_length"
        )
    elif most > room:
        print(
            f"note: the longest turns have {most} tokens, {room} fit (model.context_length - max_new_tokens); "
            "those beyond are skipped and counted"
        )


def profile_belongs(cfg: Config, run_dir: Path, stages: Sequence[str]) -> Iterator[str]:
    """Training without profiling first: pivots and profile must be there, and of this sampling and verifier."""
    if "train" not in stages or "profile" in stages:
        return
    summary, pivots = run_dir / "profile" / "summary.json", run_dir / "select" / "pivots.jsonl"
    if not summary.is_file():
        yield f"{summary} does not exist: run the job `profile` first (or stage profile)"
        return
    if not pivots.is_file() or pivots.stat().st_size == 0:
        yield f"{pivots} has no pivots: run `pivotrl select`, with a higher select.lambda_diff or another select.set"
    try:
        record = read_json(summary)["fingerprint"]
        known = record["sampling"], record["verifier"]["name"], record["verifier"]["config"]
    except (ValueError, KeyError, TypeError):
        yield f"{summary} holds no fingerprint: profile again"
        return
    if cfg.algorithm.allow_foreign_profile:
        return
    s = cfg.sampling
    now = {"temperature": s.temperature, "top_p": s.top_p, "top_k": s.top_k, "max_new_tokens": s.max_new_tokens}
    for key, value in now.items():
        if known[0].get(key) != value:
            yield (
                f"sampling.{key}={value}, but the profile was made with {known[0].get(key)}: profile again, or set "
                "algorithm.allow_foreign_profile=true"
            )
    if known[1] != cfg.domain.verifier.name:
        yield (
            f"domain.verifier.name={cfg.domain.verifier.name}, but the profile was scored by {known[1]}: profile "
            "again, or set algorithm.allow_foreign_profile=true"
        )


def results_continue(cfg: Config, run_dir: Path, stages: Sequence[str]) -> Iterator[str]:
    """Interrupted stages of another configuration, which a stage refuses to mix with its own."""
    for stage in stages:
        directory = run_dir / stage
        if not directory.is_dir() or stage_state.is_done(directory):
            continue
        if why := stage_state.changes(directory, stage_state.record_of(cfg, stage, run_dir)):
            yield (
                f"{directory} holds an interrupted {stage} of another configuration ({'; '.join(why[:4])}): undo the "
                "change, choose another run_dir=..., or move that folder away"
            )


def policies_exist(cfg: Config, run_dir: Path, stages: Sequence[str]) -> Iterator[str]:
    """Evaluation of a policy that no stage of this submission trains and no earlier run has left."""
    if "evaluate" not in stages:
        return
    for policy, stage in (("sft", "sft"), ("pivotrl", "train")):
        checkpoint = run_dir / stage / "checkpoint"
        if policy in cfg.evaluate.policies and stage not in stages and not checkpoint.exists():
            rest = ",".join(p for p in cfg.evaluate.policies if p != policy)
            yield (
                f"evaluate.policies has {policy}, but {checkpoint} does not exist: run the job `{stage}`, "
                f"or set evaluate.policies=[{rest}]"
            )


def storage(cfg: Config, run_dir: Path, stages: Sequence[str]) -> Iterator[str]:
    """Write access, room for the checkpoints, and a place that every node sees."""
    parent = next(p for p in (run_dir, *run_dir.parents) if p.exists())
    if not parent.is_dir():
        yield f"run_dir={run_dir}: {parent} is a file; choose another run_dir"
        return
    try:
        with tempfile.NamedTemporaryFile(dir=parent, prefix=".pivotrl-preflight-"):
            pass
    except OSError as error:
        yield f"run_dir={run_dir}: cannot write in {parent} ({error.strerror}); choose another run_dir or mend it"
        return
    raw = raw_config(cfg)
    if raw is not None:
        try:
            each = memory.checkpoint_gib(memory.read_model(raw.get("text_config", raw)), cfg)
        except UserError:
            each = 0.0
        count = sum(STAGES[s].policy and not (run_dir / s / "checkpoint").exists() for s in stages)
        free = shutil.disk_usage(parent).free / memory.GIB
        # a checkpoint is written whole beside the one that it replaces
        if count and (needed := (count + 1) * each + _FREE_MARGIN_GIB) > free:
            yield (
                f"run_dir={run_dir}: {free:.1f} GiB free, {needed:.1f} needed ({count} checkpoints of {each:.1f} GiB, "
                "one more while it is written): free space, or choose another run_dir"
            )
    if cfg.cluster.nodes > 1 and str(run_dir).startswith("/dev/shm"):
        yield f"run_dir={run_dir} is in one node's memory; {cfg.cluster.nodes} nodes need a shared file system"
    elif cfg.cluster.nodes > 1 and any(str(run_dir).startswith(f + "/") for f in _LOCAL_FOLDERS):
        print(f"note: run_dir={run_dir} is local to a node on most clusters; the node check of the job tells")


def environment(cfg: Config) -> Iterator[str]:
    """Variables and files that a job needs from the submitting shell."""
    c = cfg.cluster
    if cfg.tracking.wandb == "online":
        netrc = Path.home() / ".netrc"
        if "WANDB_API_KEY" not in os.environ and not netrc.is_file():
            yield "tracking.wandb=online needs WANDB_API_KEY in your shell (or `wandb login`); or set tracking=offline"
        elif "WANDB_API_KEY" in os.environ and "WANDB_API_KEY" not in c.environment:
            yield "tracking.wandb=online, but cluster.environment does not let WANDB_API_KEY into the job: add it there"
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


def _importable(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None
