"""`pivotrl e2e`: the end-to-end baseline, GRPO on whole episodes in the environment.

Each step: B tasks -> G episodes each, every turn sampled by the policy -> one reward an episode (its success) -> group
advantages over the episodes of a task -> loss on all assistant turns, as they were generated -> refit. The turns of an
episode, and the episodes of a task, share their beginnings: the prefix tree computes those once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from pivotrl.config import Algorithm, Config
from pivotrl.environments.registry import get_environment
from pivotrl.environments.rollout import EpisodeResult
from pivotrl.errors import UserError
from pivotrl.evaluation.in_domain import EngineActor, SampledAction, episode_row, play_together
from pivotrl.evaluation.tasks import task_ids
from pivotrl.evaluation.watch import CURVE, Watcher
from pivotrl.io import append_jsonl
from pivotrl.local_rollouts import seed_for
from pivotrl.policy.policy import MegatronPolicy
from pivotrl.policy.prefix_tree import TokenSequence
from pivotrl.profiling.ledger import Cost
from pivotrl.setup import Workbench
from pivotrl.tracking.metrics import Tracker
from pivotrl.tracking.progress import progress
from pivotrl.training import grpo
from pivotrl.training.advantages import advantages
from pivotrl.training.batch import Batch, Scored
from pivotrl.training.checkpoint import export
from pivotrl.training.handover import Handover
from pivotrl.training.nonfinite import NonFiniteSteps
from pivotrl.training.replay import replayed
from pivotrl.training.sampling import EpochSampler
from pivotrl.training.saver import Saver, rows_digest
from pivotrl.training.update import needs_reference, optimizer_steps

TOO_MANY_ERRORS = 0.5  # share of a step's episodes that the environment may break before the run stops


def reward(result: EpisodeResult) -> float | None:
    """1 for success, 0 for failure; None where the environment broke: that is no failure of the policy."""
    return None if result.outcome is None else float(result.outcome.success)


def episode_turns(
    groups: Sequence[Sequence[EpisodeResult]], algorithm: Algorithm, replay: bool = False
) -> list[Scored]:
    """Every turn of every scored episode. `groups[i]` are the episodes of one task: the group of the advantage.

    `replay`: as in `make_batch`.

    The advantage is made of episodes, so it is given with each turn: a long episode counts once in its group.
    """
    turns = []
    for number, group in enumerate(groups):
        values = advantages([reward(r) for r in group], algorithm.advantage, algorithm.std_epsilon)
        for result, advantage in zip(group, values, strict=True):
            if advantage is None:
                continue
            for place, action in enumerate(result.actions):
                assert isinstance(action, SampledAction)
                assert action.completion is not None
                ids = action.completion.token_ids
                name = f"{result.task.id}/{result.trial}#{place}"
                turns.append(
                    Scored(
                        name,
                        number,
                        TokenSequence.of(action.prompt_ids, ids, replayed(name, action.completion, replay)),
                        action.completion.logprobs,
                        reward(result) or 0.0,
                        fixed_advantage=advantage,
                    )
                )
    return turns


def group_metrics(groups: Sequence[Sequence[EpisodeResult]]) -> dict[str, float]:
    """Reward, its deviation within groups, and shape of the episodes; the names of `pivotrl train` where they agree."""
    results = [r for group in groups for r in group]
    scored = [v for group in groups if (v := [x for r in group if (x := reward(r)) is not None])]
    flat = [x for v in scored for x in v]
    means = [sum(v) / len(v) for v in scored]
    return {
        "reward": sum(flat) / len(flat) if flat else math.nan,
        "group_std": sum(math.sqrt(m * (1 - m)) for m in means) / len(means) if means else math.nan,
        "mixed_groups": sum(0 < m < 1 for m in means) / len(groups),
        "wrong_groups": means.count(0.0) / len(groups),
        "right_groups": means.count(1.0) / len(groups),
        "unscorable": (len(results) - len(flat)) / len(results),
        "malformed": sum(bool(a.problems) for r in results for a in r.actions) / max(sum(r.turns for r in results), 1),
        "episode_turns": sum(r.turns for r in results) / len(results),
    }


def check_errors(results: Sequence[EpisodeResult], directory: Path) -> None:
    """Broken episodes go to errors.jsonl; where most are, the environment is down: stop."""
    broken = [r for r in results if r.outcome is None]
    append_jsonl(directory / "errors.jsonl", ({"task": r.task.id, "error": r.error} for r in broken))
    if len(broken) > TOO_MANY_ERRORS * len(results):
        raise UserError(
            f"e2e: the environment broke {len(broken)} of {len(results)} episodes; the first: "
            f"{str(broken[0].error).splitlines()[0]}. See {directory / 'errors.jsonl'}"
        )


def run_end_to_end(cfg: Config, run_dir: Path) -> dict[str, Any]:
    """Train on the tasks of the train split; writes e2e/{metrics,episodes,curve}.jsonl, e2e/checkpoint, summary.json.

    Raises UserError without an environment or tasks, and when the environment breaks most episodes of a step.
    """
    started = time.monotonic()
    directory, e = run_dir / "e2e", cfg.end_to_end
    if cfg.environment.name is None:
        raise UserError("e2e: end-to-end RL needs an environment (environment=outfitters)")
    bench = Workbench.build(cfg, run_dir)
    environment = get_environment(cfg.environment.name, cfg.environment.options)
    tasks = [environment.task(task_id) for task_id in task_ids(run_dir, "train")]
    if not tasks:
        raise UserError(f"e2e: {run_dir / 'turns'} has no task in the train split")
    sampler = EpochSampler(tasks, min(e.tasks_per_step, len(tasks)), cfg.seed)
    policy = MegatronPolicy.load(
        bench.start_policy,
        cfg.parallel,
        cfg.precision,
        cfg.algorithm.optimizer,
        max_length=cfg.model.context_length,
        total_steps=e.steps * optimizer_steps(cfg.algorithm),
        experts=cfg.experts,
        seed=cfg.seed,
        keep_reference=needs_reference(cfg.algorithm),
    )
    identity = {"tasks": rows_digest((task.id, ()) for task in tasks)}
    saver = Saver(cfg, "e2e", directory, policy, e.steps, identity, ("episodes.jsonl", "errors.jsonl", CURVE))
    start = saver.resume()
    spent = Cost(**saver.extra.get("spent", {}))
    nonfinite = NonFiniteSteps(directory, cfg.algorithm.optimizer.max_nonfinite_steps, start)
    handover = Handover(policy)
    with (
        bench.engine() as engine,
        Tracker(directory, cfg.tracking, "e2e", asdict(cfg), start_step=start) as tracker,
        progress(e.steps, "e2e", done=start) as bar,
        saver,
    ):
        watcher = Watcher(cfg, run_dir, bench, directory)
        if start:
            handover.catch_up(engine, version=start)
        else:
            watcher.look(engine, 0, 0)
        for step in range(start, e.steps):
            clock = time.monotonic()
            drawn = sampler.draw(step)
            seed = seed_for(cfg.seed, "e2e", step)
            actor = EngineActor(engine, bench.renderer, bench.sampling, cfg.model.context_length, seed)
            play = partial(play_together, environment, drawn, actor, cfg.environment.max_turns, e.group_size)
            with saver.generating():
                results = handover.generate(engine, play)
            groups = [results[i : i + e.group_size] for i in range(0, len(results), e.group_size)]
            append_jsonl(directory / "episodes.jsonl", ({"step": step, **episode_row(r)} for r in results))
            check_errors(results, directory)
            spent += actor.spent
            metrics = {"seconds_generate": time.monotonic() - clock, "rollouts": float(actor.spent.rollouts)}
            batch = Batch(episode_turns(groups, cfg.algorithm, cfg.experts.replay), group_metrics(groups))
            if step == 0 and batch.rollouts:
                metrics["gate_mismatch"] = grpo.open_gate(policy, batch.rollouts, cfg, "before the first step").mean
            metrics |= batch.metrics | grpo.learn(policy, engine, handover, batch, cfg, step, nonfinite)
            tracker.log(step, metrics | handover.ledger.metrics() | {"seconds": time.monotonic() - clock})
            success = watcher.look(engine, step + 1, spent.rollouts, last=step + 1 == e.steps)
            bar.advance(1, note=f"reward {metrics['reward']:.3f} mixed {metrics['mixed_groups']:.2f}")
            saver.extra = {"spent": spent.to_json()}
            saver.step_done(step + 1, score=success if cfg.watch.every else metrics["reward"])
        exported = saver.choose()
        export(policy, bench, directory / "checkpoint")
    facts = {"steps": e.steps, "tasks": len(tasks), "engine": {"e2e": spent.to_json()}, "exported_step": exported}
    summary = grpo.finish(directory, facts, spent, saver.seconds_before + time.monotonic() - started)
    saver.finished()
    return summary
