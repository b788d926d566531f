"""`pivotrl train`: turn-level GRPO on pivots (method.md 1.3, Algorithm 1).

Each step: draw B pivots -> G local rollouts each -> verdicts -> group advantages -> prefix tree -> Megatron -> refit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from pivotrl.config import Algorithm, Config
from pivotrl.errors import UserError
from pivotrl.generation.engine import Engine
from pivotrl.io import append_jsonl, read_json, read_jsonl, write_json
from pivotrl.local_rollouts import LocalRoller, State, render_states, seed_for
from pivotrl.policy.policy import MegatronPolicy
from pivotrl.profiling.fingerprint import require_same
from pivotrl.profiling.profiler import draw_turns
from pivotrl.profiling.stage import present_fingerprint, read_turns
from pivotrl.rollouts import Rollout
from pivotrl.setup import Workbench
from pivotrl.tracking.metrics import Tracker
from pivotrl.tracking.progress import progress
from pivotrl.training.batch import Sample, make_batch, make_objective
from pivotrl.training.checkpoint import export
from pivotrl.training.gate import Mismatch, limit_for, require_agreement
from pivotrl.training.sampling import EpochSampler
from pivotrl.training.saver import Saver, rows_digest

GATE_ROLLOUTS = 16  # of the first batch; enough to see a wrong temperature, position or weight


def load_pivots(cfg: Config, run_dir: Path, bench: Workbench) -> tuple[list[State], str]:
    """The selected pivots with their prompts, and the hash of pi_0's weights.

    Refuses a profile of another policy (design idea 5).
    """
    path = run_dir / "select" / "pivots.jsonl"
    if not path.exists():
        raise UserError(f"{path} does not exist: run `pivotrl select run_dir={run_dir}` first")
    chosen = {row["turn_id"] for row in read_jsonl(path)}
    turns = draw_turns(read_turns(run_dir, "train"), cfg.profile.max_turns, cfg.seed)
    profile = read_json(run_dir / "profile" / "summary.json")["fingerprint"]
    present = present_fingerprint(bench, turns)
    for line in require_same(profile, present, cfg.algorithm.allow_foreign_profile):
        print(f"train: foreign profile allowed: {line}")
    pivots = [t for t in turns if t.id in chosen]
    states, _ = render_states(
        pivots, bench.renderer, bench.verifier, cfg.model.context_length, cfg.sampling.max_new_tokens
    )
    if not states:
        raise UserError(f"no pivot to train on in {path}: run `pivotrl select` with another set or lambda")
    return states, str(present["weights"])


def check_weight_version(groups: Sequence[Sequence[Rollout]], version: int) -> None:
    stale = {r.completion.weight_version for group in groups for r in group} - {version}
    if stale:
        raise RuntimeError(
            f"rollouts of weight version {sorted(stale)}, the trainer is at {version}: a refit was missed"
        )


def open_gate(policy: MegatronPolicy, samples: Sequence[Sample], cfg: Config, when: str) -> Mismatch:
    """Compare the trainer's log-probs of sampled tokens with the engine's; raises MismatchError beyond the limit."""
    checked = samples[:GATE_ROLLOUTS]
    trainer = policy.logprobs([s.sequence for s in checked], cfg.sampling.temperature)
    found = Mismatch.of([t.tolist() for t in trainer], [s.logprobs for s in checked])
    require_agreement(found, limit_for(cfg.precision.policy, cfg.generation.max_mismatch), when)
    return found


def reference_logprobs(policy: MegatronPolicy, samples: Sequence[Sample], temperature: float) -> list[Tensor]:
    with policy.reference():
        return policy.logprobs([s.sequence for s in samples], temperature)


def update(policy: MegatronPolicy, samples: list[Sample], algorithm: Algorithm, temperature: float) -> dict[str, float]:
    """One optimiser step on the samples: strictly on-policy, so the old log-probs are the current ones (ratio 1)."""
    reference = reference_logprobs(policy, samples, temperature) if algorithm.kl_beta > 0 else None
    objective = make_objective(samples, algorithm, old=None, reference=reference)
    stats = policy.train_step([s.sequence for s in samples], objective, temperature)
    tokens = stats["target_tokens"]
    for name in [n for n in stats if n.endswith("_sum")]:
        stats[name.removesuffix("_sum")] = stats.pop(name) / tokens
    return stats


def run_train(cfg: Config, run_dir: Path) -> dict[str, Any]:
    """Train on `select/pivots.jsonl`; writes train/{metrics,rollouts}.jsonl, train/checkpoint and train/summary.json.

    Raises UserError without pivots, on a foreign profile, and when trainer and engine disagree (MismatchError).
    """
    started = time.monotonic()
    directory, a = run_dir / "train", cfg.algorithm
    bench = Workbench.build(cfg, run_dir)
    states, weights = load_pivots(cfg, run_dir, bench)
    sampler = EpochSampler(states, a.pivots_per_step, cfg.seed)
    policy = MegatronPolicy.load(
        bench.start_policy,
        cfg.parallel,
        cfg.precision,
        a.optimizer,
        max_length=cfg.model.context_length,
        total_steps=a.steps,
        seed=cfg.seed,
        keep_reference=a.kl_beta > 0,
    )
    identity = {"pivots": rows_digest((s.turn.id, s.prompt_ids) for s in states), "reference policy": weights}
    extra = {"rollouts": 0, "prompt": 0, "cached": 0, "generated": 0}
    saver = Saver(cfg, "train", directory, policy, a.steps, identity, ("rollouts.jsonl",), extra)
    start = saver.resume()
    with (
        bench.engine() as engine,
        Tracker(directory, cfg.tracking, "train", asdict(cfg), start_step=start) as tracker,
        progress(a.steps, "train", done=start) as bar,
        saver,
    ):
        roller = LocalRoller(engine, bench.renderer, bench.verifier, bench.sampling)
        if start:
            engine.refit(policy.hf_weights(), version=start)  # it was started with pi_0
        for step in range(start, a.steps):
            clock = time.monotonic()
            drawn = sampler.draw(step)
            seeds = [seed_for(cfg.seed, "train", step, slot) for slot in range(len(drawn))]
            with saver.generating():
                groups = roller.groups(drawn, a.group_size, seeds)
            check_weight_version(groups, step)
            _record(directory, step, groups, saver.extra)
            metrics = {"seconds_generate": time.monotonic() - clock}
            batch = make_batch(drawn, groups, a)
            if step == 0 and batch.samples:
                metrics["gate_mismatch"] = open_gate(policy, batch.samples, cfg, "before the first step").mean
            metrics |= batch.metrics | _step(policy, engine, batch.samples, cfg, step)
            tracker.log(step, metrics | {"seconds": time.monotonic() - clock})
            bar.advance(1, note=f"reward {metrics['reward']:.3f} mixed {metrics['mixed_groups']:.2f}")
            saver.step_done(step + 1, score=metrics["reward"])
        export(policy, bench, directory / "checkpoint")
    seconds = saver.seconds_before + time.monotonic() - started
    summary = _finish(directory, cfg, len(states), saver.extra, seconds)
    saver.finished()
    return summary


def _step(policy: MegatronPolicy, engine: Engine, samples: list[Sample], cfg: Config, step: int) -> dict[str, float]:
    """Update and refit. A batch without any advantage is a named skip: no optimiser step, weights as they were."""
    clock = time.monotonic()
    if not samples:
        engine.refit(policy.hf_weights(), version=step + 1)
        return {"skipped": 1.0}
    stats = update(policy, samples, cfg.algorithm, cfg.sampling.temperature)
    limit = limit_for(cfg.precision.policy, cfg.generation.max_mismatch)
    found = Mismatch(stats["mismatch_abs"], float("nan"), (-1, -1, float("nan"), float("nan")))
    require_agreement(found, limit, f"at step {step}")
    stats["seconds_train"] = time.monotonic() - clock
    clock = time.monotonic()
    engine.refit(policy.hf_weights(), version=step + 1)
    stats["seconds_refit"] = time.monotonic() - clock
    return stats


def _record(directory: Path, step: int, groups: Sequence[Sequence[Rollout]], ledger: dict[str, int]) -> None:
    rollouts = [r for group in groups for r in group]
    append_jsonl(directory / "rollouts.jsonl", [{"step": step, **r.to_json()} for r in rollouts])
    ledger["rollouts"] += len(rollouts)
    ledger["prompt"] += sum(r.prompt_tokens for r in rollouts)
    ledger["cached"] += sum(r.completion.cached_prompt_tokens for r in rollouts)
    ledger["generated"] += sum(len(r.completion.token_ids) for r in rollouts)


def _finish(directory: Path, cfg: Config, pivots: int, ledger: dict[str, int], seconds: float) -> dict[str, Any]:
    rows = list(read_jsonl(directory / "metrics.jsonl"))
    window = max(1, len(rows) // 5)
    summary = {
        "steps": cfg.algorithm.steps,
        "pivots": pivots,
        "rollouts": ledger.pop("rollouts"),
        "tokens": ledger,
        "reward_first": sum(r["reward"] for r in rows[:window]) / window,
        "reward_last": sum(r["reward"] for r in rows[-window:]) / window,
        "checkpoint": str(directory / "checkpoint"),
        "seconds": seconds,
    }
    write_json(directory / "summary.json", summary)
    return summary
