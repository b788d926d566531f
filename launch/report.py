"""`pivotrl show-layout`: what each rank of the configured job holds, and the estimate of its memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from launch import memory
from launch.checks import raw_config
from launch.jobs import world_size
from pivotrl.config import Config
from pivotrl.errors import UserError


def layout(cfg: Config, rank: int | None = None) -> str:
    """The layout of the model on the processes of `cfg.cluster`. Raises UserError where it does not fit."""
    from pivotrl.layout import Layout
    from pivotrl.models.holdings import describe
    from pivotrl.models.mapping import plan
    from pivotrl.models.registry import family_for

    raw = _model(cfg)
    family = family_for(raw)
    dims = replace(family.dims(raw), mtp_kinds=())  # which are not trained
    found = Layout.of(cfg.parallel, world_size(cfg))
    return describe(found, plan(family.rules, dims), dims, memory.BYTES[cfg.precision.policy], rank)


def estimate(cfg: Config) -> str:
    """GiB of each part of the fullest process, trainer and engine."""
    raw = _model(cfg)
    model = memory.read_model(raw.get("text_config", raw))
    trainer, engine = memory.training_gib(model, cfg, world_size(cfg)), memory.engine_gib(model, cfg)
    lines = [
        f"memory of the fullest process in GiB, by estimate (micro-batches of {memory.tokens_of(cfg)} unique tokens):",
        _line("trainer", trainer),
        _line("engine", engine),
    ]
    if cfg.cluster.gpus_per_node:
        share = cfg.generation.gpu_memory_utilization * (cfg.cluster.gpu_memory_gib or 0)
        room = share - engine["engine weights"]
        if share and room > 0:
            sequences = int(room / engine["KV cache of one sequence"])
            lines.append(f"  of its share of {share:.0f} GiB, room for {sequences} sequences of full length")
    return "\n".join(lines)


def _line(what: str, parts: dict[str, float]) -> str:
    listed = ", ".join(f"{name} {_gib(gib)}" for name, gib in parts.items())
    return f"  {what} {_gib(sum(parts.values()))}: {listed}"


def _gib(value: float) -> str:
    return f"{value:.1f}" if value >= 1 else f"{value:.3f}"


def _model(cfg: Config) -> dict[str, Any]:
    if cfg.model.path.startswith("builtin:"):
        from pivotrl.models.builtin import resolve_model
        from pivotrl.models.folder import ModelFolder

        return ModelFolder(resolve_model(cfg.model.path)).config
    raw = raw_config(cfg)
    if raw is None:
        raise UserError(f"model.path={cfg.model.path} has no readable config.json: give the folder of the model")
    return raw
