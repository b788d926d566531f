"""The trie holds every sequence exactly, once, under the visibility rule; packing keeps within its budget."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pivotrl.policy.prefix_tree import (
    PrefixTree,
    TokenSequence,
    build_tree,
    deal,
    pack,
    schedule,
    split_rows,
    unique_tokens,
)


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


@settings(max_examples=150)
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


@settings(max_examples=100)
@given(sequences(), st.integers(1, 3))
def test_chains_cover_the_rows_and_know_their_paths(seqs: list[TokenSequence], multiple: int) -> None:
    tree = build_tree(seqs, multiple_of=multiple)
    assert [c.start for c in tree.chains] == [0, *(c.end for c in tree.chains[:-1])]
    assert tree.chains[-1].end == len(tree.token_ids)
    for c in tree.chains:
        above = [j for a, b in c.path for j in range(a, b)]
        for row in range(c.start, c.end):
            assert path_to(tree, row) == [*above, *range(c.start, row + 1)]
        assert 2 ** len(c.path) <= len(tree.token_ids), "the path leaves a chain only for a smaller subtree"


def test_the_trajectory_comes_first_and_siblings_stand_together() -> None:
    """Every path of a trajectory's pivots is then one range of rows, and the actions of a pivot see the same one."""
    trunk = list(range(40))
    seqs = [TokenSequence.of(trunk[:d], [50 + 7 * g + d, g]) for d in (10, 20, 40) for g in range(5)]
    tree = build_tree(seqs)
    # at 40 the largest of equal subtrees is the first action, which ends the chain of the trajectory
    assert [c.end - c.start for c in tree.chains] == [42] + [2] * 14
    assert [c.path for c in tree.chains[1:]] == [((0, 40),)] * 4 + [((0, 20),)] * 5 + [((0, 10),)] * 5


@settings(max_examples=100)
@given(sequences(), st.integers(1, 30), st.integers(1, 4), st.integers(1, 3))
def test_schedule_covers_once_within_budget_and_evenly(
    seqs: list[TokenSequence], budget: int, ranks: int, multiple: int
) -> None:
    plan = schedule(seqs, budget, ranks, multiple)
    assert len(plan) == ranks and len({len(p) for p in plan}) == 1
    batches = [b for rank in plan for b in rank]
    assert sorted(i for b in batches for i in b) == list(range(len(seqs)))
    for b in batches:
        tree = build_tree(seqs, b)
        assert tree.tokens_unique <= budget or len({seqs[i].token_ids for i in b}) == 1
    assert len(plan[0]) == max(1, -(-len(pack(seqs, budget)) // (ranks * multiple))) * multiple
    loads = [[unique_tokens(seqs, b) for b in rank] for rank in plan]
    assert [[build_tree(seqs, b).tokens_unique for b in rank] for rank in plan] == loads
    assert max(map(sum, loads)) - min(map(sum, loads)) <= max(max(rank) for rank in loads)


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 5))
def test_dealt_sums_differ_by_the_largest_at_most(costs: list[int], ranks: int) -> None:
    costs += [0] * (-len(costs) % ranks)
    dealt = deal(costs, ranks)
    assert sorted(i for mine in dealt for i in mine) == list(range(len(costs)))
    assert {len(mine) for mine in dealt} == {len(costs) // ranks}
    sums = [sum(costs[i] for i in mine) for mine in dealt]
    assert max(sums) - min(sums) <= max(costs, default=0)


def test_uneven_deals_are_refused() -> None:
    with pytest.raises(ValueError, match="3 pieces cannot be dealt evenly to 2 ranks"):
        deal([1, 2, 3], 2)
    with pytest.raises(ValueError, match="7 rows cannot be split evenly over 2 ranks"):
        split_rows(np.arange(7), 2)


@settings(max_examples=50)
@given(st.integers(1, 4), st.integers(1, 40), st.integers(0, 12), st.integers(1, 60))
def test_context_ranks_have_as_many_rows_and_nearly_as_many_pairs(
    ranks: int, trunk: int, actions: int, length: int
) -> None:
    seqs = [TokenSequence.of(range(trunk * 16), [1000 + g] * length) for g in range(actions + 1)]
    tree = build_tree(seqs, multiple_of=16 * ranks)
    parts = split_rows(tree.position_ids, ranks)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(tree.token_ids)))
    assert all((np.diff(p) > 0).all() for p in parts) and len({len(p) for p in parts}) == 1
    pairs = [int((tree.position_ids[p] + 1).sum()) for p in parts]
    assert max(pairs) - min(pairs) <= 128 * int(tree.position_ids.max() + 1)
    assert all((np.diff(p) != 1).sum() <= max(3, len(p) // 16) for p in parts)  # few pieces


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
    assert len(tree.chains) == 8  # the prompt goes on as the first completion


def test_turns_of_one_trajectory_are_one_chain() -> None:
    ids = tuple(range(50))
    chain = [TokenSequence(ids[:20], tuple(range(10, 20))), TokenSequence(ids, tuple(range(40, 50)))]
    tree = build_tree(chain)
    assert tree.tokens_unique == 50 and len(tree.chains) == 1 and len(tree.pair_row) == 20


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


SHAPES = {
    "deep": [TokenSequence.of(range(n), [100 + n, n]) for n in range(1, 60)],  # a branch at every token
    "prefix of another": [
        TokenSequence.of([1, 2], [3, 4]),
        TokenSequence.of([1, 2, 3], [4, 5, 6]),
        TokenSequence.of([1], [2]),
    ],
    "one-token actions": [TokenSequence.of([1, 2, 3], [g]) for g in range(8)],
    "empty trunk": [TokenSequence((g, 1, 2), (1, 2)) for g in range(6)],
    "200 branches": [TokenSequence.of([1] * 10, [g + 2] * (1 + g % 7)) for g in range(200)],
    "single tokens": [TokenSequence((g,), ()) for g in range(3)],
}


@pytest.mark.parametrize("name", SHAPES)
def test_unusual_tries(name: str) -> None:
    seqs = SHAPES[name]
    tree = build_tree(seqs)
    assert tree.tokens_unique == len({s.token_ids[:n] for s in seqs for n in range(1, len(s.token_ids) + 1)})
    for i, k, t, r in zip(tree.pair_sequence, tree.pair_offset, tree.pair_token, tree.pair_row, strict=True):
        s = seqs[int(i)]
        assert t == s.token_ids[s.targets[int(k)]]
        assert tuple(tree.token_ids[path_to(tree, int(r))].tolist()) == s.token_ids[: s.targets[int(k)]]
    assert len(tree.pair_row) == sum(len(s.targets) for s in seqs)


def test_padding_repeats_the_first_chain_and_is_not_seen() -> None:
    sequences = [TokenSequence((5, 6, 9), (2,)), TokenSequence((5, 6, 7, 8), (3,))]
    tree = build_tree(sequences, multiple_of=11)
    assert tree.token_ids.tolist() == [5, 6, 7, 8, 9, 5, 6, 7, 8, 5, 6]
    assert tree.position_ids.tolist() == [0, 1, 2, 3, 2, 0, 1, 2, 3, 0, 1]
    assert tree.subtree_end.tolist() == [5, 5, 4, 4, 5, 9, 9, 9, 9, 11, 11]
    empty = build_tree(sequences, [], multiple_of=4)  # a micro-batch that only takes part in collectives
    assert empty.token_ids.tolist() == [5, 6, 9, 5]
    assert empty.tokens_unique == len(empty.pair_row) == 0
