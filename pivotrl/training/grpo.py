"""`pivotrl train`: turn-level GRPO on pivots (method.md 1.3, Algorithm 1).

Each step: draw B pivots -> G local rollouts each -> verdicts -> group advantages -> prefix tree -> Megatron -> refit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pivotrl.config import Config
from pivotrl.errors import UserError
from pivotrl.generation.engine import Engine
from pivotrl.io import append_jsonl, read_json, read_jsonl, write_json
from pivotrl.local_rollouts import LocalRoller, State, render_states
from pivotrl.policy.policy import MegatronPolicy
from pivotrl.profiling.fingerprint import require_same
from pivotrl.profiling.profiler import draw_turns
from pivotrl.profiling.stage import present_fingerprint, read_turns
from pivotrl.rollouts import Rollout, TokenCounts
from pivotrl.setup import Workbench
from pivotrl.tracking.metrics import Tracker
from pivotrl.tracking.progress import progress
from pivotrl.training.batch import Batch, Scored, make_batch
from pivotrl.training.checkpoint import export
from pivotrl.training.gate import Mismatch, limit_for, require_agreement
from pivotrl.training.nonfinite import NonFiniteSteps
from pivotrl.training.pivot_source import PivotSource, keep_mixed
from pivotrl.training.update import needs_reference, optimizer_steps, update

GATE_ROLLOUTS = 16  # of the first batch; enough to see a wrong temperature, position or weight


def load_pivots(cfg: Config, run_dir: Path, bench: Workbench) -> list[State]:
    """The selected pivots with their prompts; refuses a profile of another policy (design idea 5)."""
    path = run_dir / "select" / "pivots.jsonl"
    if not path.exists():
        raise UserError(f"{path} does not exist: run `pivotrl select run_dir={run_dir}` first")
    chosen = {row["turn_id"] for row in read_jsonl(path)}
    turns = draw_turns(read_turns(run_dir, "train"), cfg.profile.max_turns, cfg.seed)
    profile = read_json(run_dir / "profile" / "summary.json")["fingerprint"]
    for line in require_same(profile, present_fingerprint(bench, turns), cfg.algorithm.allow_foreign_profile):
        print(f"train: foreign profile allowed: {line}")
    pivots = [t for t in turns if t.id in chosen]
    states, _ = render_states(
        pivots,
        bench.renderer,
        bench.verifier,
        cfg.model.context_length,
        cfg.sampling.max_new_tokens,
        cfg.rendering.workers,
        run_dir / "prompts" if cfg.rendering.cache else None,
    )
    if not states:
        raise UserError(f"no pivot to train on in {path}: run `pivotrl select` with another set or lambda")
    return states


def check_weight_version(groups: Sequence[Sequence[Rollout]], version: int) -> None:
    stale = {r.completion.weight_version for group in groups for r in group} - {version}
    if stale:
        raise RuntimeError(
            f"rollouts of weight version {sorted(stale)}, the trainer is at {version}: a refit was missed"
        )


def open_gate(policy: MegatronPolicy, rollouts: Sequence[Scored], cfg: Config, when: str) -> Mismatch:
    """Compare the trainer's log-probs of sampled tokens with the engine's; raises MismatchError beyond the limit."""
    checked = rollouts[:GATE_ROLLOUTS]
    trainer = policy.logprobs([s.sequence for s in checked], cfg.sampling.temperature)
    found = Mismatch.of([t.tolist() for t in trainer], [s.logprobs for s in checked])
    require_agreement(found, limit_for(cfg.precision.policy, cfg.generation.max_mismatch), when)
    return found


def run_train(cfg: Config, run_dir: Path) -> dict[str, Any]:
    """Train on `select/pivots.jsonl`; writes train/{metrics,rollouts}.jsonl, train/checkpoint and train/summary.json.

    Raises UserError without pivots, on a foreign profile, and when trainer and engine disagree (MismatchError).
    """
    started = time.monotonic()
    directory, a = run_dir / "train", cfg.algorithm
    bench = Workbench.build(cfg, run_dir)
    states = load_pivots(cfg, run_dir, bench)
    policy = MegatronPolicy.load(
        bench.start_policy,
        cfg.parallel,
        cfg.precision,
        a.optimizer,
        max_length=cfg.model.context_length,
        total_steps=a.steps * optimizer_steps(a),
        seed=cfg.seed,
        keep_reference=needs_reference(a),
    )
    spent, nonfinite = TokenCounts(), NonFiniteSteps(directory, a.optimizer.max_nonfinite_steps)
    (directory / "rollouts.jsonl").unlink(missing_ok=True)
    with (
        bench.engine() as engine,
        Tracker(directory, cfg.tracking, "train", asdict(cfg), start_step=0) as tracker,
        progress(a.steps, "train") as bar,
    ):
        source = PivotSource(states, LocalRoller(engine, bench.renderer, bench.verifier, bench.sampling), cfg, run_dir)
        source.restore(None, step=0)
        version = engine.weight_version  # of updates: a step that changes no weights is not followed by a refit
        for step in range(a.steps):
            clock = time.monotonic()
            metrics: dict[str, float] = source.renew(step)
            generating = time.monotonic()
            drawn, groups = source.sample(step)
            check_weight_version(groups, version)
            used = _record(directory, step, groups)
            spent += used
            metrics["seconds_generate"] = time.monotonic() - generating
            batch = make_batch(drawn, groups, a)
            if step == 0 and batch.rollouts:
                metrics["gate_mismatch"] = open_gate(policy, batch.rollouts, cfg, "before the first step").mean
            if a.dynamic_sampling:
                batch = keep_mixed(batch, len(groups))
            stats, version = _step(policy, engine, batch, cfg, step, nonfinite, version)
            metrics |= batch.metrics | stats | {"seconds": time.monotonic() - clock}
            metrics["tokens_per_second"] = (used.prompt + used.generated) / metrics["seconds"]
            tracker.log(step, metrics)
            bar.advance(1, note=f"reward {metrics['reward']:.3f} mixed {metrics['mixed_groups']:.2f}")
    export(policy, bench, directory / "checkpoint")
    return _finish(directory, cfg, source, spent, time.monotonic() - started)


def _step(
    policy: MegatronPolicy,
    engine: Engine,
    batch: Batch,
    cfg: Config,
    step: int,
    nonfinite: NonFiniteSteps,
    version: int,
) -> tuple[dict[str, float], int]:
    """Update and refit; returns the metrics and the version of the weights that the engine then has.

    Where no optimiser step was taken (no signal in the batch, or a non-finite step) the weights are as they were, and
    the engine is left alone.
    """
    stats, changed = update(policy, batch, cfg, step, nonfinite)
    if "mismatch_abs" in stats and not stats["nonfinite"]:
        limit = limit_for(cfg.precision.policy, cfg.generation.max_mismatch)
        found = Mismatch(stats["mismatch_abs"], stats["mismatch_max"], (-1, -1, float("nan"), float("nan")))
        require_agreement(found, limit, f"at step {step}")
    if not changed:
        return stats, version
    clock = time.monotonic()
    engine.refit(policy.hf_weights(), version=version + 1)
    stats["seconds_refit"] = time.monotonic() - clock
    return stats, version + 1


def _record(directory: Path, step: int, groups: Sequence[Sequence[Rollout]]) -> TokenCounts:
    rollouts = [r for group in groups for r in group]
    append_jsonl(directory / "rollouts.jsonl", [{"step": step, **r.to_json()} for r in rollouts])
    return TokenCounts.of(rollouts)


def _finish(directory: Path, cfg: Config, source: PivotSource, spent: TokenCounts, seconds: float) -> dict[str, Any]:
    rows = list(read_jsonl(directory / "metrics.jsonl"))
    window = max(1, len(rows) // 5)
    summary = {
        "steps": cfg.algorithm.steps,
        "pivots": source.pivots,
        "rollouts": spent.rollouts,
        "tokens": {"prompt": spent.prompt, "cached": spent.cached, "generated": spent.generated},
        "engine": source.costs(),
        "reward_first": sum(float(r["reward"]) for r in rows[:window]) / window,
        "reward_last": sum(float(r["reward"]) for r in rows[-window:]) / window,
        "checkpoint": str(directory / "checkpoint"),
        "seconds": seconds,
    }
    write_json(directory / "summary.json", summary)
    return summary
