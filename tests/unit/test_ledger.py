from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pivotrl.profiling.ledger import Cost, CostLog
from pivotrl.tracking.break_even import break_even


def test_costs_add() -> None:
    assert Cost(1, 10, 4, 3, 0.5) + Cost(2, 20, 0, 6, 0.25) == Cost(3, 30, 4, 9, 0.75)
    assert Cost().to_json() == {"rollouts": 0, "prompt": 0, "cached": 0, "generated": 0, "seconds": 0.0}


def test_a_torn_row_is_lost_alone(tmp_path: Path) -> None:
    path = tmp_path / "cost.jsonl"
    CostLog(path).add("profile", Cost(1, 10))
    CostLog(path).add("profile", Cost(2, 20))
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first, len(whole) + 1):
        path.write_bytes(whole[:cut])
        log = CostLog(path)
        log.add("profile", Cost(4, 40))
        kept = 2 if cut >= len(whole) - 1 else 0  # a row without its newline is a row
        assert log.totals()["profile"].rollouts == 1 + kept + 4, cut
    assert CostLog(tmp_path / "none.jsonl").totals() == {}


def test_the_paper_s_comparison() -> None:
    """method.md 3.3: 64 x 16 turns a step against 512 episodes of 14.7 turns, 130 steps against 72."""
    found = break_even(0, 64 * 16, 512 * 14.7, steps=130, reference_steps_per_step=72 / 130)
    assert found.pivot_cost == pytest.approx(133e3, rel=0.01)
    assert found.reference_cost == pytest.approx(542e3, rel=0.01)
    assert found.saved == pytest.approx(0.75, abs=0.01)  # "about four times fewer turns", the profile not counted
    with_profile = break_even(10_000 * 16, 64 * 16, 512 * 14.7, steps=130, reference_steps_per_step=72 / 130)
    assert with_profile.steps == pytest.approx(50.8, abs=0.2)
    assert with_profile.saved == pytest.approx(0.46, abs=0.01)


@given(st.floats(0, 1e6), st.floats(0, 1e3), st.floats(1, 1e3), st.integers(1, 500))
def test_costs_are_equal_at_the_break_even(profile: float, pivot: float, reference: float, steps: int) -> None:
    found = break_even(profile, pivot, reference, steps)
    if pivot >= reference:
        assert found.steps is None
    elif found.steps is not None and found.steps < 1e9:
        assert profile + pivot * found.steps == pytest.approx(reference * found.steps, rel=1e-6, abs=1e-6)
        assert (found.saved > 0) == (steps > found.steps) or found.saved == pytest.approx(0, abs=1e-9)


def test_a_reference_must_cost_something() -> None:
    with pytest.raises(ValueError, match="break_even"):
        break_even(1, 1, 0, 10)
