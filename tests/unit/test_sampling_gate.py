from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pivotrl.training.gate import Mismatch, MismatchError, TokenGap, limit_for, require_agreement
from pivotrl.training.sampling import EpochSampler


@given(rows=st.integers(1, 30), count=st.integers(1, 12), steps=st.integers(1, 12))
def test_every_row_is_drawn_before_any_is_drawn_again(rows, count, steps):
    sampler = EpochSampler(list(range(rows)), count, seed=3)
    drawn = [x for step in range(steps) for x in sampler.draw(step)]
    assert len(drawn) == count * steps
    for start in range(0, len(drawn) - rows + 1, rows):
        assert sorted(drawn[start : start + rows]) == list(range(rows))


def test_a_step_depends_on_seed_and_step_alone():
    rows = list("abcdefgh")
    assert EpochSampler(rows, 3, seed=1).draw(7) == EpochSampler(rows, 3, seed=1).draw(7)
    assert EpochSampler(rows, 8, seed=1).draw(0) != EpochSampler(rows, 8, seed=2).draw(0)


def test_gate_passes_equal_and_stops_unequal():
    engine = [[-1.0, -2.0], [-0.5]]
    names = ["a/0", "a/1"]
    require_agreement(Mismatch.of(engine, engine, names), 1e-4, "before the first step")
    found = Mismatch.of([[-1.0, -2.0], [-1.3]], engine, names)  # field report B6: 0.8 on one token
    assert found.mean == pytest.approx(0.8 / 3)
    assert found.worst[0] == TokenGap("a/1", 0, -1.3, -0.5) and found.maximum == pytest.approx(0.8)
    with pytest.raises(MismatchError, match=r"rollout a/1, token 0: trainer -1\.3000, engine -0\.5000"):
        require_agreement(found, 0.1, "before the first step")


def test_the_worst_tokens_are_shown_largest_first():
    trainer = [[-float(j) for j in range(9)]]
    found = Mismatch.of(trainer, [[0.0] * 8 + [float("nan")]], ["t/2"])
    assert [gap.token for gap in found.worst] == [8, 7, 6, 5, 4]
    with pytest.raises(MismatchError) as error:
        require_agreement(found, 0.1, "at step 3")
    assert [f"token {j}:" in str(error.value) for j in range(9)] == [False] * 4 + [True] * 5


def test_gate_stops_on_nan():
    with pytest.raises(MismatchError):
        require_agreement(Mismatch.of([[float("nan")]], [[-1.0]], ["t/0"]), 0.1, "now")


def test_limits():
    assert limit_for("fp32", None) == 1e-4
    assert limit_for("bf16", 0.3) == 0.3
