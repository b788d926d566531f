"""`pivotrl warmup` and `pivotrl sft`: supervised fine-tuning on demonstrated actions, by the same trainer.

Every turn is one sequence (its prompt as the engine would see it, then the demonstrated action; only the action
carries loss). The turns of a trajectory share their states, so the prefix tree computes each dialogue once.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from pivotrl.config import Config, Sft
from pivotrl.errors import UserError
from pivotrl.io import write_json
from pivotrl.policy.policy import MegatronPolicy
from pivotrl.policy.prefix_tree import TokenSequence
from pivotrl.profiling.stage import read_turns
from pivotrl.rendering.chat import Renderer
from pivotrl.setup import Workbench
from pivotrl.tracking.metrics import Tracker
from pivotrl.tracking.progress import progress
from pivotrl.training.checkpoint import export
from pivotrl.training.objective import SftObjective, token_weights
from pivotrl.training.sampling import EpochSampler
from pivotrl.training.saver import Saver, rows_digest
from pivotrl.trajectories.schema import Turn


def demonstrations(
    turns: Sequence[Turn], renderer: Renderer, context_length: int
) -> tuple[list[list[TokenSequence]], int]:
    """One list of (prompt, action) sequences per trajectory, and how many turns were beyond the context (left out)."""
    by_trajectory: dict[str, list[TokenSequence]] = defaultdict(list)
    beyond = 0
    for turn in turns:
        prompt = renderer.prompt_ids(turn.messages, turn.tools)
        action = renderer.completion_ids(turn.demonstration)
        if len(prompt) + len(action) > context_length:
            beyond += 1
        else:
            by_trajectory[turn.trajectory_id].append(TokenSequence.of(prompt, action))
    return list(by_trajectory.values()), beyond


def sft_step(policy: MegatronPolicy, sequences: Sequence[TokenSequence]) -> dict[str, float]:
    """One optimiser step on the mean negative log-likelihood of all action tokens."""
    weights = token_weights([len(s.targets) for s in sequences], "token_mean")
    return policy.train_step(list(sequences), SftObjective(torch.tensor(weights)), temperature=1.0)


def _train(cfg: Config, run_dir: Path, stage: str, split: str, settings: Sft, steps: int) -> dict[str, Any]:
    started = time.monotonic()
    directory = run_dir / stage
    bench = Workbench.build(cfg, run_dir) if stage == "sft" else Workbench.from_model(cfg, run_dir)
    rows, beyond = demonstrations(read_turns(run_dir, split), bench.renderer, cfg.model.context_length)
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
        seed=cfg.seed,
    )
    sampler = EpochSampler(rows, min(settings.trajectories_per_step, len(rows)), cfg.seed)
    identity = {"demonstrations": rows_digest((stage, s.token_ids) for row in rows for s in row)}
    saver = Saver(cfg, stage, directory, policy, steps, identity, extra={"trained": 0})
    start = saver.resume()
    with (
        Tracker(directory, cfg.tracking, stage, asdict(cfg), start_step=start) as tracker,
        progress(steps, stage, done=start) as bar,
        saver,
    ):
        for step in range(start, steps):
            clock = time.monotonic()
            stats = sft_step(policy, [s for trajectory in sampler.draw(step) for s in trajectory])
            saver.extra["trained"] += int(stats["tokens_unique"])
            tracker.log(step, stats | {"seconds": time.monotonic() - clock})
            bar.advance(1, note=f"loss {stats['loss']:.3f}")
            saver.step_done(step + 1, score=-stats["loss"])
        export(policy, bench, directory / "checkpoint")
    summary = {
        "steps": steps,
        "trajectories": len(rows),
        "beyond_context": beyond,
        "tokens": saver.extra,
        "checkpoint": str(directory / "checkpoint"),
        "seconds": saver.seconds_before + time.monotonic() - started,
    }
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
