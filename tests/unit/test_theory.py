"""Proposition 3.1 and Theorems 3.2, 3.3 of the paper on a tabular softmax policy (method.md 1.4).

Nothing here differentiates by the formula under test: gradients come from central differences of the objective itself.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pivotrl.profiling import theory
from pivotrl.training.advantages import RULES

REWARDS = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]
ACCEPTED = [r == 1.0 for r in REWARDS]


def softmax(logits: Sequence[float]) -> list[float]:
    weights = [math.exp(x - max(logits)) for x in logits]
    return [w / sum(weights) for w in weights]


def logits(seed: int, n: int = len(REWARDS)) -> list[float]:
    draw = random.Random(seed)
    return [draw.gauss(0, 1) for _ in range(n)]


def gradient(f: Callable[[list[float]], float], at: list[float], h: float = 1e-5) -> list[float]:
    def moved(i: int, by: float) -> float:
        return f([x + by * (i == j) for j, x in enumerate(at)])

    return [(moved(i, h) - moved(i, -h)) / (2 * h) for i in range(len(at))]


def surrogate(theta: Sequence[float], actions: Sequence[int], advantages: Sequence[float]) -> float:
    policy = softmax(theta)
    return sum(a * math.log(policy[i]) for i, a in zip(actions, advantages, strict=True)) / len(actions)


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0])
def test_equal_rewards_have_no_gradient(rule: str, reward: float) -> None:  # Prop. 3.1
    advantages = RULES[rule]([reward] * 8, 1e-6)
    assert gradient(lambda t: surrogate(t, [0, 1, 2, 3, 0, 1, 2, 3], advantages), logits(0)) == [0.0] * len(REWARDS)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_mixed_rewards_have_a_gradient(rule: str) -> None:
    actions = [0, 1, 2, 3]
    advantages = RULES[rule]([REWARDS[i] for i in actions], 1e-6)
    found = gradient(lambda t: surrogate(t, actions, advantages), logits(0))
    assert math.hypot(*found) > 0.1


@pytest.mark.parametrize(
    ("group", "p", "share"),
    [(16, 0.02, 0.28), (16, 0.05, 0.56), (16, 0.1, 0.82), (16, 0.3, 0.997), (8, 0.02, 0.15), (8, 0.3, 0.94)],
)
def test_share_of_informative_groups(group: int, p: float, share: float) -> None:  # the figures of method.md 1.4
    assert theory.informative_share(p, group) == pytest.approx(share, abs=0.006)
    draw = random.Random(1)
    groups = [[draw.random() < p for _ in range(group)] for _ in range(4000)]
    assert sum(0 < sum(g) < group for g in groups) / 4000 == pytest.approx(share, abs=0.03)


@given(st.floats(0.02, 0.98), st.integers(2, 6), st.integers(6, 12))
def test_estimate_of_the_informative_share_is_unbiased(p: float, group: int, scored: int) -> None:
    chance = [math.comb(scored, s) * p**s * (1 - p) ** (scored - s) for s in range(scored + 1)]
    estimates = [theory.informative_estimate(s, scored, group) for s in range(scored + 1)]
    mean = sum(c * e for c, e in zip(chance, estimates, strict=True) if e is not None)
    assert mean == pytest.approx(theory.informative_share(p, group), abs=1e-9)


def test_no_estimate_from_too_few_rollouts() -> None:
    assert theory.informative_estimate(1, 7, 8) is None


@pytest.mark.parametrize("seed", range(4))
def test_natural_gradient_has_the_size_of_the_reward_std(seed: int) -> None:  # Thm 3.2 (i)
    theta = logits(seed)
    policy = softmax(theta)
    g = gradient(lambda t: theory.expected_reward(softmax(t), REWARDS), theta)
    # The Fisher matrix of a softmax is diag(pi) - pi pi^T; on its range (sum g = 0) the inverse acts as 1/pi.
    assert sum(g) == pytest.approx(0, abs=1e-9)
    norm = math.sqrt(sum(x * x / p for x, p in zip(g, policy, strict=True)))
    assert norm == pytest.approx(theory.signal_std(policy, REWARDS), rel=1e-6)


@pytest.mark.parametrize("beta", [0.3, 1.0, 4.0])
def test_direction_of_the_kl_path(beta: float) -> None:  # Thm 3.2 (ii)
    start, h = softmax(logits(5)), 1e-5
    policy = theory.kl_path(start, REWARDS, beta)
    mean, std = theory.expected_reward(policy, REWARDS), theory.signal_std(policy, REWARDS)
    lower, upper = (theory.kl_path(start, REWARDS, b) for b in (beta - h, beta + h))
    slope = [(math.log(u) - math.log(d)) / (2 * h) for u, d in zip(upper, lower, strict=True)]
    assert slope == pytest.approx([-(r - mean) / beta**2 for r in REWARDS], rel=1e-5)
    normalised = [(r - mean) / std for r in REWARDS]
    product = sum(p * a * s for p, a, s in zip(policy, normalised, slope, strict=True))
    assert product == pytest.approx(-std / beta**2, rel=1e-5)


@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0])
def test_speed_of_the_kl_path(beta: float) -> None:  # Thm 3.2 (iii)
    start, h = softmax(logits(6)), 1e-4
    here, there = (theory.kl_path(start, REWARDS, b) for b in (beta, beta + h))
    speed = math.sqrt(2 * theory.kl(here, there)) / h
    assert speed == pytest.approx(theory.population_grpo_score(start, REWARDS, beta), rel=2e-3)


def test_signal_is_largest_for_an_even_chance() -> None:
    stds = [theory.signal_std([p, 1 - p], [1.0, 0.0]) for p in (0.1, 0.3, 0.5, 0.7, 0.9)]
    assert max(stds) == stds[2] == 0.5
    assert stds[0] == pytest.approx(math.sqrt(0.09))


def regularised(policy: Sequence[float], start: Sequence[float], rewards: Sequence[float], beta: float) -> float:
    return -theory.expected_reward(policy, rewards) + beta * theory.kl(policy, start)


@pytest.mark.parametrize("beta", [0.2, 1.0])
def test_path_minimises_the_regularised_objective(beta: float) -> None:  # Thm 3.3
    theta = logits(7)
    start = softmax(theta)
    optimum = [math.log(p) for p in theory.kl_path(start, REWARDS, beta)]
    assert gradient(lambda t: regularised(softmax(t), start, REWARDS, beta), optimum) == pytest.approx(
        [0.0] * len(theta), abs=1e-8
    )
    best, draw = regularised(softmax(optimum), start, REWARDS, beta), random.Random(0)
    for _ in range(50):
        other = softmax([x + draw.gauss(0, 0.3) for x in optimum])
        assert regularised(other, start, REWARDS, beta) > best


@pytest.mark.parametrize("beta", [0.1, 0.7, 3.0])
def test_mass_ratios_and_cost_at_the_optimum(beta: float) -> None:  # Thm 3.3
    start = softmax(logits(8))
    best = theory.kl_path(start, REWARDS, beta)
    rho, q = theory.accepted_mass(start, ACCEPTED), theory.accepted_mass(best, ACCEPTED)
    assert q == pytest.approx(theory.optimal_mass(rho, beta))
    assert q > rho
    for inside in (True, False):
        ratios = [b / s for b, s, m in zip(best, start, ACCEPTED, strict=True) if m is inside]
        assert ratios == pytest.approx([ratios[0]] * len(ratios))
    assert theory.kl(best, start) == pytest.approx(theory.projection_cost(q, rho))
    logs = [[math.log(p) for p in policy] for policy in (best, start)]
    assert theory.ratio_preservation(*logs, ACCEPTED) == (pytest.approx(1.0), pytest.approx(1.0))


@given(st.integers(0, 10_000), st.floats(0.05, 5))
def test_no_policy_of_equal_mass_is_nearer(seed: int, beta: float) -> None:
    start, other = softmax(logits(seed)), softmax(logits(seed + 1))
    q = theory.accepted_mass(other, ACCEPTED)
    assert theory.kl(other, start) >= theory.projection_cost(q, theory.accepted_mass(start, ACCEPTED)) - 1e-12


def test_strict_reward_lowers_the_other_acceptable_actions() -> None:
    start = softmax(logits(9))
    strict = [1.0] + [0.0] * (len(start) - 1)  # M = {a*}
    exact, functional = (theory.kl_path(start, r, 0.5) for r in (strict, REWARDS))
    for i in (3, 4):  # other acceptable actions
        assert exact[i] / exact[0] < start[i] / start[0]
        assert exact[i] < start[i]
        assert functional[i] / functional[0] == pytest.approx(start[i] / start[0])
    inside, outside = theory.ratio_preservation(*[[math.log(p) for p in x] for x in (exact, start)], ACCEPTED)
    assert inside is not None
    assert inside < 0.99
    assert outside == pytest.approx(1.0)


@pytest.mark.parametrize("rho", [0.0, 1.0])
def test_mass_stays_at_the_ends(rho: float) -> None:
    assert theory.optimal_mass(rho, 0.5) == rho


def test_small_beta_does_not_overflow() -> None:
    best = theory.kl_path([0.25, 0.75], [1.0, 0.0], 1e-4)
    assert best == [1.0, 0.0]
    assert theory.kl([0.5, 0.5], best) == math.inf
    assert theory.correlation([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) is None
