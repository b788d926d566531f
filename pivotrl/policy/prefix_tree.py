"""Prefix trees of token sequences: shared prefixes are stored, and later computed, once. Pure numpy.

The sequences of a batch become one trie laid out in depth-first order, one row a trie node. Row j is visible to row
i iff j <= i < subtree_end[j]; the position of a row is its depth; the loss is taken at (source row, target token)
pairs, so that one row (the last prompt token of G completions) can have many targets. G completions of a state, the
states of one trajectory, trajectories sharing a system prompt, and the turns of an SFT trajectory are all this case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pivotrl.errors import UserError

Ints = NDArray[np.int64]
SPLIT_PIECE = 128  # rows of a piece that context-parallel ranks are dealt, at most


@dataclass(frozen=True)
class TokenSequence:
    """Token ids and the positions among them that carry loss (each predicted from the token before it)."""

    token_ids: tuple[int, ...]
    targets: tuple[int, ...]  # increasing, >= 1
    # choices of the generator's routers, [tokens or one less, layers with experts, k]; None: the trainer's own
    experts: Ints | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        t = self.targets
        if t and (t[0] < 1 or t[-1] >= len(self.token_ids) or any(b <= a for a, b in pairwise(t))):
            raise ValueError(f"targets must be increasing positions in [1, {len(self.token_ids)}), got {t[:8]}...")
        if not self.token_ids:
            raise ValueError("a sequence needs at least one token")
        e, n = self.experts, len(self.token_ids)
        if e is not None and (e.ndim != 3 or len(e) not in (n - 1, n)):  # the last token need not be run
            raise UserError(
                f"routed experts {list(e.shape)} of a sequence of {n} tokens: [{n} or {n - 1}, layers, k] was "
                "expected; the engine must give back those of the prompt, too"
            )

    @classmethod
    def of(cls, prompt_ids: Sequence[int], completion_ids: Sequence[int], experts: Ints | None = None) -> TokenSequence:
        """A prompt, and a completion that carries all the loss."""
        n, m = len(prompt_ids), len(completion_ids)
        return cls((*prompt_ids, *completion_ids), tuple(range(n, n + m)), experts)


@dataclass(frozen=True)
class Chain:
    """Rows [start, end) of which each is the parent of the next. `path` are the rows before its first: ranges, root
    first, each a part of one other chain."""

    start: int
    end: int
    path: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class PrefixTree:
    """One micro-batch. S rows (trie nodes), P target pairs in the order of (sequence, offset)."""

    token_ids: Ints  # [S]
    position_ids: Ints  # [S] depth
    subtree_end: Ints  # [S]
    chains: tuple[Chain, ...]  # cover the rows in order
    pair_row: Ints  # [P] row whose hidden state predicts the target
    pair_token: Ints  # [P] target token id
    pair_sequence: Ints  # [P] index in the list of sequences that the caller gave
    pair_offset: Ints  # [P] place among the targets of that sequence
    tokens_total: int  # sum of sequence lengths
    tokens_unique: int  # S without padding
    # [S, layers with experts, k] of the generator; -1: the trainer's own choice. None: no sequence has any.
    experts: Ints | None = None


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

    The largest subtree of a node comes first: the path to any row is then a few ranges of rows (a logarithm of the
    number of rows at most; one for the pivots of a trajectory), and small siblings stand side by side.
    A row that several sequences share takes the experts of the lexicographically first of them that has any.
    Without any sequence the tree is padding only: a micro-batch that takes part in the collectives of a step and has
    no loss. Padding rows come last, which no other row sees.
    """
    indices = range(len(sequences)) if indices is None else indices
    chosen = [sequences[i] for i in indices]
    order, shared = depth_first_order(chosen)
    tokens: list[Ints] = []
    parents: list[Ints] = []
    sizes = np.zeros(sum(len(s.token_ids) for s in chosen), dtype=np.int64)  # rows of each subtree
    pairs: list[tuple[int, Ints, Ints]] = []  # (place in `chosen`, rows, targets)
    routed: list[tuple[Ints, Ints]] = []  # (rows, their experts), the sequence that first has a row
    path: Ints = np.zeros(0, dtype=np.int64)  # rows of the sequence before, root first
    rows = 0
    for place, keep in zip(order, shared, strict=True):
        ids = np.asarray(chosen[place].token_ids, dtype=np.int64)
        sizes[path[keep:]] = rows - path[keep:]  # the walk leaves these nodes
        path = np.concatenate([path[:keep], np.arange(rows, rows + len(ids) - keep)])
        tokens.append(ids[keep:])
        parents.append(np.concatenate([[-1], path])[keep:-1])
        rows += len(ids) - keep
        if (given := chosen[place].experts) is not None:
            routed.append((path[: len(given)], given))
        targets = np.asarray(chosen[place].targets, dtype=np.int64)
        pairs.append((place, path[targets - 1], ids[targets]))
    sizes[path] = rows - path
    unique, padding = rows, -rows % multiple_of if rows else multiple_of
    walk = _largest_first(_concatenate(parents), sizes[:rows])
    row_of = np.argsort(walk)  # row before -> row now
    parent = np.concatenate([[-1], row_of])[_concatenate(parents)[walk] + 1]
    # Padding repeats the first chain of the tree (without one: of the list), as roots of its own: nothing sees it, and
    # what it computes is computed elsewhere, too, so that no maximum of an FP8 scale is its own.
    walked = _concatenate(tokens)[walk]
    lead = walked[: _first_chain(parent)] if rows else np.asarray(sequences[0].token_ids if sequences else [0])
    places = np.arange(padding) % len(lead)
    parent = np.concatenate([parent, np.where(places, rows + np.arange(padding) - 1, -1)])
    ends = np.minimum(padding, np.arange(padding) - places + len(lead))
    pairs.sort(key=lambda p: p[0])
    return PrefixTree(
        token_ids=np.concatenate([walked, lead[places]]),
        position_ids=_depths(parent),
        subtree_end=np.concatenate([np.arange(rows) + sizes[:rows][walk], rows + ends]),
        chains=_chains(parent),
        pair_row=row_of[_concatenate([r for _, r, _ in pairs])],
        pair_token=_concatenate([t for _, _, t in pairs]),
        pair_sequence=_concatenate([np.full(len(r), indices[p], dtype=np.int64) for p, r, _ in pairs]),
        pair_offset=_concatenate([np.arange(len(r)) for _, r, _ in pairs]),
        tokens_total=sum(len(s.token_ids) for s in chosen),
        tokens_unique=unique,
        experts=_experts(routed, row_of, np.concatenate([np.arange(rows), places])) if rows else None,
    )


def _experts(routed: list[tuple[Ints, Ints]], row_of: Ints, rows: Ints) -> Ints | None:
    """Choices of each of `rows`, of the tree without padding."""
    if not routed:
        return None
    shapes = {e.shape[1:] for _, e in routed}
    if len(shapes) > 1:
        raise UserError(f"routed experts of one batch differ in [layers, k]: {sorted(shapes)}")
    found = np.full((len(row_of), *shapes.pop()), -1, dtype=np.int64)
    for path, experts in reversed(routed):  # the first one last: it stays
        found[row_of[path]] = experts[: len(path)]
    return found[rows]


def pack(sequences: Sequence[TokenSequence], budget: int) -> list[list[int]]:
    """Indices of sequences, grouped into micro-batches of at most `budget` unique tokens.

    Greedy in depth-first order, so that shared prefixes stay together. A sequence longer than the budget gets a
    micro-batch of its own: it cannot be cut.
    """
    order, shared = depth_first_order(sequences)
    return _pack([len(sequences[i].token_ids) for i in order], order, shared, budget)


def schedule(sequences: Sequence[TokenSequence], budget: int, ranks: int, multiple: int = 1) -> list[list[list[int]]]:
    """[rank][micro-batch] -> indices; every rank has the same number of micro-batches, a multiple of `multiple`, empty
    ones where needed.

    Ranks that take part in collectives must run the same number of forwards (field report D1). Where the budget
    leaves the last round uneven, the smallest budget with the same number of rounds spreads the work; micro-batches
    of one round are of similar size, and the unique tokens of two ranks differ by one micro-batch at most.
    """
    order, shared = depth_first_order(sequences)
    lengths = [len(sequences[i].token_ids) for i in order]
    batches = _pack(lengths, order, shared, budget)
    rounds = max(1, -(-len(batches) // (ranks * multiple))) * multiple
    low, high = 1, budget
    while low < high:
        middle = (low + high) // 2
        if len(_pack(lengths, order, shared, middle)) <= rounds * ranks:
            high = middle
        else:
            low = middle + 1
    batches = _pack(lengths, order, shared, high)
    batches += [[] for _ in range(rounds * ranks - len(batches))]
    return [[batches[k] for k in mine] for mine in deal([unique_tokens(sequences, b) for b in batches], ranks)]


def unique_tokens(sequences: Sequence[TokenSequence], indices: Sequence[int]) -> int:
    """Nodes of the trie of `sequences[i] for i in indices`."""
    chosen = [sequences[i] for i in indices]
    return sum(len(s.token_ids) for s in chosen) - sum(depth_first_order(chosen)[1])


def deal(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Indices of `costs` for each rank, as many for each; the sums differ by no more than the largest cost.

    In rounds of falling cost, the dearest of a round to the rank that has least. Raises ValueError where the number of
    costs is no multiple of `ranks`.
    """
    if len(costs) % ranks:
        raise ValueError(f"{len(costs)} pieces cannot be dealt evenly to {ranks} ranks")
    falling = sorted(range(len(costs)), key=lambda i: -costs[i])
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    sums = [0.0] * ranks
    for first in range(0, len(costs), ranks):
        poorest = sorted(range(ranks), key=sums.__getitem__)
        for i, rank in zip(falling[first : first + ranks], poorest, strict=True):
            dealt[rank].append(i)
            sums[rank] += costs[i]
    return dealt


def split_rows(position_ids: Ints, ranks: int) -> list[Ints]:
    """Rows of each context-parallel rank, ascending: as many for each, and nearly as many (row, visible row) pairs.

    A row at depth d sees d + 1 rows. Rows are dealt in contiguous pieces, so that the attention of a rank stays a few
    large products; S must be a multiple of `ranks` (and of 16 a rank, for pieces of at least 16 rows).
    """
    mine, rest = divmod(len(position_ids), ranks)
    if rest:
        raise ValueError(f"{len(position_ids)} rows cannot be split evenly over {ranks} ranks: pad the tree")
    longest = max(SPLIT_PIECE // 8, min(SPLIT_PIECE, mine // 4))
    size = next(n for n in range(min(longest, mine), 0, -1) if mine % n == 0)
    pieces = np.arange(len(position_ids)).reshape(-1, size)
    costs = (position_ids.reshape(-1, size) + 1).sum(1).tolist()
    return [pieces[sorted(dealt)].ravel() for dealt in deal(costs, ranks)]


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


def _largest_first(parent: Ints, sizes: Ints) -> Ints:
    """Another depth-first walk of the trie, larger subtrees before smaller ones: the row at each of its places."""
    if not len(parent):
        return parent
    branching = np.bincount(parent[parent >= 0], minlength=len(parent)) > 1
    starts = np.union1d(_chain_starts(parent), np.flatnonzero(branching) + 1)  # of runs without branches
    stops = np.append(starts[1:], len(parent))
    children: dict[int, list[int]] = {}  # row -> segments below it
    for segment, row in enumerate(parent[starts].tolist()):
        children.setdefault(row, []).append(segment)
    walk: list[Ints] = []
    stack = [-1]
    while stack:
        segment = stack.pop()
        if segment >= 0:
            walk.append(np.arange(starts[segment], stops[segment]))
        below = children.get(int(stops[segment]) - 1 if segment >= 0 else -1, [])
        stack.extend(sorted(below, key=lambda s: (sizes[starts[s]], -s)))  # the last is taken first
    return _concatenate(walk)


def _first_chain(parent: Ints) -> int:
    """Rows from the first on of which each is the parent of the next."""
    starts = _chain_starts(parent)
    return int(starts[1]) if len(starts) > 1 else len(parent)


def _chain_starts(parent: Ints) -> Ints:
    """Row 0, and the rows whose parent is not the row before."""
    return np.flatnonzero((np.arange(len(parent)) - 1 != parent) | (parent < 0))


def _depths(parent: Ints) -> Ints:
    """Depth of every row: that of its parent and one."""
    starts = _chain_starts(parent)
    depths = np.zeros(len(parent), dtype=np.int64)
    for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(parent)], strict=True):
        depth = depths[parent[start]] + 1 if parent[start] >= 0 else 0
        depths[start:stop] = np.arange(depth, depth + stop - start)
    return depths


def _chains(parent: Ints) -> tuple[Chain, ...]:
    starts = _chain_starts(parent)
    chains: list[Chain] = []
    for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(parent)], strict=True):
        row = int(parent[start])
        path: tuple[tuple[int, int], ...] = ()
        if row >= 0:
            above = chains[int(np.searchsorted(starts, row, side="right")) - 1]
            path = (*above.path, (above.start, row + 1))
        chains.append(Chain(start, stop, path))
    return tuple(chains)


def _concatenate(parts: list[Ints]) -> Ints:
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, dtype=np.int64)
