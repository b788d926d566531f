"""The trie holds every sequence exactly, once, under the visibility rule; packing keeps within its budget."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pivotrl.policy.prefix_tree import PrefixTree, TokenSequence, build_tree, pack, schedule


@st.composite
def sequences(draw: st.DrawFn) -> list[TokenSequence]:
    """Few token values, so that prefixes are shared, duplicated and nested often."""
    ids = st.lists(st.integers(0, 2), min_size=1, max_size=9)
    rows = draw(st.lists(ids, min_size=1, max_size=9))
    return [
        TokenSequence(tuple(r), tuple(sorted(draw(st.sets(st.integers(1, len(r) - 1)))) if len(r) > 1 else ()))
        for r in rows
    ]


def path_to(tree: PrefixTree, row: int) -> list[int]:
    """Rows visible to `row`, by the rule alone."""
    return [j for j in range(row + 1) if row < tree.subtree_end[j]]


def last_row(tree: PrefixTree, ids: tuple[int, ...]) -> int:
    rows = [i for i in range(tree.tokens_unique) if tuple(tree.token_ids[path_to(tree, i)]) == ids]
    assert len(rows) == 1, "a prefix is stored exactly once"
    return rows[0]


@settings(max_examples=150, deadline=None)
@given(sequences(), st.integers(1, 4))
def test_tree_holds_every_sequence_once(seqs: list[TokenSequence], multiple: int) -> None:
    tree = build_tree(seqs, multiple_of=multiple)
    assert len(tree.token_ids) % multiple == 0
    assert tree.tokens_unique == len({s.token_ids[:n] for s in seqs for n in range(1, len(s.token_ids) + 1)})
    assert tree.tokens_unique <= tree.tokens_total
    for s in seqs:
        row = last_row(tree, s.token_ids)
        assert [int(tree.position_ids[j]) for j in path_to(tree, row)] == list(range(len(s.token_ids)))
    expected = [(i, k, s.token_ids[t], s.token_ids[:t]) for i, s in enumerate(seqs) for k, t in enumerate(s.targets)]
    found = [
        (int(i), int(k), int(t), tuple(tree.token_ids[path_to(tree, int(r))].tolist()))
        for i, k, t, r in zip(tree.pair_sequence, tree.pair_offset, tree.pair_token, tree.pair_row, strict=True)
    ]
    assert found == expected  # duplicated sequences keep their own pairs


@settings(max_examples=100, deadline=None)
@given(sequences())
def test_segments_cover_the_rows_and_are_maximal(seqs: list[TokenSequence]) -> None:
    tree = build_tree(seqs)
    assert [s.start for s in tree.segments] == [0, *(s.end for s in tree.segments[:-1])]
    assert tree.segments[-1].end == len(tree.token_ids)
    for s in tree.segments:
        assert (tree.subtree_end[s.start : s.end] == s.subtree_end).all()
        if s.parent >= 0:
            parent = tree.segments[s.parent]
            assert parent.end <= s.start and s.subtree_end <= parent.subtree_end
            assert parent.subtree_end > s.subtree_end or parent.end < s.start, (
                "an only child belongs to its parent's segment"
            )
            assert tree.position_ids[s.start] == tree.position_ids[parent.end - 1] + 1
        else:
            assert tree.position_ids[s.start] == 0


@settings(max_examples=100, deadline=None)
@given(sequences(), st.integers(1, 30), st.integers(1, 4))
def test_schedule_covers_once_within_budget_and_evenly(seqs: list[TokenSequence], budget: int, ranks: int) -> None:
    plan = schedule(seqs, budget, ranks)
    assert len(plan) == ranks and len({len(p) for p in plan}) == 1
    batches = [b for rank in plan for b in rank]
    assert sorted(i for b in batches for i in b) == list(range(len(seqs)))
    for b in batches:
        tree = build_tree(seqs, b)
        assert tree.tokens_unique <= budget or len({seqs[i].token_ids for i in b}) == 1
    assert len(plan[0]) == max(1, -(-len(pack(seqs, budget)) // ranks))


def test_five_long_against_five_short_sequences_need_equal_rounds() -> None:
    """Field report D1: lengths [95 x 5] and [20 x 5] under a cap of 100."""
    seqs = [TokenSequence.of([i] * 90, [9] * 5) for i in range(5)] + [
        TokenSequence.of([10 + i] * 15, [9] * 5) for i in range(5)
    ]
    plan = schedule(seqs, 100, 2)
    assert len(plan[0]) == len(plan[1])
    assert all(build_tree(seqs, b).tokens_unique <= 100 for rank in plan for b in rank)


def test_grpo_group_costs_its_unique_tokens() -> None:
    prompt = list(range(100))
    group = [TokenSequence.of(prompt, [200 + g] * 10) for g in range(8)]
    tree = build_tree(group)
    assert tree.tokens_unique == 180 and tree.tokens_total == 880
    assert (tree.pair_row[tree.pair_offset == 0] == 99).all()  # eight targets of one row
    assert len(tree.segments) == 9


def test_turns_of_one_trajectory_are_one_chain() -> None:
    ids = tuple(range(50))
    chain = [TokenSequence(ids[:20], tuple(range(10, 20))), TokenSequence(ids, tuple(range(40, 50)))]
    tree = build_tree(chain)
    assert tree.tokens_unique == 50 and len(tree.segments) == 1 and len(tree.pair_row) == 20


def test_dummy_tree_has_rows_but_no_loss() -> None:
    tree = build_tree([], multiple_of=2)
    assert len(tree.token_ids) == 2 and tree.tokens_unique == 0 and len(tree.pair_row) == 0


@pytest.mark.parametrize("targets", [(0,), (3,), (2, 1), (1, 1)])
def test_impossible_targets_are_refused(targets: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="targets"):
        TokenSequence((1, 2, 3), targets)


def test_subset_keeps_the_callers_indices() -> None:
    seqs = [TokenSequence.of([1, 2], [i]) for i in range(5)]
    assert np.array_equal(np.unique(build_tree(seqs, [4, 1]).pair_sequence), [1, 4])
