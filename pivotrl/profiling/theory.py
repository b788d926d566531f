"""What the paper's theory says of one state, as numbers that can be watched (method.md 1.4). Pure Python.

A policy over the actions of a state is a list of probabilities; `accepted[i]` says whether action i is in M, the set
that the verifier accepts. Natural logarithms throughout, so divergences are in nats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Policy = Sequence[float]


def informative_share(p: float, group_size: int) -> float:
    """1 - p^G - (1-p)^G: how often a group of G rollouts of success rate `p` is mixed (corollary of Prop. 3.1)."""
    return 1.0 - p**group_size - (1.0 - p) ** group_size


def informative_estimate(right: int, scored: int, group_size: int) -> float | None:
    """Unbiased estimate of `informative_share` from `right` of `scored` rollouts: the share of mixed G-subsets.

    None where fewer than G rollouts were scored (no unbiased estimate exists). Plugging right/scored into the formula
    instead is biased downwards: it is concave, and 0 of K gives exactly 0.
    """
    if scored < group_size:
        return None
    whole = math.comb(scored, group_size)
    return 1.0 - (math.comb(right, group_size) + math.comb(scored - right, group_size)) / whole


def expected_reward(policy: Policy, rewards: Sequence[float]) -> float:
    return math.fsum(p * r for p, r in zip(policy, rewards, strict=True))


def signal_std(policy: Policy, rewards: Sequence[float]) -> float:
    """std of the reward under the policy: the size of the natural gradient, up to 1/beta^2 (Theorem 3.2)."""
    mean = expected_reward(policy, rewards)
    return math.sqrt(math.fsum(p * (r - mean) ** 2 for p, r in zip(policy, rewards, strict=True)))


def kl_path(start: Policy, rewards: Sequence[float], beta: float) -> list[float]:
    """pi_beta(a) = pi_0(a) exp(r(a) / beta) / Z, the KL-regularised optimum (Theorems 3.2 and 3.3)."""
    top = max(rewards)  # taken out of the exponent, so that a small beta does not overflow
    weights = [p * math.exp((r - top) / beta) for p, r in zip(start, rewards, strict=True)]
    total = math.fsum(weights)
    return [w / total for w in weights]


def population_grpo_score(start: Policy, rewards: Sequence[float], beta: float) -> float:
    """gamma = std(r under pi_beta) / beta^2: the speed of the KL path in the Fisher norm (Theorem 3.2)."""
    return signal_std(kl_path(start, rewards, beta), rewards) / beta**2


def accepted_mass(policy: Policy, accepted: Sequence[bool]) -> float:
    """rho = pi(M)."""
    return math.fsum(p for p, inside in zip(policy, accepted, strict=True) if inside)


def optimal_mass(rho: float, beta: float) -> float:
    """q = rho e^(1/beta) / (rho e^(1/beta) + 1 - rho): the accepted mass at the optimum (Theorem 3.3)."""
    rest = (1.0 - rho) * math.exp(-1.0 / beta)
    return rho / (rho + rest)


def kl(policy: Policy, other: Policy) -> float:
    """KL(policy || other) in nats; infinite where `other` has no mass and `policy` has."""
    total = []
    for p, q in zip(policy, other, strict=True):
        if p > 0.0:
            if q <= 0.0:
                return math.inf
            total.append(p * math.log(p / q))
    return math.fsum(total)


def projection_cost(q: float, rho: float) -> float:
    """q ln(q/rho) + (1-q) ln((1-q)/(1-rho)): the least KL to pi_0 of any policy with accepted mass q (Theorem 3.3)."""
    return kl([q, 1.0 - q], [rho, 1.0 - rho])


def ratio_preservation(
    trained: Sequence[float], start: Sequence[float], accepted: Sequence[bool]
) -> tuple[float | None, float | None]:
    """Correlation of log pi(a) and log pi_0(a) over actions within M, and over the others.

    Theorem 3.3 predicts 1 for both: probabilities within each set keep their ratios. `trained` and `start` are
    log-probs. None where a set has fewer than three actions, or no spread, so that a correlation says nothing.
    """

    def within(wanted: bool) -> float | None:
        rows = [(t, s) for t, s, inside in zip(trained, start, accepted, strict=True) if inside is wanted]
        return correlation([t for t, _ in rows], [s for _, s in rows])

    return within(True), within(False)


def correlation(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Pearson's; None for fewer than three points or where either does not vary."""
    if len(xs) < 3 or max(xs) == min(xs) or max(ys) == min(ys):
        return None
    mx, my = math.fsum(xs) / len(xs), math.fsum(ys) / len(ys)
    covariance = math.fsum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True))
    return covariance / math.sqrt(math.fsum((x - mx) ** 2 for x in xs) * math.fsum((y - my) ** 2 for y in ys))
