"""Which rows a step trains on: a function of (seed, step), so a resumed run draws what an uninterrupted one would."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class EpochSampler:
    """`count` rows a step from shuffled epochs laid end to end: every row is seen before any is seen again."""

    def __init__(self, rows: Sequence[T], count: int, seed: int):
        if not rows:
            raise ValueError("no rows to draw from")
        self.rows, self.count, self.seed = rows, count, seed

    def _order(self, epoch: int) -> list[int]:
        order = list(range(len(self.rows)))
        random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return order

    def draw(self, step: int) -> list:
        """Rows of `step`, counted from 0."""
        return self.take(step * self.count, self.count)

    def take(self, start: int, count: int) -> list:
        """`count` rows from place `start` of the epochs laid end to end."""
        places = range(start, start + count)
        orders = {epoch: self._order(epoch) for epoch in {p // len(self.rows) for p in places}}
        return [self.rows[orders[p // len(self.rows)][p % len(self.rows)]] for p in places]
