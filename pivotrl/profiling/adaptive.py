"""Adaptive profiling: which turns need no more rollouts. Pure Python.

A turn's final verdict is that of all K rollouts: kept when 0 < right < K and right < lambda K. After n of them, `right`
of which were right, the turn may stop when more would hardly change the verdict. Rollouts of a turn are exchangeable:
given the final count j, the first n hold a hypergeometric number of right ones. With the distribution of j over turns
(learnt from calibration turns that get all K), everything else is exact: no model of success rates is assumed. The
stopping rule is the one of fewest expected rollouts among those whose kept set agrees with that of all K rollouts as
well as asked for: a Bayes sequential test (Wald; Arrow, Blackwell and Girshick 1949), solved by backward induction.

Agreement is that of two sets, 2 |A and B| / (|A| + |B|): 1 minus the errors over the mean size of the sets, so that
the many turns that neither keeps do not flatter it. Every error costs the same; the errors made are not alike all the
same: nearly all are turns that were right once or twice of K, given up after a long run of wrong rollouts, while what
is kept in error is rare. Agreement is promised one standard error below what is expected, since calibration turns are
a sample (about 84 % confidence).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

Z = 1.0  # standard errors between the agreement that is expected and the one that is promised
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
    expected_error: float  # share of all turns whose verdict differs from that of all K rollouts
    expected_lost: float  # of the turns that all K rollouts keep, the share that is not kept
    expected_foreign: float  # of the turns that are kept, the share that all K rollouts would not keep
    expected_agreement: float  # of the two kept sets; 1.0 where both are empty
    agreement_bound: float  # lower bound on it, given how few turns the histogram counts

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
    """The cheapest plan whose kept set is promised to agree to 1 - `error`.

    `histogram` (K + 1 counts) tells turns by their right rollouts of K.

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
        if plan.agreement_bound >= 1.0 - error:
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
        rollouts = 0.0
        wrong = []  # by final count: the chance that the verdict differs
        for j, p in enumerate(self.final):
            chances = [
                (n, right, ways * math.comb(self.total - n, j - right) / math.comb(self.total, j))
                for n, right, ways in ends
                if 0 <= j - right <= self.total - n
            ]
            rollouts += p * math.fsum(chance * n for n, _, chance in chances)
            wrong.append(math.fsum(c for n, right, c in chances if is_kept(right, n, self.lambda_diff) != self.kept[j]))
        return self._plan(stops, rollouts, wrong)

    def _plan(self, stops: frozenset[State], rollouts: float, wrong: Sequence[float]) -> Plan:
        """`wrong` by final count -> shares of errors, agreement, and its bound."""
        cells = list(zip(self.final, wrong, self.kept, strict=True))
        lost = math.fsum(p * w for p, w, k in cells if k)
        foreign = math.fsum(p * w for p, w, k in cells if not k)
        both = math.fsum(p * (1.0 - w) for p, w, k in cells if k)
        agreement = 2 * both / (2 * both + lost + foreign) if both else float(lost + foreign == 0.0)
        return Plan(
            self.total,
            self.round,
            stops,
            rollouts,
            expected_error=lost + foreign,
            expected_lost=lost / (both + lost) if both + lost else 0.0,
            expected_foreign=foreign / (both + foreign) if both + foreign else 0.0,
            expected_agreement=agreement,
            agreement_bound=self._bound(cells, agreement) if agreement < 1.0 else 1.0,
        )

    def _bound(self, cells: Sequence[tuple[float, float, bool]], agreement: float) -> float:
        """The agreement a at which a * (2 both + errors) - 2 both is Z standard errors above 0."""

        def exceeds(a: float) -> bool:
            terms = [(p, w * a - 2.0 * (1.0 - a) * k * (1.0 - w)) for p, w, k in cells]
            mean = math.fsum(p * x for p, x in terms)
            variance = math.fsum(p * x * x for p, x in terms) - mean * mean
            return mean + Z * math.sqrt(max(variance, 0.0) / self.turns) > 0.0

        low, high = 0.0, agreement
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if exceeds(middle) else (middle, high)
        return low
