"""The mismatch gate: trainer and engine must agree on the log-probs of sampled tokens, or nothing is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pivotrl.errors import UserError


@dataclass(frozen=True)
class Mismatch:
    """Differences of log-probs over sampled tokens (field report B13: fixed definitions, token-weighted)."""

    mean: float  # mean |trainer - engine|
    maximum: float
    worst: tuple[int, int, float, float]  # sequence, token, trainer's, engine's

    @classmethod
    def of(cls, trainer: Sequence[Sequence[float]], engine: Sequence[Sequence[float]]) -> Mismatch:
        cells = [
            (abs(t - e), i, j, t, e)
            for i, (row, other) in enumerate(zip(trainer, engine, strict=True))
            for j, (t, e) in enumerate(zip(row, other, strict=True))
        ]
        worst = max(cells)
        return cls(sum(c[0] for c in cells) / len(cells), worst[0], (worst[1], worst[2], worst[3], worst[4]))


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
    sequence, token, trainer, engine = found.worst
    raise MismatchError(
        f"trainer and engine disagree {when}: mean |log-prob difference| {found.mean:.3g} > {limit:.3g}; worst at "
        f"rollout {sequence}, token {token}: trainer {trainer:.4f}, engine {engine:.4f}.\n"
        "Training on this would follow a wrong gradient. Check that both load the same weights and sample at the same "
        "temperature; raise generation.max_mismatch only if you know why they differ."
    )
