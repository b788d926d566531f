"""Drift diagnostics against exact values of small policies."""

from __future__ import annotations

import math
import random

import pytest

from pivotrl.evaluation.drift import kl_to_start, order_preserved, split_by_verdict
from pivotrl.profiling import theory


def test_kl_estimate_is_that_of_known_policies():
    start, trained, rng = [0.5, 0.3, 0.2], [0.2, 0.3, 0.5], random.Random(0)
    draws = rng.choices(range(3), start, k=6000)
    rows = [draws[i : i + 3] for i in range(0, len(draws), 3)]
    found = kl_to_start(
        [[math.log(trained[a]) for a in row] for row in rows], [[math.log(start[a]) for a in row] for row in rows]
    )
    exact = theory.kl(start, trained)
    assert found["kl"] == pytest.approx(exact, abs=0.02)
    assert found["ci"][0] < exact < found["ci"][1]
    assert (found["sequences"], found["tokens"]) == (2000, 6000)


def test_no_move_is_no_drift_and_nothing_is_not_zero():
    same = kl_to_start([[-1.0, -2.0]], [[-1.0, -2.0]])
    assert (same["kl"], same["ci"]) == (0.0, [0.0, 0.0])
    assert kl_to_start([], [])["kl"] is None
    assert math.isfinite(kl_to_start([[0.0]], [[-900.0]])["kl"])


def test_order_is_kept_within_a_group_alone():
    kept = [(-1.0, -2.0), (-3.0, -4.0), (-5.0, -6.0)]
    assert order_preserved([kept]) == {"share": 1.0, "pairs": 3}
    assert order_preserved([[(-3.0, -2.0), (-1.0, -4.0)]]) == {"share": 0.0, "pairs": 1}
    assert order_preserved([[(-1.0, -2.0)], [(-3.0, -1.0)]]) == {"share": None, "pairs": 0}
    assert order_preserved([[(-1.0, -2.0), (-1.0, -2.0)]])["pairs"] == 0  # a tie says nothing


def test_the_kl_optimum_keeps_the_order_within_both_sets():
    start, rewards = [0.4, 0.3, 0.2, 0.1], [0.0, 1.0, 0.0, 1.0]
    optimum = theory.kl_path(start, rewards, 0.3)
    rows = [
        ("s", (i,), rewards[i] == 1.0, math.log(optimum[i]), math.log(start[i])) for i in (0, 1, 2, 3, 1)
    ]  # 1 twice: one candidate
    cells = split_by_verdict(rows)
    assert order_preserved(cells["accepted"]) == {"share": 1.0, "pairs": 1}
    assert order_preserved(cells["rejected"]) == {"share": 1.0, "pairs": 1}
    whole = [(math.log(o), math.log(s)) for o, s in zip(optimum, start, strict=True)]
    assert order_preserved([whole])["share"] < 1.0
