"""Blocks hold every visible pair of a tree once and no other, on any context-parallel rank."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pivotrl.policy.prefix_tree import PrefixTree, TokenSequence, build_tree, split_rows
from pivotrl.policy.tree_blocks import Blocks, mask_blocks, tree_blocks
from tests.unit.test_prefix_tree import SHAPES, sequences


def visible(tree: PrefixTree, rows: np.ndarray) -> np.ndarray:
    """The rule itself: [rows, S]."""
    keys = np.arange(len(tree.token_ids))
    return (keys <= rows[:, None]) & (rows[:, None] < tree.subtree_end)


def counted(blocks: Blocks, rows: int, keys: int) -> np.ndarray:
    """How often each pair is computed: [rows, S]."""
    found = np.zeros((rows, keys), dtype=int)
    for d in blocks.diagonals:
        for queries, own, valid in zip(d.queries, d.keys, d.valid, strict=True):
            for i in range(int(valid.sum())):
                found[queries[i], own[: i + 1]] += 1
    for r in blocks.rectangles:
        for a, b in r.keys:
            found[r.start : r.stop, a:b] += 1
    return found


@settings(max_examples=100)
@given(sequences(), st.integers(1, 3), st.sampled_from([None, 1, 2, 5]))
def test_every_visible_pair_once(seqs: list[TokenSequence], ranks: int, longest: int | None) -> None:
    tree = build_tree(seqs, multiple_of=ranks)
    for rows in split_rows(tree.position_ids, ranks):
        blocks = tree_blocks(tree, rows, longest)
        expected = visible(tree, rows)
        assert np.array_equal(counted(blocks, len(rows), len(tree.token_ids)), expected.astype(int))
        assert blocks.pairs == expected.sum()
        starts = [r.start for r in blocks.rectangles]
        assert starts == sorted(set(starts)), "a row is in one rectangle at most"


@pytest.mark.parametrize("name", SHAPES)
def test_every_visible_pair_of_unusual_tries(name: str) -> None:
    tree = build_tree(SHAPES[name], multiple_of=3)
    blocks = tree_blocks(tree)
    assert np.array_equal(
        counted(blocks, len(tree.token_ids), len(tree.token_ids)),
        visible(tree, np.arange(len(tree.token_ids))).astype(int),
    )


def test_a_forgotten_range_is_noticed() -> None:
    """Negative control of the comparison above."""
    tree = build_tree(SHAPES["deep"])
    blocks = tree_blocks(tree)
    less = Blocks(blocks.diagonals, blocks.rectangles[:-1])
    rows = np.arange(len(tree.token_ids))
    assert not np.array_equal(counted(less, len(rows), len(rows)), visible(tree, rows).astype(int))


def test_siblings_are_one_product() -> None:
    tree = build_tree(SHAPES["200 branches"])
    blocks = tree_blocks(tree)
    assert len(blocks.rectangles) == 1 and len(blocks.diagonals) <= 8


@settings(max_examples=60)
@given(sequences(), st.integers(1, 3), st.integers(1, 4))
def test_tiles_of_the_mask(seqs: list[TokenSequence], ranks: int, size: int) -> None:
    """Full tiles are visible as a whole, and nothing is visible outside the named tiles."""
    tree = build_tree(seqs, multiple_of=ranks)
    for rows in split_rows(tree.position_ids, ranks):
        expected = visible(tree, rows)
        partial, full = mask_blocks(tree.subtree_end, rows, size)
        assert not (partial & full).any()
        for i, j in np.ndindex(partial.shape):
            tile = expected[i * size : (i + 1) * size, j * size : (j + 1) * size]
            if full[i, j]:
                assert tile.all()
            elif not partial[i, j]:
                assert not tile.any()
            elif ranks == 1:
                assert tile.any(), "contiguous rows name no tile in vain"
                assert not tile.all()
