"""The mismatch gate: trainer and engine must agree on the log-probs of sampled tokens, or nothing is trained."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pivotrl.errors import UserError

WORST_TOKENS = 5  # shown when the gate stops a run


@dataclass(frozen=True)
class TokenGap:
    """One sampled token and its log-prob on both sides."""

    rollout: str  # as in rollouts.jsonl: "turn id/index"
    token: int  # of the completion, from 0
    trainer: float
    engine: float

    @property
    def size(self) -> float:
        """|trainer - engine|; a NaN is beyond any difference."""
        gap = abs(self.trainer - self.engine)
        return math.inf if math.isnan(gap) else gap


def worst_tokens(gaps: Iterable[TokenGap]) -> tuple[TokenGap, ...]:
    """The largest gaps, largest first."""
    return tuple(heapq.nlargest(WORST_TOKENS, gaps, key=lambda gap: gap.size))


@dataclass(frozen=True)
class Mismatch:
    """Differences of log-probs over sampled tokens (field report B13: fixed definitions, token-weighted)."""

    mean: float  # mean |trainer - engine|
    maximum: float
    worst: tuple[TokenGap, ...]

    @classmethod
    def of(
        cls, trainer: Sequence[Sequence[float]], engine: Sequence[Sequence[float]], names: Sequence[str]
    ) -> Mismatch:
        """One row of log-probs and one name a rollout."""
        gaps = [
            TokenGap(name, j, t, e)
            for name, row, other in zip(names, trainer, engine, strict=True)
            for j, (t, e) in enumerate(zip(row, other, strict=True))
        ]
        worst = worst_tokens(gaps)
        return cls(sum(abs(gap.trainer - gap.engine) for gap in gaps) / len(gaps), worst[0].size, worst)


def limit_for(precision: str, configured: float | None) -> float:
    """The limit on the mean: 1e-4 where both sides compute in float32, 0.1 in lower precision (engines.md B.10)."""
    if configured is not None:
        return configured
    return 1e-4 if precision == "fp32" else 0.1


class MismatchError(UserError):
    """Trainer and engine disagree: the weights, template, temperature or positions of one side are wrong."""


def require_agreement(found: Mismatch, limit: float, when: str) -> None:
    """Raises MismatchError when the mean difference is above `limit` or not a number."""
    if found.mean <= limit:
        return
    worst = "".join(
        f"  rollout {gap.rollout}, token {gap.token}: trainer {gap.trainer:.4f}, engine {gap.engine:.4f}\n"
        for gap in found.worst
    )
    raise MismatchError(
        f"trainer and engine disagree {when}: mean |log-prob difference| {found.mean:.3g} > {limit:.3g}; the worst "
        f"tokens:\n{worst}"
        "Training on this would follow a wrong gradient. Check that both load the same weights and sample at the same "
        "temperature; raise generation.max_mismatch only if you know why they differ."
    )
