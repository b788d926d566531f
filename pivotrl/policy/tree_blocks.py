"""How the attention of a prefix tree is cut into products without masked pairs. Pure numpy.

A row sees itself and its path to the root. The rows of a chain see (a) their chain up to themselves: a causal
*diagonal*, and (b) the path above the chain, all of it: a *rectangle* whose keys are a few ranges of rows. Siblings
share (b). Pairs of rows on different branches appear in neither. Under context parallelism a rank has some of the rows
as queries and all of them as keys; what it has of a chain then also sees the earlier rows of that chain.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pivotrl.policy.prefix_tree import Ints, PrefixTree

PADDING_FACTOR = 1.3  # diagonals are computed together while padding costs less than this factor in rows

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Diagonals:
    """n runs of rows, each causal by itself; the shorter ones are padded with their last row."""

    queries: Ints  # [n, length] among this rank's rows
    keys: Ints  # [n, length] among all rows
    valid: Bools  # [n, length] False: padding


@dataclass(frozen=True)
class Rectangle:
    """Rows [start, stop) of this rank see all of `keys`, ranges among all rows."""

    start: int
    stop: int
    keys: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Blocks:
    """Every visible pair of this rank's rows is in one of them, once. A row is in one diagonal and at most one
    rectangle."""

    diagonals: tuple[Diagonals, ...]
    rectangles: tuple[Rectangle, ...]

    @property
    def pairs(self) -> int:
        """(row, visible row) pairs; what diagonals compute above the diagonal is not counted."""
        own = sum(int(np.where(d.valid, np.arange(1, d.valid.shape[1] + 1), 0).sum()) for d in self.diagonals)
        return own + sum((r.stop - r.start) * sum(b - a for a, b in r.keys) for r in self.rectangles)


def tree_blocks(tree: PrefixTree, rows: Ints | None = None, longest: int | None = None) -> Blocks:
    """The blocks of a rank that has `rows` of the tree (ascending; all by default).

    `longest` cuts diagonals to that many rows, the rest of them becoming rectangles: for products that cannot leave
    out what is above the diagonal.
    """
    rows = np.arange(len(tree.token_ids)) if rows is None else rows
    chain_of = np.repeat(np.arange(len(tree.chains)), [c.end - c.start for c in tree.chains])[rows]
    breaks = np.flatnonzero((np.diff(rows) != 1) | (np.diff(chain_of) != 0)) + 1
    own: list[tuple[int, int, int]] = []  # (first of this rank's rows, first of all rows, length)
    rectangles: list[Rectangle] = []
    for first, stop in zip([0, *breaks.tolist()], [*breaks.tolist(), len(rows)], strict=True):
        chain = tree.chains[chain_of[first]]
        for start in range(first, stop, longest or stop - first):
            end, row = min(start + (longest or stop), stop), int(rows[start])
            own.append((start, row, end - start))
            keys = chain.path if row == chain.start else (*chain.path, (chain.start, row))
            if keys and rectangles and rectangles[-1].keys == keys and rectangles[-1].stop == start:
                rectangles[-1] = Rectangle(rectangles[-1].start, end, keys)  # a sibling
            elif keys:
                rectangles.append(Rectangle(start, end, keys))
    return Blocks(_diagonals(own), tuple(rectangles))


def _diagonals(runs: list[tuple[int, int, int]]) -> tuple[Diagonals, ...]:
    """Runs of similar length together, in the order of rows within a group."""
    groups: list[list[tuple[int, int, int]]] = []
    for run in sorted(runs, key=lambda r: (-r[2], r[0])):
        if groups and groups[-1][0][2] <= PADDING_FACTOR * run[2]:
            groups[-1].append(run)
        else:
            groups.append([run])
    made = []
    for group in groups:
        starts, rows, lengths = (np.array(sorted(group))[:, i, None] for i in range(3))  # [n, 1]
        offsets = np.arange(lengths.max())[None]  # [1, length]
        inside = np.minimum(offsets, lengths - 1)
        made.append(Diagonals(starts + inside, rows + inside, offsets < lengths))
    return tuple(made)


def mask_blocks(subtree_end: Ints, rows: Ints, size: int) -> tuple[Bools, Bools]:
    """Which tiles of `size` x `size` (this rank's rows, all rows) need the mask, and which are visible as a whole.

    Returns (partial, full), [tiles of rows, tiles of all rows] each; pairs elsewhere are not visible. Where a tile's
    rows are not contiguous, `partial` may also name a tile without visible pairs; `full` is never wrong.
    """
    count = len(subtree_end)
    first = np.arange(0, count, size)  # of the tile's keys
    last = np.minimum(first + size, count) - 1
    nearest, farthest = np.minimum.reduceat(subtree_end, first), np.maximum.reduceat(subtree_end, first)
    low = np.minimum.reduceat(rows, np.arange(0, len(rows), size))[:, None]  # of the tile's queries
    high = np.maximum.reduceat(rows, np.arange(0, len(rows), size))[:, None]
    some = (first <= high) & (farthest > low)
    full = (last <= low) & (nearest > high)
    return some & ~full, full
