"""What pi_0 sampled when it was profiled, with its prompts: for KL to pi_0 and for candidates of Theorem 3.3."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from pivotrl.local_rollouts import seed_for
from pivotrl.rendering.chat import Renderer
from pivotrl.rollouts import read_rollouts
from pivotrl.trajectories.turn_lines import turns_in


@dataclass(frozen=True)
class Sampled:
    """One profiled rollout of pi_0 with the prompt it was sampled for."""

    turn_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    reward: float | None


def read_sampled(run_dir: Path, renderer: Renderer, limit: int, seed: int) -> list[Sampled]:
    """About `limit` rollouts of the run's profile, whole turns at a time, drawn by turn id; none without a profile."""
    path = run_dir / "profile" / "rollouts.jsonl"
    if limit < 1 or not path.exists():
        return []
    counts: Counter[str] = Counter(rollout.turn_id for rollout in read_rollouts(path))
    wanted: set[str] = set()
    total = 0
    for turn_id in sorted(counts, key=lambda i: seed_for(seed, "sampled", i)):
        if total >= limit:
            break
        wanted.add(turn_id)
        total += counts[turn_id]
    turns = turns_in(run_dir / "turns" / "turns.jsonl", ids=wanted)
    prompts = {turn.id: tuple(renderer.prompt_ids(turn.messages, turn.tools)) for turn in turns}
    return [
        Sampled(r.turn_id, prompts[r.turn_id], r.completion.token_ids, r.verdict.reward)
        for r in read_rollouts(path)
        if r.turn_id in prompts and r.completion.token_ids
    ]
