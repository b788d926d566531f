"""`pivotrl warmup` and `pivotrl sft`: supervised fine-tuning on demonstrated actions, by the same trainer.

Every turn is one sequence (its prompt as the engine would see it, then the demonstrated action; only the action
carries loss). The turns of a trajectory share their states, so the prefix tree computes each dialogue once.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pivotrl.config import Config, Precision, Sft
from pivotrl.errors import UserError
from pivotrl.evaluation.drift import kl_to_start
from pivotrl.io import write_json
from pivotrl.policy.policy import MegatronPolicy
from pivotrl.policy.prefix_tree import TokenSequence
from pivotrl.profiling.sampled import read_sampled
from pivotrl.profiling.stage import read_turns
from pivotrl.rendering.chat import Renderer
from pivotrl.rendering.prompts import prompts_of
from pivotrl.setup import Workbench
from pivotrl.tracking.metrics import Tracker
from pivotrl.tracking.progress import progress
from pivotrl.training.checkpoint import export
from pivotrl.training.metrics import StepSums
from pivotrl.training.nonfinite import NonFiniteSteps, suspects
from pivotrl.training.objective import SftObjective, token_weights
from pivotrl.training.sampling import EpochSampler
from pivotrl.training.saver import Saver, rows_digest
from pivotrl.training.throughput import Work, memory
from pivotrl.trajectories.schema import Turn

KL_ROLLOUTS = 64  # of the profile, on which sft.max_kl is measured after every step


@dataclass(frozen=True)
class Demonstration:
    """A prompt and its demonstrated action, which alone carries loss."""

    turn_id: str
    sequence: TokenSequence


def demonstrations(
    turns: Sequence[Turn], renderer: Renderer, context_length: int, workers: int = 1
) -> tuple[list[list[Demonstration]], int]:
    """One list of demonstrations per trajectory, and how many turns were beyond the context (left out)."""
    by_trajectory: dict[str, list[Demonstration]] = defaultdict(list)
    beyond = 0
    prompts = prompts_of([(turn.messages, turn.tools) for turn in turns], renderer, workers)
    for turn, prompt in zip(turns, prompts, strict=True):
        action = renderer.completion_ids(turn.demonstration)
        if len(prompt) + len(action) > context_length:
            beyond += 1
        else:
            by_trajectory[turn.trajectory_id].append(Demonstration(turn.id, TokenSequence.of(prompt, action)))
    return list(by_trajectory.values()), beyond


def sft_step(
    policy: MegatronPolicy, rows: Sequence[Demonstration], step: int, precision: Precision, nonfinite: NonFiniteSteps
) -> dict[str, float]:
    """One optimiser step on the mean negative log-likelihood of all action tokens.

    A non-finite step leaves the weights, and is counted; raises NonFiniteError when there were too many.
    """
    clock = time.monotonic()
    sequences = [row.sequence for row in rows]
    weights = token_weights([len(s.targets) for s in sequences], "token_mean")
    stats = policy.train_step(sequences, SftObjective(torch.tensor(weights)), temperature=1.0)
    seconds = time.monotonic() - clock
    if stats["skipped"]:
        ids = [row.turn_id for row in rows]
        nonfinite.record(step, stats, ids, suspects(ids, [policy.logprobs(sequences, temperature=1.0)]))
    sums, work = StepSums(), Work.of(policy)
    sums.add(stats)
    work.train(stats["tokens_unique"], stats["target_tokens"])
    speed = {"seconds_train": seconds, "train_tokens_per_second": stats["tokens_unique"] / seconds}
    return sums.finish() | speed | memory() | work.mfu(seconds, precision)


class KlStop:
    """KL(pi_0 || pi) per token on what pi_0 sampled when it was profiled: where SFT has moved as far as another policy.

    Raises UserError without a profile.
    """

    def __init__(self, cfg: Config, run_dir: Path, renderer: Renderer, policy: MegatronPolicy) -> None:
        assert cfg.sft.max_kl is not None
        self.limit, self.last = cfg.sft.max_kl, 0.0
        sampled = read_sampled(run_dir, renderer, KL_ROLLOUTS, cfg.seed)
        if not sampled:
            raise UserError(
                f"sft.max_kl needs rollouts of pi_0: run `pivotrl profile run_dir={run_dir}` first, or set it to null"
            )
        self.sequences = [TokenSequence.of(s.prompt_ids, s.token_ids) for s in sampled]
        self.start = [t.tolist() for t in policy.logprobs(self.sequences, 1.0)]

    def measure(self, policy: MegatronPolicy) -> float:
        trained = [t.tolist() for t in policy.logprobs(self.sequences, 1.0)]
        self.last = float(kl_to_start(trained, self.start)["kl"])
        return self.last


def _train(cfg: Config, run_dir: Path, stage: str, split: str, settings: Sft, steps: int) -> dict[str, Any]:
    started = time.monotonic()
    directory = run_dir / stage
    bench = Workbench.build(cfg, run_dir) if stage == "sft" else Workbench.from_model(cfg, run_dir)
    turns = read_turns(run_dir, split)
    rows, beyond = demonstrations(turns, bench.renderer, cfg.model.context_length, cfg.rendering.workers)
    if not rows:
        raise UserError(
            f"{stage}: no turn of the {split} split fits model.context_length={cfg.model.context_length} "
            f"({beyond} turns are longer); see {run_dir / 'turns' / 'summary.json'} for the sizes of the splits"
        )
    policy = MegatronPolicy.load(
        bench.start_policy,
        cfg.parallel,
        cfg.precision,
        settings.optimizer,
        max_length=cfg.model.context_length,
        total_steps=steps,
        experts=cfg.experts,
        seed=cfg.seed,
    )
    stop = KlStop(cfg, run_dir, bench.renderer, policy) if settings.max_kl is not None else None
    sampler = EpochSampler(rows, min(settings.trajectories_per_step, len(rows)), cfg.seed)
    identity = {"demonstrations": rows_digest((d.turn_id, d.sequence.token_ids) for row in rows for d in row)}
    saver = Saver(cfg, stage, directory, policy, steps, identity, extra={"trained": 0})
    start = taken = saver.resume()
    nonfinite = NonFiniteSteps(directory, settings.optimizer.max_nonfinite_steps, start)
    with (
        Tracker(directory, cfg.tracking, stage, asdict(cfg), start_step=start) as tracker,
        progress(steps, stage, done=start) as bar,
        saver,
    ):
        for step in range(start, steps):
            clock = time.monotonic()
            drawn = [row for trajectory in sampler.draw(step) for row in trajectory]
            stats = sft_step(policy, drawn, step, cfg.precision, nonfinite)
            saver.extra["trained"] += int(stats["tokens_unique"])
            taken = step + 1
            if stop is not None:
                stats["kl_to_start"] = stop.measure(policy)
            tracker.log(step, stats | {"seconds": time.monotonic() - clock})
            bar.advance(1, note=f"loss {stats['loss']:.3f}")
            if stop is not None and stats["kl_to_start"] >= stop.limit:
                break
            saver.step_done(taken, score=-stats["loss"])
        export(policy, bench, directory / "checkpoint")
    summary = {
        "steps": taken,
        "trajectories": len(rows),
        "beyond_context": beyond,
        "tokens": saver.extra,
        "checkpoint": str(directory / "checkpoint"),
        "seconds": saver.seconds_before + time.monotonic() - started,
    }
    if stop is not None:
        summary |= {"max_kl": stop.limit, "kl_to_start": stop.last, "reached": stop.last >= stop.limit}
    write_json(directory / "summary.json", summary)
    saver.finished()
    return summary


def run_warmup(cfg: Config, run_dir: Path) -> dict[str, Any]:
    """SFT of the model on the warm-up split: gives pi_0. With warmup.steps=0 pi_0 is the model itself."""
    steps = cfg.warmup.steps or 0
    if steps == 0:
        summary: dict[str, Any] = {"steps": 0, "note": "warmup.steps=0: the start policy is the model itself"}
        write_json(run_dir / "warmup" / "summary.json", summary)
        return summary
    return _train(cfg, run_dir, "warmup", "warmup", cfg.warmup, steps)


def run_sft(cfg: Config, run_dir: Path) -> dict[str, Any]:
    """The SFT baseline: from pi_0, on the trajectories that PivotRL trains on, with as many optimiser steps."""
    steps = cfg.algorithm.steps if cfg.sft.steps is None else cfg.sft.steps
    return _train(cfg, run_dir, "sft", "train", cfg.sft, steps)
