"""Attention over a prefix tree on GPUs: FlexAttention with the visibility rule as its mask."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from pivotrl.policy.prefix_tree import Ints, PrefixTree
from pivotrl.policy.tree_blocks import mask_blocks
from pivotrl.policy.tree_kernel import Tables

TILE = 128  # rows and keys of one tile of the kernel

Visible = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def visibility(rows: Tensor, subtree_end: Tensor) -> Visible:
    """`mask_mod` of a tree: key j is visible to query i, row rows[i] of the tree, iff j <= rows[i] < subtree_end[j]."""

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        row = rows[query]
        return (key <= row) & (row < subtree_end[key])

    return visible


def tree_mask(tree: PrefixTree, rows: Ints, device: torch.device) -> BlockMask:
    """The block mask of this rank's `rows` [R] against all rows [S], made from the tree and never as [R, S] pairs."""
    partial, full = mask_blocks(tree.subtree_end, rows, TILE)

    def ordered(tiles: Any) -> tuple[Tensor, Tensor]:  # how many of each row of tiles, and which, those first
        which = torch.from_numpy(tiles).to(device)
        order = torch.argsort(which.to(torch.int8), dim=1, descending=True, stable=True)
        return which.sum(1).to(torch.int32)[None, None], order.to(torch.int32)[None, None]

    return BlockMask.from_kv_blocks(
        *ordered(partial),
        *ordered(full),
        BLOCK_SIZE=TILE,
        mask_mod=visibility(torch.from_numpy(rows).to(device), torch.from_numpy(tree.subtree_end).to(device)),
        seq_lengths=(len(rows), len(tree.subtree_end)),
    )


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)  # trees differ in size from one micro-batch to the next


def rotated(x: Tensor, tables: Tables) -> Tensor:
    """Rotary embedding of x [S, n, d] (half-rotation layout)."""
    cosine, sine = (t[:, None] for t in tables)
    a, b = x.chunk(2, -1)
    return x * cosine + torch.cat([-b, a], -1) * sine


def flex_tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_tables: Tables,
    k_tables: Tables,
    mask: BlockMask,
    scale: float,
    attend: Callable[..., Any] | None = None,
) -> Tensor:
    """q [R, h, d] of this rank's rows; k, v [S, g, d] of all rows; before rotary embedding -> [R, h, d].

    `attend` is FlexAttention's function, compiled by default (the only form with a backward, on GPUs).
    """
    heads_first = [
        x.transpose(0, 1)[None].contiguous() for x in (rotated(q, q_tables), rotated(k, k_tables), v)
    ]  # [1, heads, rows, d]
    grouped = q.shape[1] != k.shape[1]
    out = (attend or _compiled())(*heads_first, block_mask=mask, scale=scale, enable_gqa=grouped)
    return out[0].transpose(0, 1)
