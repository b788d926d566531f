from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pivotrl.training.advantages import RULES, advantages

rewards = st.lists(st.one_of(st.none(), st.floats(0, 1, allow_nan=False)), min_size=1, max_size=16)


def close(actual: list[float | None], expected: list[float], tolerance: float = 1e-4) -> bool:
    return all(a is not None and abs(a - e) < tolerance for a, e in zip(actual, expected, strict=True))


def test_group_rule_uses_the_population_std():
    # field report C3: sample std would give +1.2076 / -0.7246
    assert close(advantages([1, 1, 1, 0, 0, 0, 0, 0], "group"), [1.2910] * 3 + [-0.7746] * 5)


def test_sixteen_rollouts_with_one_success():
    one = [1.0] + [0.0] * 15
    assert advantages(one, "group")[0] == pytest.approx(3.873, abs=1e-3)  # method.md 4.7
    assert advantages(one, "leave_one_out")[0] == pytest.approx(1.0)
    two = [1.0, 1.0] + [0.0] * 14
    assert advantages(two, "leave_one_out")[0] == pytest.approx(3.615, abs=1e-3)


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize("group", [[1, 0, 0, 0], [0.95] + [0.35] * 7, [0.1] * 3, [1.0]])
def test_finite_and_bounded_where_others_do_not_vary(rule, group):
    # field report C2: leave-one-out std of equal rewards is float residue, not a scale
    values = advantages(group, rule)
    assert all(value is not None and math.isfinite(value) and abs(value) <= 10 for value in values)


@pytest.mark.parametrize("rule", sorted(RULES))
@settings(max_examples=50)
@given(group=rewards)
def test_equal_rewards_give_exact_zeros(rule, group):
    # Proposition 3.1
    scored = [r for r in group if r is not None]
    if scored and len(set(scored)) == 1:
        assert [v for v in advantages(group, rule) if v is not None] == [0.0] * len(scored)


@pytest.mark.parametrize("rule", sorted(RULES))
@settings(max_examples=50)
@given(group=rewards)
def test_unscorable_takes_no_part(rule, group):
    values = advantages(group, rule)
    scored = [r for r in group if r is not None]
    assert [v is None for v in values] == [r is None for r in group]
    assert [v for v in values if v is not None] == advantages(scored, rule) if scored else True


def test_a_verifier_error_does_not_become_a_failure():
    # field report C12: one of four unscorable
    assert close([v for v in advantages([1.0, None, 0.0, 0.0], "group") if v is not None], [1.4142, -0.7071, -0.7071])


def test_sample_std_has_a_name_of_its_own():
    # field report C3
    assert close(advantages([1, 1, 1, 0, 0, 0, 0, 0], "group_sample"), [1.2076] * 3 + [-0.7246] * 5)


def test_leave_one_out_without_a_scale():
    assert close(advantages([1, 0, 0, 0], "leave_one_out_mean"), [1.0] + [-1 / 3] * 3)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_penalties_do_not_enter_the_scale(rule):
    """Small KL differences in a group of equal rewards stay small: they are not blown up to a deviation of 1."""
    values = advantages([1.0, None, 1.0, 1.0], rule, penalties=[0.003, 9.0, 0.0, 0.0])
    assert values[1] is None
    assert values[0] is not None
    assert -0.0031 < values[0] < -0.0019


@pytest.mark.parametrize("rule", sorted(RULES))
@settings(max_examples=50)
@given(group=st.lists(st.floats(0, 1), min_size=2, max_size=8))
def test_no_penalty_changes_nothing(rule, group):
    assert advantages(group, rule, penalties=[0.0] * len(group)) == advantages(group, rule)
