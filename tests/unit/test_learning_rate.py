from __future__ import annotations

import pytest

from pivotrl.config import Optimizer
from pivotrl.errors import UserError
from pivotrl.policy.schedule import learning_rate


def test_warm_up_then_constant() -> None:
    rates = [learning_rate(Optimizer(1.0, warmup_steps=3), s, 10) for s in range(6)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_falls_to_zero_after_the_last_step() -> None:
    rates = [learning_rate(Optimizer(1.0, schedule="linear"), s, 4) for s in range(6)]
    assert rates == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]


def test_unknown_schedule() -> None:
    with pytest.raises(UserError, match="cosine"):
        learning_rate(Optimizer(1.0, schedule="cosine"), 0, 1)
