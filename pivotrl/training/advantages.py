"""Advantages within a group of rollouts of one state (method.md 1.3 and 4.7). Pure Python.

A rule is a baseline (mean of the group, or of the *others*) and a scale (one of three standard deviations, or none):

    A_i = (r_i - penalty_i - baseline_i) / scale_i

A reward of None is unscorable: it takes no part in means and deviations and gets no advantage (design idea 2).
Whether rewards vary is decided on the rewards themselves (max > min), never on a deviation that float residue may
leave above zero; where they do not, there is no division. So every advantage is finite by rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Rewards = Sequence[float]


def _varies(rewards: Rewards) -> bool:
    return max(rewards) > min(rewards)


def _mean(rewards: Rewards) -> float:
    return math.fsum(rewards) / len(rewards)


def _deviation(rewards: Rewards, bessel: int) -> float:
    center = _mean(rewards)
    return math.sqrt(math.fsum((r - center) ** 2 for r in rewards) / (len(rewards) - bessel))


def _others(rewards: Rewards, i: int) -> list[float]:
    return [*rewards[:i], *rewards[i + 1 :]]


def _centered(values: Rewards, leave_one_out: bool) -> list[float]:
    if len(values) < 2 or not _varies(values):
        return [0.0] * len(values)
    if leave_one_out:
        return [value - _mean(_others(values, i)) for i, value in enumerate(values)]
    center = _mean(values)
    return [value - center for value in values]


def _no_scale(rewards: Rewards, std_epsilon: float) -> list[float]:
    return [1.0] * len(rewards)


def _group_scale(bessel: int) -> Callable[[Rewards, float], list[float]]:
    def scale(rewards: Rewards, std_epsilon: float) -> list[float]:
        varies = len(rewards) > 1 and _varies(rewards)
        return [_deviation(rewards, bessel) + std_epsilon if varies else 1.0] * len(rewards)

    return scale


def _scale_of_others(rewards: Rewards, std_epsilon: float) -> list[float]:
    """Sample deviation of the others; 1 where those do not vary (a lone success keeps its difference)."""
    groups = [_others(rewards, i) for i in range(len(rewards))]
    return [_deviation(g, bessel=1) + std_epsilon if len(g) > 1 and _varies(g) else 1.0 for g in groups]


@dataclass(frozen=True)
class Rule:
    """Called with the rewards of one group, all of them scored."""

    leave_one_out: bool
    scale: Callable[[Rewards, float], list[float]]

    def __call__(self, rewards: Rewards, std_epsilon: float, penalties: Rewards | None = None) -> list[float]:
        """`penalties` (KL in the reward) are taken off the rewards, not off what scales them.

        A scale from penalised rewards would blow the small differences of penalties in a group of equal rewards up to
        advantages of 1.
        """
        values = rewards if penalties is None else [r - p for r, p in zip(rewards, penalties, strict=True)]
        differences = _centered(values, self.leave_one_out)
        return [d / s for d, s in zip(differences, self.scale(rewards, std_epsilon), strict=True)]


RULES: dict[str, Rule] = {
    "group": Rule(False, _group_scale(bessel=0)),  # the paper (method.md 1.3): population std
    "group_sample": Rule(False, _group_scale(bessel=1)),  # the same with the sample std (divided by G - 1)
    "mean_only": Rule(False, _no_scale),  # Dr.GRPO (arXiv 2503.20783)
    "leave_one_out": Rule(True, _scale_of_others),  # NVIDIA's practice (method.md 4.7)
    "leave_one_out_mean": Rule(True, _no_scale),  # RLOO (arXiv 2402.14740)
}


def advantages(
    rewards: Sequence[float | None],
    rule: str,
    std_epsilon: float = 1e-6,
    penalties: Sequence[float] | None = None,
) -> list[float | None]:
    """Advantage of each rollout of one group; None where the reward is None. `penalties`: one a rollout."""
    scored = [i for i, r in enumerate(rewards) if r is not None]
    result: list[float | None] = [None] * len(rewards)
    if scored:
        taken = None if penalties is None else [penalties[i] for i in scored]
        values = RULES[rule]([r for r in rewards if r is not None], std_epsilon, taken)
        for i, value in zip(scored, values, strict=True):
            result[i] = value
    return result
