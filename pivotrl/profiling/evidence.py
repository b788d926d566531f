"""What turns tell of all K rollouts when most were stopped before: the distribution of right ones. Pure Python.

Rollouts of a turn are exchangeable: given j right ones of K, the first n hold a hypergeometric number of right ones.
Why a turn was stopped depends on what was seen of it alone, so the likelihood of what was seen needs no more (stopping
is ignorable). The distribution of j over turns is then estimated by maximum likelihood (EM), and its covariance by
the observed information; no model of success rates is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

State = tuple[int, int]  # (scored rollouts n, of which right)
Evidence = Mapping[State, float]  # turns by where they stopped
_ITERATIONS, _TOLERANCE = 500, 1e-7


def hypergeometric(drawn_right: int, right: int, drawn: int, total: int) -> float:
    """P(`drawn_right` right ones among `drawn` of `total` rollouts, `right` of which are right)."""
    if drawn_right < 0 or drawn < drawn_right:
        return 0.0
    ways = math.comb(right, drawn_right) * math.comb(total - right, drawn - drawn_right)
    return ways / math.comb(total, drawn)


@dataclass(frozen=True)
class Learnt:
    """An estimate of how turns are distributed by their right rollouts of K."""

    final: tuple[float, ...]  # K + 1 shares
    covariance: tuple[tuple[float, ...], ...]  # of `final`; [K + 1, K + 1]
    turns: float  # that it is learnt from, and one

    def mean(self, values: Sequence[float]) -> float:
        """Expectation over turns of a value that their final count determines."""
        return math.fsum(p * v for p, v in zip(self.final, values, strict=True))

    def joint(self, one: Sequence[float], other: Sequence[float]) -> float:
        """Covariance of the estimates `mean(one)` and `mean(other)`."""
        return math.fsum(
            a * math.fsum(c * b for c, b in zip(row, other, strict=True))
            for a, row in zip(one, self.covariance, strict=True)
        )

    def evidence_turns(self, values: Sequence[float]) -> float:
        """How many turns with all K rollouts would tell `mean(values)` as precisely."""
        spread, mean = self.mean([v * v for v in values]), self.mean(values)
        variance = self.joint(values, values)
        return min((spread - mean * mean) / variance, self.turns) if variance > 0.0 else self.turns


def of_histogram(histogram: Sequence[float]) -> Evidence:
    """Evidence of turns that all got K rollouts: `histogram[j]` of them had j right."""
    total = len(histogram) - 1
    return {(total, j): count for j, count in enumerate(histogram) if count}


def learn(evidence: Evidence, total: int) -> Learnt:
    """The distribution of final counts 0 to `total` (K).

    One turn is added in all, spread evenly over the counts: what no turn showed is rare, not impossible.
    """
    size, mass = total + 1, math.fsum(evidence.values()) + 1.0
    # A state (n, right) is compatible with the finals from `right` to `right` + total - n.
    seen = [
        (count, right, [hypergeometric(right, j, n, total) for j in range(right, right + total - n + 1)])
        for (n, right), count in sorted(evidence.items())
        if count
    ]
    final = [1.0 / size] * size
    for _ in range(_ITERATIONS):
        expected = [1.0 / size] * size
        for count, first, chances in seen:
            joint = [p * c for p, c in zip(final[first:], chances, strict=False)]
            scale = count / math.fsum(joint)
            for j, x in enumerate(joint, start=first):
                expected[j] += scale * x
        before, final = final, [e / mass for e in expected]
        if max(abs(a - b) for a, b in zip(before, final, strict=True)) < _TOLERANCE:
            break
    return Learnt(tuple(final), _covariance(final, seen, mass), mass)


def _covariance(
    final: Sequence[float], seen: Sequence[tuple[float, int, list[float]]], mass: float
) -> tuple[tuple[float, ...], ...]:
    """Inverse of the observed information, for shares that sum to 1.

    In units of each share, the information is the sum over turns of the outer products of their posteriors.
    """
    size = len(final)
    information = [[1.0 / size if i == j else 0.0 for j in range(size)] for i in range(size)]
    for count, first, chances in seen:
        joint = [p * c for p, c in zip(final[first:], chances, strict=False)]
        whole = math.fsum(joint)
        posterior = [x / whole for x in joint]
        for i, a in enumerate(posterior, start=first):
            row = information[i]
            for j, b in enumerate(posterior, start=first):
                row[j] += count * a * b
    inverse = _inverse(information)
    return tuple(tuple(final[i] * final[j] * (inverse[i][j] - 1.0 / mass) for j in range(size)) for i in range(size))


def _inverse(matrix: list[list[float]]) -> list[list[float]]:
    """Of a positive definite matrix, by elimination (no pivoting is needed)."""
    size = len(matrix)
    rows = [[*row, *(1.0 if i == j else 0.0 for j in range(size))] for i, row in enumerate(matrix)]
    for i in range(size):
        scale = rows[i][i]
        rows[i] = [x / scale for x in rows[i]]
        for k in range(size):
            if k != i and (factor := rows[k][i]):
                rows[k] = [x - factor * y for x, y in zip(rows[k], rows[i], strict=True)]
    return [row[size:] for row in rows]
