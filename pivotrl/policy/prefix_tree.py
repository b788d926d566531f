"""Prefix trees of token sequences: shared prefixes are stored, and later computed, once. Pure numpy.

The sequences of a batch become one trie laid out in depth-first order, one row a trie node. Row j is visible to row
i iff j <= i < subtree_end[j]; the position of a row is its depth; the loss is taken at (source row, target token)
pairs, so that one row (the last prompt token of G completions) can have many targets. G completions of a state, the
states of one trajectory, trajectories sharing a system prompt, and the turns of an SFT trajectory are all this case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class TokenSequence:
    """Token ids and the positions among them that carry loss (each predicted from the token before it)."""

    token_ids: tuple[int, ...]
    targets: tuple[int, ...]  # increasing, >= 1

    def __post_init__(self) -> None:
        t = self.targets
        if t and (t[0] < 1 or t[-1] >= len(self.token_ids) or any(b <= a for a, b in pairwise(t))):
            raise ValueError(f"targets must be increasing positions in [1, {len(self.token_ids)}), got {t[:8]}...")
        if not self.token_ids:
            raise ValueError("a sequence needs at least one token")

    @classmethod
    def of(cls, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> TokenSequence:
        """A prompt, and a completion that carries all the loss."""
        n, m = len(prompt_ids), len(completion_ids)
        return cls((*prompt_ids, *completion_ids), tuple(range(n, n + m)))


@dataclass(frozen=True)
class Segment:
    """A run of rows [start, end) without branches; its descendants are the rows [end, subtree_end)."""

    start: int
    end: int
    subtree_end: int
    parent: int  # index of the parent segment, -1 for a root


@dataclass(frozen=True)
class PrefixTree:
    """One micro-batch. S rows (trie nodes), P target pairs in the order of (sequence, offset)."""

    token_ids: Ints  # [S]
    position_ids: Ints  # [S] depth
    subtree_end: Ints  # [S]
    segments: tuple[Segment, ...]
    pair_row: Ints  # [P] row whose hidden state predicts the target
    pair_token: Ints  # [P] target token id
    pair_sequence: Ints  # [P] index in the list of sequences that the caller gave
    pair_offset: Ints  # [P] place among the targets of that sequence
    tokens_total: int  # sum of sequence lengths
    tokens_unique: int  # S without padding


def common_prefix(a: Ints, b: Ints) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


def depth_first_order(sequences: Sequence[TokenSequence]) -> tuple[list[int], list[int]]:
    """Indices in lexicographic order, and the prefix length that each shares with the one before it.

    Lexicographic order is a depth-first walk of the trie, so neighbours share the longest prefixes.
    """
    order = sorted(range(len(sequences)), key=lambda i: sequences[i].token_ids)
    arrays = [np.asarray(sequences[i].token_ids, dtype=np.int64) for i in order]
    shared = [0] + [common_prefix(a, b) for a, b in pairwise(arrays)]
    return order, shared[: len(order)]


def build_tree(
    sequences: Sequence[TokenSequence], indices: Sequence[int] | None = None, multiple_of: int = 1
) -> PrefixTree:
    """The trie of `sequences[i] for i in indices` (all by default), padded to a multiple of `multiple_of` rows.

    Without any sequence the tree is padding only: a micro-batch that takes part in the collectives of a step and has
    no loss. Padding rows form a root of their own, which nothing else sees.
    """
    indices = range(len(sequences)) if indices is None else indices
    chosen = [sequences[i] for i in indices]
    order, shared = depth_first_order(chosen)
    tokens: list[Ints] = []
    positions: list[Ints] = []
    ends = np.zeros(sum(len(s.token_ids) for s in chosen) + multiple_of, dtype=np.int64)
    pairs: list[tuple[int, Ints, Ints]] = []  # (place in `chosen`, rows, targets)
    path: Ints = np.zeros(0, dtype=np.int64)  # rows of the sequence before, root first
    rows = 0
    for place, keep in zip(order, shared, strict=True):
        ids = np.asarray(chosen[place].token_ids, dtype=np.int64)
        ends[path[keep:]] = rows  # the walk leaves these nodes
        new = len(ids) - keep
        path = np.concatenate([path[:keep], np.arange(rows, rows + new)])
        tokens.append(ids[keep:])
        positions.append(np.arange(keep, len(ids)))
        rows += new
        targets = np.asarray(chosen[place].targets, dtype=np.int64)
        pairs.append((place, path[targets - 1], ids[targets]))
    ends[path] = rows
    unique = rows
    padding = -rows % multiple_of if rows else multiple_of
    if padding:
        tokens.append(np.zeros(padding, dtype=np.int64))
        positions.append(np.arange(padding))
        ends[rows : rows + padding] = rows + padding
        rows += padding
    pairs.sort(key=lambda p: p[0])
    ends = ends[:rows]
    return PrefixTree(
        token_ids=_concatenate(tokens),
        position_ids=_concatenate(positions),
        subtree_end=ends,
        segments=_segments(ends),
        pair_row=_concatenate([r for _, r, _ in pairs]),
        pair_token=_concatenate([t for _, _, t in pairs]),
        pair_sequence=_concatenate([np.full(len(r), indices[p], dtype=np.int64) for p, r, _ in pairs]),
        pair_offset=_concatenate([np.arange(len(r)) for _, r, _ in pairs]),
        tokens_total=sum(len(s.token_ids) for s in chosen),
        tokens_unique=unique,
    )


def pack(sequences: Sequence[TokenSequence], budget: int) -> list[list[int]]:
    """Indices of sequences, grouped into micro-batches of at most `budget` unique tokens.

    Greedy in depth-first order, so that shared prefixes stay together. A sequence longer than the budget gets a
    micro-batch of its own: it cannot be cut.
    """
    order, shared = depth_first_order(sequences)
    return _pack([len(sequences[i].token_ids) for i in order], order, shared, budget)


def schedule(sequences: Sequence[TokenSequence], budget: int, ranks: int) -> list[list[list[int]]]:
    """[rank][micro-batch] -> indices; every rank has the same number of micro-batches, empty ones where needed.

    Ranks that take part in collectives must run the same number of forwards (field report D1). Where the budget
    leaves the last round uneven, the smallest budget with the same number of rounds spreads the work.
    """
    order, shared = depth_first_order(sequences)
    lengths = [len(sequences[i].token_ids) for i in order]
    batches = _pack(lengths, order, shared, budget)
    rounds = max(1, -(-len(batches) // ranks))
    low, high = 1, budget
    while low < high:
        middle = (low + high) // 2
        if len(_pack(lengths, order, shared, middle)) <= rounds * ranks:
            high = middle
        else:
            low = middle + 1
    batches = _pack(lengths, order, shared, high)
    batches += [[] for _ in range(rounds * ranks - len(batches))]
    return [[batches[k * ranks + r] for k in range(rounds)] for r in range(ranks)]


def _pack(lengths: list[int], order: list[int], shared: list[int], budget: int) -> list[list[int]]:
    batches: list[list[int]] = []
    used = 0
    for length, index, keep in zip(lengths, order, shared, strict=True):
        if batches and used + length - keep <= budget:
            batches[-1].append(index)
            used += length - keep
        else:
            batches.append([index])
            used = length
    return batches


def _segments(ends: Ints) -> tuple[Segment, ...]:
    """Runs of rows with the same subtree end: an only child's subtree ends where its parent's does."""
    starts = np.concatenate([[0], np.flatnonzero(np.diff(ends)) + 1, [len(ends)]])
    segments: list[Segment] = []
    open_segments: list[int] = []
    for a, b in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        while open_segments and segments[open_segments[-1]].subtree_end <= a:
            open_segments.pop()
        segments.append(Segment(a, b, int(ends[a]), open_segments[-1] if open_segments else -1))
        open_segments.append(len(segments) - 1)
    return tuple(segments)


def _concatenate(parts: list[Ints]) -> Ints:
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, dtype=np.int64)
