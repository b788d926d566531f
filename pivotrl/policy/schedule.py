"""Learning-rate schedule. Pure."""

from __future__ import annotations

from pivotrl.config import Optimizer
from pivotrl.errors import UserError


def learning_rate(settings: Optimizer, step: int, total_steps: int) -> float:
    """Learning rate of the optimiser step number `step` (from 0) of `total_steps`.

    Warm-up rises linearly and reaches the full rate at step `warmup_steps` (the first step already moves); "linear"
    then falls so that it would be zero one step after the last.
    """
    if settings.schedule not in ("constant", "linear"):
        raise UserError(f"optimizer.schedule: '{settings.schedule}' is not known; use 'constant' or 'linear'")
    rate, warm = settings.learning_rate, settings.warmup_steps
    if step < warm:
        return rate * (step + 1) / (warm + 1)
    if settings.schedule == "linear":
        return rate * max(0.0, (total_steps - step) / max(1, total_steps - warm))
    return rate
