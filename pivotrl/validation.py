"""Conflicts of a configuration: every one is found before anything is loaded or submitted, and all are told at once."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pivotrl import algorithm_checks, fp8
from pivotrl.config import Config, Optimizer, Profile, Select
from pivotrl.errors import UserError
from pivotrl.layout import stage_layers
from pivotrl.models.rope import Rope
from pivotrl.profiling.shards import Shard, parse_shard
from pivotrl.stages import ROLLOUT_STAGES, STAGES, optimizer_section
from pivotrl.strict import suggestion
from pivotrl.trajectories.flags import FLAGS
from pivotrl.value_ranges import CHOICES, NOT_NEGATIVE, POSITIVE

_POLICIES = ("base", "sft", "pivotrl", "e2e")
# Shapes of the models that packages ship, whose config.json is not on disk before the first use.
_BUILTIN_SHAPES = {"smollm2-135m": {"heads": 9, "kv_heads": 3, "layers": 30, "positions": 8192}}


@dataclass(frozen=True)
class Shape:
    """What the layout must divide. 0 means unknown, or none (experts of a dense model)."""

    heads: int = 0
    kv_heads: int = 0
    layers: int = 0
    experts: int = 0
    positions: int = 0


def model_shape(path: str) -> Shape | None:
    """Shape of the model at `path` (a Hugging Face folder or builtin:NAME); None when it cannot be read."""
    if path.startswith("builtin:"):
        known = _BUILTIN_SHAPES.get(path.removeprefix("builtin:"))
        return Shape(**known) if known else None
    try:
        raw = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    raw = raw.get("text_config", raw)

    def first(*names: str) -> int:
        return next((int(raw[n]) for n in names if raw.get(n)), 0)

    # a hybrid may name its layers instead of counting them
    layers = next(
        (len(raw[k]) for k in ("hybrid_override_pattern", "layers_block_type", "layer_types") if raw.get(k)), 0
    )
    heads, positions = first("num_attention_heads"), first("max_position_embeddings")
    with suppress(UserError):  # told where the model is loaded, and by preflight
        positions = Rope.of(raw).reach or positions
    return Shape(
        heads,
        first("num_key_value_heads") or heads,
        first("num_hidden_layers") or layers,
        first("num_experts", "num_local_experts", "n_routed_experts"),
        positions,
    )


def cuda_is_present() -> bool:
    """Whether an NVIDIA driver is loaded (told without importing torch)."""
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()


def validate(cfg: Config, stage: str | None = None, world_size: int | None = None, cuda: bool | None = None) -> None:
    """Raise one `UserError` that lists every conflict; see `conflicts`."""
    if found := conflicts(cfg, stage, world_size, cuda):
        count = f"{len(found)} conflicts" if len(found) > 1 else "a conflict"
        raise UserError(f"The configuration has {count}:\n" + "\n".join(f"  - {text}" for text in found))


def conflicts(
    cfg: Config, stage: str | None = None, world_size: int | None = None, cuda: bool | None = None
) -> list[str]:
    """Every conflict of `cfg`. Checks of the machine (layout, files, fp8) are those of `stage`; None or "run": all.

    `world_size` is that of the job (default: environment variable WORLD_SIZE, else 1).
    """
    world = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
    cuda = cuda_is_present() if cuda is None else cuda
    found = [*_choices(cfg), *_ranges(cfg), *_method(cfg), *_stages(cfg)]
    stages = list(cfg.run.stages) if stage in (None, "run") else [stage or ""]
    active = [STAGES[name] for name in stages if name in STAGES]
    if any(s.policy or s.name in ("profile", "evaluate") for s in active):
        found += _model(cfg)
    if any(s.policy for s in active):
        found += [*_layout(cfg, world), *_batches(cfg, world, stages)]
        if cfg.precision.fp8 is not None and not cuda:
            found.append(f"precision.fp8={cfg.precision.fp8} needs an NVIDIA GPU; this machine has none (use fp8=null)")
        for name in [s.name for s in active if s.policy and not cuda]:
            key = optimizer_section(name)
            if get(cfg, f"{key}.optimizer.cpu_offload"):
                found.append(f"{key}.optimizer.cpu_offload=true frees GPU memory, and this machine has no NVIDIA GPU")
    if any("generation" in s.config for s in active) and world % max(cfg.generation.tensor_parallel, 1):
        found.append(
            f"generation.tensor_parallel={cfg.generation.tensor_parallel} does not divide the world size {world}"
        )
    if any(name in stages for name in ROLLOUT_STAGES):
        found += algorithm_checks.sampling_conflicts(cfg.sampling)
        found += algorithm_checks.one_step_off_conflicts(cfg)
    local = [s.name for s in active if s.name in ("evaluate", "e2e")]
    if cfg.generation.server is not None and local:
        found.append(
            f"generation.server: {', '.join(local)} needs an engine in this process (generation.server=null); a server "
            "is for `pivotrl profile` and `pivotrl train`"
        )
    if stage == "run" and cfg.profile.shard is not None:
        found.append("profile.shard is for `pivotrl profile` alone: run the shards and the merge, then `pivotrl run`")
    return found + _files(cfg, stages)


def get(cfg: Any, key: str) -> Any:
    """The value at a dotted key."""
    for part in key.split("."):
        cfg = getattr(cfg, part)
    return cfg


def _choices(cfg: Config) -> Iterator[str]:
    for key, choices in CHOICES.items():
        value = get(cfg, key)
        if value is not None and value not in choices:
            yield f"{key}={value!r} is not one of {', '.join(choices)}.{suggestion(value, list(choices))}"
    for flag in cfg.trajectories.drop:
        if flag not in FLAGS:
            yield f"trajectories.drop has {flag!r}, not one of {', '.join(FLAGS)}.{suggestion(flag, list(FLAGS))}"
    for policy in cfg.evaluate.policies:
        if policy not in _POLICIES:
            hint = suggestion(policy, list(_POLICIES))
            yield f"evaluate.policies has {policy!r}, not one of {', '.join(_POLICIES)}.{hint}"


def _ranges(cfg: Config) -> Iterator[str]:
    for key in POSITIVE:
        value = get(cfg, key)
        if value is not None and value <= 0:
            yield f"{key}={value} must be positive"
    for key in NOT_NEGATIVE:
        value = get(cfg, key)
        if value is not None and value < 0:
            yield f"{key}={value} must not be negative"
    for key in ("trajectories.warmup_fraction", "trajectories.validation_fraction"):
        if not 0 <= get(cfg, key) < 1:
            yield f"{key}={get(cfg, key)} must be in [0, 1)"
    held = cfg.trajectories.warmup_fraction + cfg.trajectories.validation_fraction
    if held >= 1:
        yield f"trajectories.warmup_fraction + validation_fraction = {held:g} leaves nothing to train on (must be < 1)"
    for key in (
        "select.lambda_diff",
        "audit.accept_at",
        "profile.adaptive.lambda_diff",
        "sampling.top_p",
        "generation.gpu_memory_utilization",
    ):
        if not 0 < get(cfg, key) <= 1:
            yield f"{key}={get(cfg, key)} must be in (0, 1]"
    for name in ("algorithm", "warmup", "sft"):
        yield from _optimizer(f"{name}.optimizer", get(cfg, name).optimizer)


def _optimizer(key: str, o: Optimizer) -> Iterator[str]:
    for name in ("learning_rate", "epsilon", "clip_grad", "tokens_per_microbatch", "max_nonfinite_steps"):
        if getattr(o, name) <= 0:
            yield f"{key}.{name}={getattr(o, name)} must be positive"
    for name in ("warmup_steps", "weight_decay"):
        if getattr(o, name) < 0:
            yield f"{key}.{name}={getattr(o, name)} must not be negative"
    if o.overlap_param_gather and not o.overlap_grad_reduce:
        yield f"{key}.overlap_param_gather=true needs {key}.overlap_grad_reduce=true (megatron-core)"
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(o, name) < 1:
            yield f"{key}.{name}={getattr(o, name)} must be in [0, 1)"


def _method(cfg: Config) -> Iterator[str]:
    k, group = cfg.profile.rollouts_per_turn, cfg.algorithm.group_size
    if k < 2:
        yield f"profile.rollouts_per_turn={k}: a variance needs at least 2 rollouts a turn"
    if cfg.end_to_end.group_size < 2:
        yield f"end_to_end.group_size={cfg.end_to_end.group_size}: a group advantage needs at least 2 episodes a task"
    if cfg.watch.every and cfg.environment.name is None:
        yield "watch.every needs an environment whose tasks are played (environment=outfitters)"
    if cfg.watch.export_best and not cfg.watch.every:
        yield "watch.export_best=true needs watch.every: the steps among which the best is chosen"
    if cfg.watch.export_best and cfg.watch.split == "test":
        yield "watch.export_best=true with watch.split=test chooses on the tasks of the report; use validation"
    if group < 2:
        yield f"algorithm.group_size={group}: a group advantage needs at least 2 actions a pivot"
    if cfg.sampling.temperature == 0 and (k > 1 or group > 1):
        yield (
            f"sampling.temperature=0 with profile.rollouts_per_turn={k} and algorithm.group_size={group}: greedy "
            "rollouts are all alike, so every variance and every advantage would be 0 (use a temperature > 0)"
        )
    yield from _profile(cfg.profile)
    yield from _select(cfg.select)
    if cfg.sampling.max_new_tokens >= cfg.model.context_length:
        yield (
            f"sampling.max_new_tokens={cfg.sampling.max_new_tokens} leaves no room for a state in "
            f"model.context_length={cfg.model.context_length}"
        )
    yield from algorithm_checks.algorithm_conflicts(cfg.algorithm)
    if cfg.experts.replay and not cfg.generation.routed_experts:
        yield "experts.replay=true needs generation.routed_experts=true: the engine must say which experts it chose"
    if cfg.generation.expert_parallel and cfg.generation.tensor_parallel == 1:
        yield "generation.expert_parallel=true spreads experts over generation.tensor_parallel ranks, which is 1"
    shape = model_shape(cfg.model.path)
    if cfg.precision.fp8 in (None, *fp8.RECIPES):
        yield from fp8.conflicts(cfg.precision, shape.layers if shape else 0, cfg.parallel)
    if cfg.precision.fp8 is not None and cfg.precision.policy != "bf16":
        yield f"precision.fp8={cfg.precision.fp8} needs precision.policy=bf16, not {cfg.precision.policy}"


def _profile(profile: Profile) -> Iterator[str]:
    a, k = profile.adaptive, profile.rollouts_per_turn
    try:
        shard = parse_shard(profile.shard)
    except UserError as error:
        yield str(error)
        shard = None
    for key, used in (
        ("shard", shard is not None),
        ("second_rollouts", profile.second_rollouts),
        ("adaptive.enabled", a.enabled),
    ):
        if profile.from_rows and used:
            yield f"profile.from_rows makes no rollouts, so profile.{key} cannot be set beside it"
    if not 0 < a.error < 1:
        yield f"profile.adaptive.error={a.error} must be between 0 and 1"
    if a.histogram and (len(a.histogram) != k + 1 or min(a.histogram) < 0):
        yield f"profile.adaptive.histogram has {len(a.histogram)} values; K={k} needs {k + 1}, none of them negative"
    if a.enabled and isinstance(shard, Shard) and not a.histogram:
        yield (
            "profile.adaptive.enabled with profile.shard needs profile.adaptive.histogram (from the summary of an "
            "earlier profile): shards that calibrate by themselves would decide differently than one job"
        )


def _select(select: Select) -> Iterator[str]:
    for domain, count in select.mixture.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            yield f"select.mixture.{domain}={count!r} must be a positive number of pivots"
    if not 0 <= select.action_floor <= 1:
        yield f"select.action_floor={select.action_floor} must be in [0, 1]"
    if select.action_floor and select.set not in ("adv", "adv_zeros"):
        yield f"select.action_floor widens adv and adv_zeros; select.set={select.set} has every mixed turn already"
    if both := sorted({*select.tags} & {*select.drop_tags}):
        yield f"select.tags and select.drop_tags both name {', '.join(both)}"
    if select.mixture and select.max_pivots is not None:
        yield "select.mixture gives exact counts, so select.max_pivots cannot be set beside it"


def _stages(cfg: Config) -> Iterator[str]:
    seen: list[str] = []
    for name in cfg.run.stages:
        if name not in STAGES:
            yield f"run.stages has {name!r}, not one of {', '.join(STAGES)}.{suggestion(name, list(STAGES))}"
            continue
        if name in seen:
            yield f"run.stages has {name!r} twice"
        seen.append(name)
        late = [up for up in STAGES[name].upstream if up in cfg.run.stages and up not in seen]
        if late:
            yield f"run.stages: {name!r} reads the result of {', '.join(late)}, which must come before it"


def _model(cfg: Config) -> Iterator[str]:
    path, shape = cfg.model.path, model_shape(cfg.model.path)
    if not path.startswith("builtin:") and not Path(path).is_dir():
        yield f"model.path={path}: no such folder (a Hugging Face folder with config.json and weights, or builtin:NAME)"
    elif not path.startswith("builtin:") and shape is None:
        yield f"model.path={path} has no readable config.json"
    if shape and 0 < shape.positions < cfg.model.context_length:
        yield f"model.context_length={cfg.model.context_length} exceeds the model's {shape.positions} positions"


def _layout(cfg: Config, world: int) -> Iterator[str]:
    p = cfg.parallel
    dense, sparse = p.tensor * p.pipeline * p.context, p.expert_tensor * p.expert * p.pipeline
    if min(dense, sparse) < 1:
        return  # _ranges has told it
    if world % dense:
        yield (
            f"parallel: tensor {p.tensor} x pipeline {p.pipeline} x context {p.context} = {dense} "
            f"does not divide the world size {world}"
        )
    if world % sparse:
        yield (
            f"parallel: expert_tensor {p.expert_tensor} x expert {p.expert} x pipeline {p.pipeline} = {sparse} "
            f"does not divide the world size {world}"
        )
    if p.sequence and p.tensor == 1:
        yield "parallel.sequence=true needs parallel.tensor > 1"
    shape = model_shape(cfg.model.path)
    if shape is None:
        return
    if shape.heads % p.tensor:
        yield f"parallel.tensor={p.tensor} does not divide the model's {shape.heads} attention heads"
    # megatron-core: key-value heads are a multiple or a divisor of the tensor size (then several ranks share one).
    if shape.kv_heads % p.tensor and (not shape.kv_heads or p.tensor % shape.kv_heads):
        kv = shape.kv_heads
        yield f"parallel.tensor={p.tensor} is neither a divisor nor a multiple of the model's {kv} key-value heads"
    try:
        stage_layers(p, shape.layers)
    except UserError as error:
        yield str(error)
    if shape.experts and shape.experts % p.expert:
        yield f"parallel.expert={p.expert} does not divide the model's {shape.experts} experts"
    if not shape.experts and max(p.expert, p.expert_tensor) > 1:
        yield f"parallel.expert={p.expert}, expert_tensor={p.expert_tensor}: the model has no experts"
    if not shape.experts and cfg.experts.aux_loss:
        yield f"experts.aux_loss={cfg.experts.aux_loss:g}: the model has no experts to balance (use 0)"
    if shape.experts and p.tensor > 1 and not p.sequence:
        yield f"parallel.tensor={p.tensor} with a mixture of experts needs parallel.sequence=true (megatron-core)"
    tp = cfg.generation.tensor_parallel
    if tp > 0 and shape.heads % tp:
        yield f"generation.tensor_parallel={tp} does not divide the model's {shape.heads} attention heads"


def _batches(cfg: Config, world: int, stages: list[str]) -> Iterator[str]:
    dense = cfg.parallel.tensor * cfg.parallel.pipeline * cfg.parallel.context
    if dense < 1 or world % dense:
        return
    data = world // dense
    sizes = {
        "train": "algorithm.pivots_per_step",
        "warmup": "warmup.trajectories_per_step",
        "sft": "sft.trajectories_per_step",
        "e2e": "end_to_end.tasks_per_step",
    }
    for stage, key in sizes.items():
        steps = {"train": "algorithm.steps", "e2e": "end_to_end.steps"}.get(stage, f"{stage}.steps")
        if stage in stages and get(cfg, steps) != 0 and get(cfg, key) % data:
            yield f"{key}={get(cfg, key)} is not a multiple of the data-parallel size {data} (world {world} / {dense})"


def _files(cfg: Config, stages: list[str]) -> list[str]:
    found = []
    t = cfg.trajectories
    if "turns" in stages:
        if t.path is None and cfg.environment.name is None:
            found.append(
                "nothing to learn from: give trajectories.path=FILE (or folder, or glob), "
                "or an environment whose expert makes trajectories (domain=outfitters)"
            )
        elif t.path is not None and not glob.glob(t.path):
            found.append(f"trajectories.path={t.path}: no such file or folder, and no match as a glob")
    ood = cfg.evaluate.ood_path
    if "evaluate" in stages and ood is not None and not (Path(ood).exists() or glob.glob(ood)):
        found.append(f"evaluate.ood_path={ood}: no such file or folder, and no match as a glob")
    return found
