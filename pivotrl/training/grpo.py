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
from pivotrl.evaluation.watch import CURVE, Watcher
from pivotrl.generation.engine import Engine
from pivotrl.io import append_jsonl, keeps_books, read_json, read_jsonl, write_json
from pivotrl.local_rollouts import LocalRoller, State, states_of
from pivotrl.peers import sum_of_all
from pivotrl.policy.policy import MegatronPolicy
from pivotrl.profiling.fingerprint import require_same
from pivotrl.profiling.ledger import Cost, added
from pivotrl.profiling.profiler import draw_turns
from pivotrl.profiling.stage import present_fingerprint, read_turns
from pivotrl.profiling.statistics import demonstrated, reward_facts
from pivotrl.rollouts import Rollout, TokenCounts
from pivotrl.setup import Workbench
from pivotrl.tracking.metrics import Tracker
from pivotrl.tracking.progress import progress
from pivotrl.training.aside import hand_over, recorded_rollouts
from pivotrl.training.batch import Batch, Scored, make_batch
from pivotrl.training.canary import canary_logprobs, check_canary
from pivotrl.training.checkpoint import export
from pivotrl.training.gate import Mismatch, limit_for, require_agreement
from pivotrl.training.handover import Handover, check_weight_version
from pivotrl.training.nonfinite import NonFiniteSteps
from pivotrl.training.pivot_source import Groups, PivotSource, keep_mixed
from pivotrl.training.rollout_tables import rollout_tables
from pivotrl.training.saver import Saver, rows_digest
from pivotrl.training.update import needs_reference, optimizer_steps, update
from pivotrl.verifiers.runner import take_counts

VERIFIER = "verifier/"  # prefix of what the verifier's runner counted in a step
GROUPS = "groups.jsonl"
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
    states, _ = states_of(pivots, cfg, run_dir, bench.renderer, bench.verifier)
    if not states:
        raise UserError(f"no pivot to train on in {path}: run `pivotrl select` with another set or lambda")
    return states, str(present["weights"])


def open_gate(policy: MegatronPolicy, rollouts: Sequence[Scored], cfg: Config, when: str) -> Mismatch:
    """Compare the trainer's log-probs of sampled tokens with the engine's; raises MismatchError beyond the limit."""
    checked = rollouts[:GATE_ROLLOUTS]
    trainer = policy.logprobs([s.sequence for s in checked], cfg.sampling.temperature)
    found = Mismatch.of([t.tolist() for t in trainer], [s.logprobs for s in checked], [s.id for s in checked])
    require_agreement(found, limit_for(cfg.precision.policy, cfg.generation.max_mismatch), when)
    return found


def run_train(cfg: Config, run_dir: Path) -> dict[str, Any]:
    """Train on `select/pivots.jsonl`; writes train/{metrics,rollouts,groups,curve}.jsonl, checkpoint, summary.json.

    Raises UserError without pivots, on a foreign profile, and when trainer and engine disagree (MismatchError).
    """
    started = time.monotonic()
    directory, a = run_dir / "train", cfg.algorithm
    bench = Workbench.build(cfg, run_dir)
    states, weights = load_pivots(cfg, run_dir, bench)
    policy = MegatronPolicy.load(
        bench.start_policy,
        cfg.parallel,
        cfg.precision,
        a.optimizer,
        max_length=cfg.model.context_length,
        total_steps=a.steps * optimizer_steps(a),
        experts=cfg.experts,
        seed=cfg.seed,
        keep_reference=needs_reference(a),
    )
    identity = {"pivots": rows_digest((s.turn.id, s.prompt_ids) for s in states), "reference policy": weights}
    logs = ("rollouts.jsonl", GROUPS, CURVE)
    saver = Saver(cfg, "train", directory, policy, a.steps, identity, logs)
    start = saver.resume()
    spent = TokenCounts(**saver.extra.get("spent", {}))
    nonfinite = NonFiniteSteps(directory, a.optimizer.max_nonfinite_steps, start)
    handover, sender = hand_over(policy, cfg, directory)
    with (
        bench.engine(sender) as engine,
        Tracker(directory, cfg.tracking, "train", asdict(cfg), start_step=start) as tracker,
        progress(a.steps, "train", done=start) as bar,
        saver,
    ):
        roller = LocalRoller(engine, bench.renderer, bench.training_verifier(), bench.sampling)
        source = PivotSource(states, roller, cfg, run_dir)
        source.restore(saver.extra.get("pivots"), start)
        handover.begin(engine, start, lambda: recorded_rollouts(directory / logs[0], start, source.states))
        watcher = Watcher(cfg, run_dir, bench, directory)
        take_counts(roller.verifier)  # those of the demonstrations are no step's
        if start:
            handover.catch_up(engine, version=start)
        else:
            watcher.look(engine, 0, 0)

        def sample(step: int) -> tuple[list[State], Groups]:
            drawn, groups = source.sample(step)
            _record(directory, step, drawn, groups)
            return drawn, groups

        for step in range(start, a.steps):
            clock = time.monotonic()
            with saver.generating():
                metrics: dict[str, float] = source.renew(step)
                drawn, groups = handover.rollouts(engine, sample, step)
            metrics |= check_weight_version(groups, step, handover.lags)
            used = TokenCounts.of(r for group in groups for r in group)
            spent += used
            batch = make_batch(drawn, groups, a, cfg.experts.replay)
            if step == 0 and batch.rollouts:
                metrics["gate_mismatch"] = open_gate(policy, batch.rollouts, cfg, "before the first step").mean
            if a.dynamic_sampling:
                batch = keep_mixed(batch, len(groups))
            metrics |= batch.metrics | learn(policy, engine, handover, batch, cfg, step, nonfinite)
            counted = sum_of_all(take_counts(roller.verifier))
            metrics |= {VERIFIER + name: count for name, count in counted.items()}
            metrics |= handover.ledger.metrics() | {"seconds": time.monotonic() - clock}
            metrics["tokens_per_second"] = (used.prompt + used.generated) / metrics["seconds"]
            tracker.log(step, metrics, rollout_tables(groups, step, cfg.tracking))
            success = watcher.look(engine, step + 1, spent.rollouts, last=step + 1 == a.steps)
            bar.advance(1, note=f"reward {metrics['reward']:.3f} mixed {metrics['mixed_groups']:.2f}")
            saver.extra = {"spent": spent.to_json(), "pivots": source.state()}
            saver.step_done(step + 1, score=success if cfg.watch.every else metrics["reward"])
        exported = saver.choose()
        export(policy, bench, directory / "checkpoint")
    facts = {"steps": a.steps, "pivots": source.pivots, "engine": source.costs(), "exported_step": exported}
    summary = finish(directory, facts, spent, saver.seconds_before + time.monotonic() - started)
    saver.finished()
    return summary


def learn(
    policy: MegatronPolicy,
    engine: Engine,
    handover: Handover,
    batch: Batch,
    cfg: Config,
    step: int,
    nonfinite: NonFiniteSteps,
) -> dict[str, float]:
    """Update, then refit the engine to version step + 1: also where no step was taken, since it slept meanwhile.

    A batch without any advantage, and a non-finite step, leave the weights as they were. The first refit of
    this process is checked by a canary: one rollout of the batch, scored by trainer and engine. Where rollouts may be
    of older weights, their log-probs say nothing about the engine, and every refit is checked so.
    """
    with handover.training():
        limit = limit_for(cfg.precision.policy, cfg.generation.max_mismatch)
        stats, _ = update(policy, batch, cfg, step, nonfinite, None if handover.lags else limit)
        wanted = batch.rollouts and (handover.refits == 0 or handover.lags)
        canary = batch.rollouts[0].sequence if wanted else None
        expected = canary_logprobs(policy, canary) if canary is not None else []
    stats |= handover.settle()
    clock = time.monotonic()
    handover.to_engine(engine, version=step + 1)
    stats["seconds_refit"] = time.monotonic() - clock
    stats |= {f"refit_{name}": value for name, value in policy.refit_source.traffic(engine.layout).items()}
    if canary is not None:
        found = check_canary(engine, canary, expected, limit, batch.rollouts[0].id)
        if step == 0 or handover.lags:  # a run that continues logs what it would have without the interruption
            stats["canary_mismatch"] = found.mean
    return stats


def _record(directory: Path, step: int, states: Sequence[State], groups: Sequence[Sequence[Rollout]]) -> None:
    rows = [{"step": step, **r.to_json()} for group in groups for r in group]
    append_jsonl(directory / "rollouts.jsonl", rows)
    outcomes = [
        {
            "step": step,
            "turn_id": state.turn.id,
            "demonstration": demonstrated(state.turn),
            **reward_facts([r.verdict.reward for r in group]),
        }
        for state, group in zip(states, groups, strict=True)
    ]
    append_jsonl(directory / GROUPS, outcomes)


def finish(directory: Path, facts: dict[str, Any], spent: TokenCounts | Cost, seconds: float) -> dict[str, Any]:
    """Write the summary of a stage of RL: `facts` of its own, then what its verifier counted, cost, reward of the first
    and last fifth, result."""
    if not keeps_books():
        return {}
    rows = list(read_jsonl(directory / "metrics.jsonl"))
    window = max(1, len(rows) // 5)
    counts = ({k.removeprefix(VERIFIER): v for k, v in row.items() if k.startswith(VERIFIER)} for row in rows)
    if counted := added(counts):
        facts = facts | {"verifier": counted}
    summary = facts | {
        "rollouts": spent.rollouts,
        "tokens": {"prompt": spent.prompt, "cached": spent.cached, "generated": spent.generated},
        "reward_first": sum(float(r["reward"]) for r in rows[:window]) / window,
        "reward_last": sum(float(r["reward"]) for r in rows[-window:]) / window,
        "checkpoint": str(directory / "checkpoint"),
        "seconds": seconds,
    }
    write_json(directory / "summary.json", summary)
    return summary
