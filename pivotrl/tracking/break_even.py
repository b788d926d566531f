"""When pivot RL has paid for its profile, against end-to-end RL. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass


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
