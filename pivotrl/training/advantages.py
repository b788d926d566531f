"""Advantages within a group of rollouts of one state (method.md 1.3 and 4.7). Pure Python.

A reward of None is unscorable: it takes no part in means and deviations and gets no advantage (design idea 2).
Whether a group varies is decided on the rewards themselves (max > min), never on a deviation that float residue may
leave above zero; so every advantage is finite by rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Rewards = Sequence[float]


def _varies(rewards: Rewards) -> bool:
    return max(rewards) > min(rewards)


def _mean(rewards: Rewards) -> float:
    return math.fsum(rewards) / len(rewards)


def _deviation(rewards: Rewards, bessel: int) -> float:
    center = _mean(rewards)
    return math.sqrt(math.fsum((r - center) ** 2 for r in rewards) / (len(rewards) - bessel))


def group(rewards: Rewards, std_epsilon: float) -> list[float]:
    """A_i = (r_i - mean) / (std + eps) with the population std: the paper's rule (method.md 1.3)."""
    if not _varies(rewards):
        return [0.0] * len(rewards)
    center, scale = _mean(rewards), _deviation(rewards, bessel=0) + std_epsilon
    return [(r - center) / scale for r in rewards]


def mean_only(rewards: Rewards, std_epsilon: float) -> list[float]:
    """A_i = r_i - mean (Dr.GRPO, arXiv 2503.20783)."""
    if not _varies(rewards):
        return [0.0] * len(rewards)
    center = _mean(rewards)
    return [r - center for r in rewards]


def leave_one_out(rewards: Rewards, std_epsilon: float) -> list[float]:
    """NVIDIA's practice (method.md 4.7): mean and sample std of the *others*; no division where those do not vary."""
    if len(rewards) < 2:
        return [0.0] * len(rewards)
    result = []
    for i, reward in enumerate(rewards):
        others = [*rewards[:i], *rewards[i + 1 :]]
        difference = reward - _mean(others) if _varies(rewards) else 0.0
        divide = len(others) > 1 and _varies(others)
        result.append(difference / (_deviation(others, bessel=1) + std_epsilon) if divide else difference)
    return result


RULES: dict[str, Callable[[Rewards, float], list[float]]] = {
    "group": group,
    "leave_one_out": leave_one_out,
    "mean_only": mean_only,
}


def advantages(rewards: Sequence[float | None], rule: str, std_epsilon: float = 1e-6) -> list[float | None]:
    """Advantage of each rollout of one group; None where the reward is None."""
    scored = [r for r in rewards if r is not None]
    if not scored:
        return [None] * len(rewards)
    values = iter(RULES[rule](scored, std_epsilon))
    return [None if r is None else next(values) for r in rewards]
