"""`select.action_floor`: pivots of actions that a low mean alone would hardly keep. Pure Python.

A set of low means (adv) holds what pi_0 does badly. An action that it does well is then absent, and training on the
rest unlearns it (docs/study.md). The floor adds the hardest of its other mixed turns, which still give a signal.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from pivotrl.profiling.choose import Candidate
from pivotrl.profiling.statistics import exact
from pivotrl.tracking.actions import tool_of


class Floor:
    """Takes every turn that may be a pivot, then says which are added."""

    def __init__(self, share: float) -> None:
        self._numerator, self._denominator = exact(share)
        self.active = share > 0
        self._turns: Counter[str] = Counter()  # scored, by demonstrated action
        self._kept: Counter[str] = Counter()  # members of the set
        self._spare: dict[str, list[tuple[float, int, Candidate]]] = defaultdict(list)
        self.added: dict[str, int] = {}

    def member(self, row: dict[str, Any]) -> None:
        self._turns[tool_of(row)] += 1
        self._kept[tool_of(row)] += 1

    def other(self, row: dict[str, Any], candidate: Candidate | None) -> None:
        """A scored turn outside the set; `candidate` where its outcomes are mixed."""
        self._turns[tool_of(row)] += 1
        if candidate is not None:
            self._spare[tool_of(row)].append((row["mean"], candidate.draw, candidate))

    def fill(self) -> list[Candidate]:
        """The turns to add: of each action the lowest means, until its share of the members is the floor's part of
        its share of the turns, or none is left."""
        turns, members = self._turns.total(), self._kept.total()
        chosen: list[Candidate] = []
        for action, spare in sorted(self._spare.items()):
            wanted = -(-self._numerator * self._turns[action] * members // (self._denominator * turns))  # rounded up
            picked = sorted(spare)[: max(wanted - self._kept[action], 0)]
            if picked:
                self.added[action] = len(picked)
            chosen += [candidate for _, _, candidate in picked]
        return chosen
