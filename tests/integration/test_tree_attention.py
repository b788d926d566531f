"""Tree attention and the target head against plain, dense formulas."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pivotrl.config import Parallel
from pivotrl.models.rope import Rope
from pivotrl.policy import distributed, head, tree_kernel
from pivotrl.policy.prefix_tree import PrefixTree, TokenSequence, build_tree, split_rows
from pivotrl.policy.rope import rope_tables
from pivotrl.policy.tree_kernel import CpuPlan, CpuTreeAttention, Tables
from tests.unit.test_prefix_tree import SHAPES

SCALE = 0.25
# three levels, leaves of unequal length in one group, padding rows
LEVELS = [
    *(TokenSequence.of([1] * 5 + [10 + p] * 3, [20 + g] * (4 + g)) for p in range(3) for g in range(4)),
    TokenSequence.of([1] * 5, [3]),
]


def dense(q: Tensor, k: Tensor, v: Tensor, tables: Tables, tree: PrefixTree) -> Tensor:
    """q [S, h, d], k and v [S, g, d] -> [S, h, d], by a mask over all pairs."""

    def rotated(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return (x * tables[0][:, None] + torch.cat([-b, a], -1) * tables[1][:, None]).transpose(0, 1)[None]

    rows, ends = torch.arange(len(q), device=q.device), torch.from_numpy(tree.subtree_end).to(q.device)
    visible = (rows[None] <= rows[:, None]) & (rows[:, None] < ends[None])
    out = F.scaled_dot_product_attention(
        rotated(q), rotated(k), v.transpose(0, 1)[None], attn_mask=visible, scale=SCALE, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def with_gradients(
    tree: PrefixTree, dtype: torch.dtype, inputs: list[Tensor], ranks: int | None, plan_of: PrefixTree | None = None
) -> list[Tensor]:
    """Output and gradients of q, k, v: of the kernel, rank after rank, or (`ranks` None) of the dense formula."""
    q, k, v = (x.clone().to(dtype).requires_grad_() for x in inputs)
    tables = rope_tables(torch.from_numpy(tree.position_ids), q.shape[-1], Rope(1e4), dtype)
    if ranks is None:
        out = dense(q, k, v, tables, tree)
    else:
        out = torch.zeros_like(q)
        for rows in split_rows(tree.position_ids, ranks):
            own, plan = tuple(t[rows] for t in tables), CpuPlan.of(plan_of or tree, rows)
            part = CpuTreeAttention.apply(q[rows], k, v, own, tables, plan, SCALE)
            out = out.index_copy(0, torch.from_numpy(rows), part)
    (out.float() * torch.linspace(-1, 1, q.shape[-1])).sum().backward()
    return [out, q.grad, k.grad, v.grad]


def random_inputs(tree: PrefixTree, heads: int = 4, groups: int = 2) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(len(tree.token_ids), h, 16) for h in (heads, groups, groups)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize(("block", "longest", "ranks"), [(2**20, 256, 1), (64, 3, 1), (64, 3, 2), (2**20, 256, 3)])
def test_tree_attention_equals_masked_attention(
    dtype: torch.dtype, tolerance: float, block: int, longest: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads share keys; `ranks` is context parallelism, each rank with its own rows."""
    monkeypatch.setattr(tree_kernel, "BLOCK_ELEMENTS", block)
    monkeypatch.setattr(tree_kernel, "LONGEST_DIAGONAL", longest)
    tree = build_tree(LEVELS, multiple_of=8 * ranks)
    plan = CpuPlan.of(tree)
    assert any(runs.kept is not None for runs in plan.diagonals) and len(plan.rectangles) > 3
    inputs = [x.to(dtype) for x in random_inputs(tree)]
    found = with_gradients(tree, dtype, inputs, ranks)
    for got, wanted in zip(found, with_gradients(tree, torch.float32, inputs, None), strict=True):
        torch.testing.assert_close(got.float(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", SHAPES)
def test_unusual_tries(name: str) -> None:
    tree = build_tree(SHAPES[name])
    inputs = random_inputs(tree, heads=3, groups=1)
    found = with_gradients(tree, torch.float32, inputs, 1)
    for got, wanted in zip(found, with_gradients(tree, torch.float32, inputs, None), strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_a_branch_that_sees_its_sibling_is_noticed() -> None:
    """Negative control: a plain causal row of tokens is not the tree."""
    tree = build_tree(LEVELS)
    chain = build_tree([TokenSequence(tuple(range(len(tree.token_ids))), ())])
    inputs = random_inputs(tree)
    found = with_gradients(tree, torch.float32, inputs, 1, plan_of=chain)
    for got, wanted in zip(found, with_gradients(tree, torch.float32, inputs, None), strict=True):
        assert (got - wanted).abs().max() > 1e-2


@pytest.mark.parametrize("ranks", [1, 2])
def test_flex_attention_has_the_same_rule(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask of the GPU path, by FlexAttention's plain form, which runs on CPU (forward only)."""
    from torch.nn.attention.flex_attention import create_mask, flex_attention

    from pivotrl.policy.tree_flex import flex_tree_attention, tree_mask

    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    tree = build_tree([*LEVELS, *SHAPES["200 branches"]], multiple_of=16 * ranks)
    q, k, v = random_inputs(tree)
    tables = rope_tables(torch.from_numpy(tree.position_ids), 16, Rope(1e4), torch.float32)
    wanted = dense(q, k, v, tables, tree)
    count = len(tree.token_ids)
    for rows in split_rows(tree.position_ids, ranks):
        mask = tree_mask(tree, rows, torch.device("cpu"))
        own = tuple(t[rows] for t in tables)
        got = flex_tree_attention(q[rows], k, v, own, tables, mask, SCALE, attend=flex_attention)
        torch.testing.assert_close(got, wanted[rows], atol=5e-6, rtol=5e-6)
        # the tiles leave nothing out, and some are not computed
        pairs = create_mask(mask.mask_mod, None, None, len(rows), count, device="cpu")[0, 0].numpy()
        tiles = mask.to_dense()[0, 0].numpy().astype(bool)
        for i, j in np.ndindex(tiles.shape):
            assert tiles[i, j] or not pairs[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128].any()
        assert not tiles.all()
        shifted = dataclasses.replace(tree, subtree_end=np.roll(tree.subtree_end, 1))  # negative control
        wrong = tree_mask(shifted, rows, torch.device("cpu"))
        other = flex_tree_attention(q[rows], k, v, own, tables, wrong, SCALE, attend=flex_attention)
        assert not torch.allclose(other, wanted[rows], atol=1e-2)


@pytest.mark.parametrize(("block", "tile"), [(1, 1), (7 * 30, 20), (2**23, 2**18)])
def test_targets_in_blocks_equal_log_softmax(block: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Field report K3: any size of blocks and tiles gives the same, and no more scores than a block exist at a time."""
    distributed.initialise(Parallel())
    torch.manual_seed(0)
    vocabulary, hidden_size, temperature = 50, 16, 0.6
    monkeypatch.setattr(head, "BLOCK_ELEMENTS", block)
    monkeypatch.setattr(head, "TILE_ELEMENTS", tile)
    seen: list[int] = []
    original = head.scores

    def watched(*arguments: Any) -> Iterator[tuple[head.Block, Tensor]]:
        for part, products in original(*arguments):
            seen.append(products.numel())
            yield part, products

    monkeypatch.setattr(head, "scores", watched)
    hidden, weight = torch.randn(30, hidden_size), torch.randn(vocabulary, hidden_size)
    pair_row = torch.tensor([0, 0, 0, 3, *range(5, 30), 29])
    pair_token = torch.randint(0, vocabulary, pair_row.shape)
    pair_token[1] = pair_token[0]  # two completions that begin alike
    a, b = torch.randn(len(pair_row)), torch.randn(30)
    results = []
    for in_blocks in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if in_blocks:
            logprobs, entropy = head.target_logprobs(h, w, pair_row, pair_token, temperature, None)
        else:
            full = (h @ w.t() / temperature).log_softmax(-1)
            logprobs, entropy = full[pair_row, pair_token], -(full.exp() * full).sum(-1)
        ((logprobs * a).sum() + (entropy * b).sum()).backward()
        results.append([logprobs, entropy, h.grad, w.grad])
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-5)
    assert sum(seen) == 2 * 30 * vocabulary and max(seen) <= max(block, 30)


def test_a_rank_without_targets_or_tokens_has_no_part() -> None:
    """Context parallelism leaves ranks without targets; tensor parallelism may leave one with padding of the head."""
    distributed.initialise(Parallel())
    none = torch.zeros(0, dtype=torch.int64)
    hidden, weight = torch.zeros(0, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    logprobs, entropy = head.target_logprobs(hidden, weight, none, none, 1.0, None)
    (logprobs.sum() + entropy.sum()).backward()
    assert weight.grad is not None and not weight.grad.any() and len(logprobs) == len(entropy) == 0
    assert head.blocks(3, 0, torch.tensor([1]), torch.tensor([5])) == []
