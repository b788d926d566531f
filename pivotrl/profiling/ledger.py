"""What rollouts cost: the ledger of profiling and training, and when pivot RL has paid for its profile. Pure Python."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from pivotrl.io import append_jsonl
from pivotrl.profiling.shards import whole_rows
from pivotrl.rollouts import Rollout, TokenCounts


@dataclass(frozen=True)
class Cost:
    """Rollout turns, tokens and seconds inside the engine. Addition sums every field."""

    rollouts: int = 0  # generated turns: the unit of the paper's comparison (method.md 3.3)
    prompt: int = 0  # tokens asked for, cached ones included; one prompt for each rollout
    cached: int = 0  # of these, served from the engine's prefix cache
    generated: int = 0
    seconds: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.rollouts + other.rollouts,
            self.prompt + other.prompt,
            self.cached + other.cached,
            self.generated + other.generated,
            self.seconds + other.seconds,
        )

    @classmethod
    def of(cls, rollouts: Iterable[Rollout], seconds: float = 0.0) -> Cost:
        return cls(**TokenCounts.of(rollouts).to_json(), seconds=seconds)

    def to_json(self) -> dict[str, float]:
        return asdict(self)


class CostLog:
    """Costs of a profile, appended as they arise, so that those of an interrupted attempt are counted too."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, purpose: str, cost: Cost) -> None:
        append_jsonl(self.path, [{"purpose": purpose, **cost.to_json()}])

    def totals(self) -> dict[str, Cost]:
        """Cost by purpose. A row torn by a kill, and one written right behind it, are lost: each is one chunk."""
        totals: dict[str, Cost] = {}
        for row in whole_rows(self.path):
            purpose = row.pop("purpose")
            totals[purpose] = totals.get(purpose, Cost()) + Cost(**row)
        return totals


@dataclass(frozen=True)
class BreakEven:
    """Steps after which pivot RL, its profile included, is the cheaper one; None: never. `saved` is at `steps`."""

    steps: float | None
    pivot_cost: float
    reference_cost: float

    @property
    def saved(self) -> float:
        """Share of the reference's cost that pivot RL saves; negative where it costs more."""
        return 1.0 - self.pivot_cost / self.reference_cost


def break_even(
    profile: float, pivot_step: float, reference_step: float, steps: int, reference_steps_per_step: float = 1.0
) -> BreakEven:
    """Compare pivot RL (a profile once, then `pivot_step` a step) with end-to-end RL (`reference_step` a step).

    Costs are in any one unit: rollout turns, tokens, seconds. `reference_steps_per_step` says how many end-to-end steps
    reach the accuracy of one pivot step (the paper: 72 / 130); without a measurement it is an assumption of 1.
    Raises ValueError for costs below 0 or a reference that costs nothing.
    """
    reference = reference_step * reference_steps_per_step
    if min(profile, pivot_step) < 0 or reference <= 0 or steps < 1:
        raise ValueError(f"break_even: costs {profile}, {pivot_step}, {reference_step} over {steps} steps")
    gain = reference - pivot_step
    return BreakEven(profile / gain if gain > 0 else None, profile + pivot_step * steps, reference * steps)
