"""How far a policy has moved from pi_0, and in which way (method.md 1.4, Theorem 3.3). Pure Python.

All figures come from log-probs of the same token sequences under both policies. KL(pi_0 || pi) is estimated on what
pi_0 sampled, by the k3 terms r - 1 - log r with r = pi / pi_0 (unbiased, never negative), per token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from pivotrl.evaluation.statistics import bootstrap

_LIMIT = 20.0  # of a log-ratio: e^20 is beyond anything an estimate of a mean can use
Logprobs = Sequence[Sequence[float]]


def kl_to_start(trained: Logprobs, start: Logprobs) -> dict[str, Any]:
    """KL(pi_0 || pi) per token over sequences that pi_0 sampled, with a 95 % bootstrap interval over sequences."""
    sums, lengths = [], []
    for ours, theirs in zip(trained, start, strict=True):
        ratios = [max(-_LIMIT, min(_LIMIT, a - b)) for a, b in zip(ours, theirs, strict=True)]
        sums.append(math.fsum(math.exp(x) - 1.0 - x for x in ratios))
        lengths.append(len(ratios))
    total = sum(lengths)
    if not total:
        return {"kl": None, "ci": None, "sequences": len(sums), "tokens": 0}
    # Sequences are the independent draws; each brings its sum, at the mean length of all.
    low, high = bootstrap([s * len(sums) / total for s in sums])
    return {"kl": math.fsum(sums) / total, "ci": [low, high], "sequences": len(sums), "tokens": total}


def order_preserved(groups: Iterable[Sequence[tuple[float, float]]]) -> dict[str, Any]:
    """Share of pairs of candidates of one state that both policies put in the same order; 1 at the KL optimum.

    `groups`: per state, (log-prob under pi, log-prob under pi_0) of each candidate. Ties under pi_0 say nothing.
    """
    same = pairs = 0
    for group in groups:
        for i, (a, a0) in enumerate(group):
            for b, b0 in group[:i]:
                if a0 != b0:
                    pairs += 1
                    same += (a > b) == (a0 > b0) and a != b
    return {"share": same / pairs if pairs else None, "pairs": pairs}


def split_by_verdict(
    candidates: Iterable[tuple[str, tuple[int, ...], bool, float, float]],
) -> dict[str, list[list[tuple[float, float]]]]:
    """Distinct candidates of each state, within M ("accepted") and outside it ("rejected"), for `order_preserved`.

    Each candidate: (state, token ids, whether the verifier accepts it, log-prob under pi, under pi_0).
    """
    cells: dict[tuple[str, bool], dict[tuple[int, ...], tuple[float, float]]] = {}
    for state, ids, accepted, trained, start in candidates:
        cells.setdefault((state, accepted), {})[ids] = (trained, start)
    return {
        name: [list(cell.values()) for (_, accepted), cell in cells.items() if accepted is wanted]
        for name, wanted in (("accepted", True), ("rejected", False))
    }
