"""Per-turn statistics of K rollouts (method.md 1.2, eq. 4). Pure Python."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

from pivotrl.profiling.fingerprint import digest
from pivotrl.trajectories.schema import JsonDict, Turn

_CANONICAL = json.JSONEncoder(sort_keys=True)
EPSILON = 1e-6  # rewards of judges and of partial scores that are nearer than this are equal


@lru_cache
def exact(value: float) -> tuple[int, int]:
    """A decimal as written (0.6 is 3/5, not the nearest double): numerator and denominator."""
    return Fraction(str(value)).as_integer_ratio()


def vary(rewards: Collection[float | Fraction]) -> bool:
    """Whether scored rewards differ, which makes their group mixed."""
    return len(rewards) > 1 and max(rewards) - min(rewards) > EPSILON


def mean_variance(rewards: Sequence[float]) -> tuple[float, float]:
    """mu = (1/K) sum r and var = (1/K) sum (r - mu)^2, the population variance; exactly 0 for equal rewards."""
    if not vary(rewards):
        return rewards[0], 0.0
    mean = math.fsum(rewards) / len(rewards)
    return mean, math.fsum((r - mean) ** 2 for r in rewards) / len(rewards)


def state_action(turn: Turn) -> str:
    """Digest of what the model sees and of what was demonstrated: turns of equal digest teach the same thing."""
    return digest([turn.messages, turn.tools, turn.demonstration.to_json()])


def demonstrated(turn: Turn) -> list[str]:
    """The tools that the demonstration calls; "(text)" alone where it calls none."""
    return [call.name for call in turn.demonstration.tool_calls] or ["(text)"]


def reward_facts(rewards: Sequence[float | None]) -> dict[str, Any]:
    """What a row tells of the rewards of a group. Unscorable ones (None) leave mean and variance and are counted."""
    scored = [r for r in rewards if r is not None]
    mean, variance = mean_variance(scored) if scored else (None, None)
    return {
        "n": len(rewards),
        "rewards": list(rewards),
        "mean": mean,
        "variance": variance,
        "right": sum(r == 1.0 for r in scored),
        "wrong": sum(r == 0.0 for r in scored),
        "unscorable": len(rewards) - len(scored),
    }


def turn_facts(turn: Turn, rewards: Sequence[float | None]) -> dict[str, Any]:
    """What a row tells of a turn and of its rewards."""
    return {
        "turn_id": turn.id,
        "trajectory_id": turn.trajectory_id,
        "task_id": turn.task_id,
        "domain": turn.domain,
        "split": turn.split,
        "depth": turn.depth,
        "tags": list(turn.flags),
        "state_action": state_action(turn),
        "demonstration": demonstrated(turn),
        **reward_facts(rewards),
    }


def turn_row(turn: Turn, rollouts: Sequence[JsonDict]) -> dict[str, Any]:
    """The profile of one turn from the rows of its rollouts (`Rollout.to_json`); unscorable ones are no wrong ones
    (design idea 2). Rows, not objects, since millions of them are read."""
    actions = [r["action"] for r in rollouts]
    return {
        **turn_facts(turn, [r["reward"] for r in rollouts]),
        "truncated": sum(r["finish_reason"] == "length" for r in rollouts),
        "no_action": sum(not a["text"] and not a["tool_calls"] for a in actions),
        "unique_actions": len(set(map(_CANONICAL.encode, actions))),
        "prompt_tokens": rollouts[0]["prompt_tokens"],
        "generated_tokens": sum(len(r["token_ids"]) for r in rollouts),
    }
