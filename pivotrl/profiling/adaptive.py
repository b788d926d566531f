"""Adaptive profiling: which turns need no more rollouts. Pure Python.

A turn's final verdict is that of all K rollouts: kept when 0 < right < K and right < lambda K. After n of them, `right`
of which were right, the turn may stop when more would hardly change the verdict. Rollouts of a turn are exchangeable:
given the final count j, the first n hold a hypergeometric number of right ones. With the distribution of j over turns
(learnt from calibration turns that get all K), everything else is exact: no model of success rates is assumed. The
stopping rule is the one of fewest expected rollouts among those whose share of other verdicts stays within the stated
error, by an upper bound, since calibration turns are a sample: a Bayes sequential test (Wald; Arrow, Blackwell and
Girshick 1949), solved by backward induction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

# One-sided 99 % for one plan: about 95 % for the cheapest of the several that are compared on the same turns.
Z = 2.326
State = tuple[int, int]  # (scored rollouts n, of which right)


def is_kept(right: int, scored: int, lambda_diff: float) -> bool:
    """Membership of D_adv (method.md 1.2, eq. 5) by counts; exact, as `select` decides."""
    return 0 < right < scored and Fraction(right, scored) < Fraction(str(lambda_diff))


def hypergeometric(drawn_right: int, right: int, drawn: int, total: int) -> float:
    """P(`drawn_right` right ones among `drawn` of `total` rollouts, `right` of which are right)."""
    if drawn_right < 0 or drawn < drawn_right:
        return 0.0
    ways = math.comb(right, drawn_right) * math.comb(total - right, drawn - drawn_right)
    return ways / math.comb(total, drawn)


@dataclass(frozen=True)
class Plan:
    """When to stop, and what that is expected to cost; expectations are over turns like the calibration turns."""

    rollouts: int  # K
    round: int
    stops: frozenset[State]
    expected_rollouts: float
    expected_error: float  # share of turns whose verdict differs from that of all K rollouts
    error_bound: float  # its upper confidence bound, given how few turns the histogram counts

    def is_decided(self, rewards: Sequence[float | None]) -> bool:
        """Whether a turn with these rewards so far is done.

        Unscorable rollouts tell nothing. A reward strictly between 0 and 1 leaves a turn undecided: its final mean is
        not determined by counts.
        """
        if len(rewards) >= self.rollouts:
            return True
        scored = [r for r in rewards if r is not None]
        right = scored.count(1.0)
        return right + scored.count(0.0) == len(scored) and (len(scored), right) in self.stops


def make_plan(histogram: Sequence[float], round: int, lambda_diff: float, error: float) -> Plan:
    """The cheapest plan within `error`; `histogram` (K + 1 counts) tells turns by their right rollouts of K.

    One turn is added in all, spread evenly over the counts: what no calibration turn showed is rare, not impossible.
    Raises ValueError for a histogram of fewer than three counts, a round below 1 or an error outside [0, 1).
    """
    total = len(histogram) - 1
    if total < 2 or round < 1 or not 0 <= error < 1 or min(histogram) < 0:
        raise ValueError(f"make_plan: histogram {list(histogram)}, round {round}, error {error}")
    mass = math.fsum(histogram) + 1.0
    chain = _Chain([(h + 1.0 / (total + 1)) / mass for h in histogram], mass, round, lambda_diff)
    low, high = 0.0, 24.0  # log of the price of an error, in rollouts; at e^24 none is ever bought
    best = chain.solve(math.inf)
    for _ in range(30):
        middle = (low + high) / 2
        plan = chain.solve(math.exp(middle))
        if plan.error_bound <= error:
            best, high = plan, middle
        else:
            low = middle
    return best


class _Chain:
    """The Markov chain of (n, right) given the distribution of the final count; the error of stopping in each state."""

    def __init__(self, final: Sequence[float], turns: float, round: int, lambda_diff: float) -> None:
        self.total, self.round, self.final, self.turns = len(final) - 1, round, final, turns
        self.lambda_diff = lambda_diff
        self.kept = kept = [is_kept(j, self.total, lambda_diff) for j in range(self.total + 1)]
        self.error: dict[State, float] = {}
        self.moves: dict[State, list[tuple[State, float]]] = {}
        for n in range(self.total + 1):
            step = min(round, self.total - n)
            for right in range(n + 1):
                joint = [p * hypergeometric(right, j, n, self.total) for j, p in enumerate(final)]
                mass = math.fsum(joint)
                posterior = [x / mass for x in joint]
                verdict = is_kept(right, n, lambda_diff)
                self.error[n, right] = math.fsum(p for p, k in zip(posterior, kept, strict=True) if k != verdict)
                self.moves[n, right] = [
                    ((n + step, right + more), self._chance(posterior, n, right, step, more))
                    for more in range(step + 1)
                    if step
                ]

    def _chance(self, posterior: Sequence[float], n: int, right: int, step: int, more: int) -> float:
        left = self.total - n
        return math.fsum(
            p * hypergeometric(more, j - right, step, left)
            for j, p in enumerate(posterior)
            if p > 0.0 and 0 <= j - right <= left
        )

    def solve(self, price: float) -> Plan:
        """The plan of least expected rollouts + price x errors; stopping at once (n = 0) is no choice."""
        value: dict[State, float] = {}
        stops: set[State] = set()
        for n in range(self.total, -1, -1):
            for right in range(n + 1):
                state = (n, right)
                moves = self.moves[state]
                go_on = math.inf
                if moves:
                    go_on = moves[0][0][0] - n + math.fsum(chance * value[after] for after, chance in moves)
                # At an infinite price only a certain verdict stops.
                stop = price * self.error[state] if self.error[state] > 0.0 else 0.0
                if n and stop <= go_on:
                    stops.add(state)
                value[state] = min(stop, go_on) if n else go_on
        return self._evaluate(frozenset(stops))

    def _evaluate(self, stops: frozenset[State]) -> Plan:
        """Expectations of a plan.

        Given the final count, all orders of right and wrong rollouts are equally likely; so the number of orders that
        reach a state without a stop is all that they need of the plan.
        """
        orders: dict[State, int] = {(0, 0): 1}
        ends: list[tuple[int, int, int]] = []
        for n in range(self.total + 1):
            for right in range(n + 1):
                if not (ways := orders.get((n, right), 0)):
                    continue
                if n == self.total or (n, right) in stops:
                    ends.append((n, right, ways))
                    continue
                step = min(self.round, self.total - n)
                for more in range(step + 1):
                    after = (n + step, right + more)
                    orders[after] = orders.get(after, 0) + ways * math.comb(step, more)
        rollouts = error = square = 0.0
        for j, p in enumerate(self.final):
            wrong = 0.0
            for n, right, ways in ends:
                if 0 <= j - right <= self.total - n:
                    chance = ways * math.comb(self.total - n, j - right) / math.comb(self.total, j)
                    rollouts += p * chance * n
                    wrong += chance * (is_kept(right, n, self.lambda_diff) != self.kept[j])
            error += p * wrong
            square += p * wrong**2
        bound = error + Z * math.sqrt(max(square - error**2, 0.0) / self.turns)
        return Plan(self.total, self.round, stops, rollouts, error, bound)
