"""Adaptive profiling: which turns need no more rollouts. Pure Python.

A turn's final verdict is that of all K rollouts: kept when 0 < right < K and right < lambda K. After n of them, `right`
of which were right, the turn may stop when more would hardly change the verdict. With the distribution of the final
count over turns (profiling/evidence.py) everything is exact. The stopping rule is the one of fewest expected rollouts
among those whose kept set agrees with that of all K rollouts as well as asked for: a Bayes sequential test (Wald;
Arrow, Blackwell and Girshick 1949), solved by backward induction for a price of errors. Rules of one price jump in
what they promise; a mixture of two, drawn by turn, promises exactly what is asked for (Neyman and Pearson).

Agreement is that of two sets, 2 |A and B| / (|A| + |B|): 1 minus the errors over the mean size of the sets, so that
the many turns that neither keeps do not flatter it. The errors made are not alike: nearly all are turns that were
right once or twice of K, given up after a long run of wrong rollouts, while what is kept in error is rare. Agreement is
promised one standard error below what is expected, since the distribution is learnt from turns (84 % confidence).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from pivotrl.profiling.evidence import Learnt, State, hypergeometric

Z = 1.0  # standard errors between the agreement that is expected and the one that is promised
Rule = frozenset[State]  # where to stop


def is_kept(right: int, scored: int, lambda_diff: float) -> bool:
    """Membership of D_adv (method.md 1.2, eq. 5) by counts; exact, as `select` decides."""
    return 0 < right < scored and Fraction(right, scored) < Fraction(str(lambda_diff))


@dataclass(frozen=True)
class Expected:
    """What a plan, or several of them, come to over turns that are distributed as was learnt."""

    rollouts: float
    error: float  # share of all turns whose verdict differs from that of all K rollouts
    lost: float  # of the turns that all K rollouts keep, the share that is not kept
    foreign: float  # of the turns that are kept, the share that all K rollouts would not keep
    agreement: float  # of the two kept sets; 1.0 where both are empty
    agreement_bound: float  # lower bound on it, given how few turns it is learnt from
    evidence_turns: float  # turns with all K rollouts that would tell this agreement as precisely


@dataclass(frozen=True)
class Plan:
    """When to stop. Of the two rules a turn follows the first where its draw from [0, 1) is below `share`."""

    rollouts: int  # K
    round: int
    rules: tuple[Rule, Rule]
    share: float
    costs: tuple[float, ...]  # expected rollouts of a turn by its final count
    errors: tuple[float, ...]  # chance that its verdict differs, by its final count
    expected: Expected

    def is_decided(self, rewards: Sequence[float | None], draw: float) -> bool:
        """Whether a turn with these rewards so far is done. `draw` belongs to the turn.

        Unscorable rollouts tell nothing. A reward strictly between 0 and 1 leaves a turn undecided: its final mean is
        not determined by counts.
        """
        if len(rewards) >= self.rollouts:
            return True
        rule = self.rules[draw >= self.share]
        scored = [r for r in rewards if r is not None]
        right = scored.count(1.0)
        return right + scored.count(0.0) == len(scored) and (len(scored), right) in rule


Parts = Sequence[tuple[int, "Plan | None"]]  # of a profile: so many turns by each plan; None: they got all K rollouts


def make_plan(learnt: Learnt, round: int, lambda_diff: float, error: float, before: Parts = (), turns: int = 1) -> Plan:
    """The cheapest plan whose kept set is promised to agree to 1 - `error`.

    So is that of the whole profile, of these `turns` and those `before`: plans that are seen now to have been too loose
    are made up for. Raises ValueError for fewer than three final counts, a round below 1 or an error outside [0, 1).
    """
    if len(learnt.final) < 3 or round < 1 or not 0 <= error < 1:
        raise ValueError(f"make_plan: {len(learnt.final)} final counts, round {round}, error {error}")
    chain = Chain(learnt.final, round, lambda_diff)
    weights = (1.0 + error, 1.0 - error)  # of a lost and a foreign turn: agreement is linear in them at this level

    def plan_of(rules: tuple[Rule, Rule], share: float) -> Plan:
        parts = [chain.by_final(rule) for rule in rules]
        costs, errors = (
            tuple(share * a + (1.0 - share) * b for a, b in zip(one, two, strict=True))
            for one, two in zip(*parts, strict=True)
        )
        return Plan(chain.total, round, rules, share, costs, errors, expectation(learnt, costs, errors, chain.kept))

    def is_enough(plan: Plan) -> bool:
        if plan.expected.agreement_bound < 1.0 - error:
            return False
        return not before or judge(learnt, lambda_diff, [*before, (turns, plan)]).agreement_bound >= 1.0 - error

    def single(price: float) -> Plan:
        rule = chain.solve(price, weights)[0]
        return plan_of((rule, rule), 1.0)

    low, high = 0.0, 24.0  # log of the price of an error, in rollouts; at e^24 none is ever bought
    loose, tight = single(math.exp(low)), single(math.inf)
    if not error:
        return tight
    if is_enough(loose):
        return loose
    for _ in range(30):
        middle = (low + high) / 2
        plan = single(math.exp(middle))
        if is_enough(plan):
            tight, high = plan, middle
        else:
            loose, low = plan, middle
    return _mixture(lambda share: plan_of((loose.rules[0], tight.rules[0]), share), is_enough)


def _mixture(plan_of: Callable[[float], Plan], is_enough: Callable[[Plan], bool]) -> Plan:
    """The largest share of the looser rule that keeps the promise."""
    best, low, high = plan_of(0.0), 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        if is_enough(plan := plan_of(middle)):
            best, low = plan, middle
        else:
            high = middle
    return best


class Chain:
    """The Markov chain of (n, right) given the distribution of the final count, and its stopping rules."""

    def __init__(self, final: Sequence[float], round: int, lambda_diff: float) -> None:
        self.total, self.round, self.lambda_diff = len(final) - 1, round, lambda_diff
        self.kept = kept = [is_kept(j, self.total, lambda_diff) for j in range(self.total + 1)]
        self.keeping: dict[State, float] = {}  # the chance that all K rollouts keep the turn
        self._moves: dict[State, list[tuple[State, float]]] = {}
        self._by_final: dict[Rule, tuple[list[float], list[float]]] = {}
        for n in range(self.total + 1):
            step = min(round, self.total - n)
            for right in range(n + 1):
                joint = [p * hypergeometric(right, j, n, self.total) for j, p in enumerate(final)]
                mass = math.fsum(joint)
                posterior = [x / mass if mass else 0.0 for x in joint]
                finals = kept[right : right + self.total - n + 1]
                # Exactly 0 or 1 where no further rollout can change the verdict.
                keeping = math.fsum(p for p, k in zip(posterior, kept, strict=True) if k)
                self.keeping[n, right] = 1.0 if all(finals) else keeping if any(finals) else 0.0
                self._moves[n, right] = [
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

    def solve(self, price: float, weights: tuple[float, float] = (1.0, 1.0), free: bool = False) -> tuple[Rule, float]:
        """The rule of least expected rollouts + price x errors, and that least.

        `weights` of a lost and of a foreign turn. A turn that stops has one rollout at least and is kept if the counts
        that were seen say so; `free`: it may have none, and is kept or not as is cheaper.
        """
        value: dict[State, float] = {}
        stops: set[State] = set()
        for n in range(self.total, -1, -1):
            for right in range(n + 1):
                state = (n, right)
                moves = self._moves[state]
                go_on = math.inf
                if moves:
                    go_on = moves[0][0][0] - n + math.fsum(chance * value[after] for after, chance in moves)
                keeping = self.keeping[state]
                drop, keep = weights[0] * keeping, weights[1] * math.fsum([1.0, -keeping])
                stopped = min(drop, keep) if free else keep if is_kept(right, n, self.lambda_diff) else drop
                # At an infinite price only a certain verdict stops.
                stop = price * stopped if stopped > 0.0 else 0.0
                if (n or free) and stop <= go_on:
                    stops.add(state)
                    go_on = stop
                value[state] = go_on
        return frozenset(stops), value[0, 0]

    def by_final(self, rule: Rule) -> tuple[list[float], list[float]]:
        """(expected rollouts, chance of a verdict that differs) by final count.

        Given the final count, all orders of right and wrong rollouts are equally likely; so the number of orders that
        reach a state without a stop is all that they need of the rule.
        """
        if rule in self._by_final:
            return self._by_final[rule]
        orders: dict[State, int] = {(0, 0): 1}
        ends: list[tuple[int, int, int]] = []
        for n in range(self.total + 1):
            for right in range(n + 1):
                if not (ways := orders.get((n, right), 0)):
                    continue
                if n == self.total or (n, right) in rule:
                    ends.append((n, right, ways))
                    continue
                step = min(self.round, self.total - n)
                for more in range(step + 1):
                    after = (n + step, right + more)
                    orders[after] = orders.get(after, 0) + ways * math.comb(step, more)
        costs: list[float] = []
        errors: list[float] = []
        for j in range(self.total + 1):
            chances = [
                (n, right, ways * math.comb(self.total - n, j - right) / math.comb(self.total, j))
                for n, right, ways in ends
                if 0 <= j - right <= self.total - n
            ]
            costs.append(math.fsum(chance * n for n, _, chance in chances))
            differs = (c for n, right, c in chances if is_kept(right, n, self.lambda_diff) != self.kept[j])
            errors.append(math.fsum(differs))
        self._by_final[rule] = costs, errors
        return costs, errors


def expectation(learnt: Learnt, costs: Sequence[float], errors: Sequence[float], kept: Sequence[bool]) -> Expected:
    """Of expected rollouts and chances of an error by final count. `kept`: what all K rollouts keep, by final count."""
    lost = learnt.mean([e * k for e, k in zip(errors, kept, strict=True)])
    foreign = learnt.mean([e * (not k) for e, k in zip(errors, kept, strict=True)])
    both = learnt.mean([(1.0 - e) * k for e, k in zip(errors, kept, strict=True)])
    agreement = 2 * both / (2 * both + lost + foreign) if both else float(lost + foreign == 0.0)

    # At agreement a, the mean of a * sizes - shared is 0; where the agreement is lower, it is above 0.
    shared = [2.0 * (1.0 - e) * k for e, k in zip(errors, kept, strict=True)]
    sizes = [e + s for e, s in zip(errors, shared, strict=True)]
    pairs = [(sizes, sizes), (sizes, shared), (shared, shared)]
    means, joints = (learnt.mean(sizes), learnt.mean(shared)), [learnt.joint(a, b) for a, b in pairs]
    low, high = 0.0, agreement
    for _ in range(40 if agreement < 1.0 else 0):
        a = (low + high) / 2
        variance = a * a * joints[0] - 2.0 * a * joints[1] + joints[2]
        exceeds = a * means[0] - means[1] + Z * math.sqrt(max(variance, 0.0)) > 0.0
        low, high = (low, a) if exceeds else (a, high)
    values = [agreement * x - y for x, y in zip(sizes, shared, strict=True)]
    return Expected(
        rollouts=learnt.mean(costs),
        error=lost + foreign,
        lost=lost / (both + lost) if both + lost else 0.0,
        foreign=foreign / (both + foreign) if both + foreign else 0.0,
        agreement=agreement,
        agreement_bound=low if agreement < 1.0 else 1.0,
        evidence_turns=learnt.evidence_turns(values) if agreement < 1.0 else learnt.turns,
    )


def judge(learnt: Learnt, lambda_diff: float, parts: Parts) -> Expected:
    """What a whole profile comes to."""
    total, turns = len(learnt.final) - 1, sum(count for count, _ in parts)
    kept = [is_kept(j, total, lambda_diff) for j in range(total + 1)]
    costs, errors = [0.0] * (total + 1), [0.0] * (total + 1)
    for count, plan in parts:
        for j in range(total + 1):
            costs[j] += count / turns * (plan.costs[j] if plan else total)
            errors[j] += count / turns * (plan.errors[j] if plan else 0.0)
    return expectation(learnt, costs, errors, kept)
