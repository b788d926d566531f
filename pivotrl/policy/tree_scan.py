"""The recurrence of Mamba-2 (arXiv 2405.21060) over a prefix tree: a state goes from every row to all its children.

The rows of a chain between two branchings are cut into *chunks*. Within a chunk the recurrence is a product of
matrices (the paper's section 6); between chunks the state at the end of one is the start of each chunk below it, all
chunks of one depth at a time. So a prefix that many sequences share is scanned once, as the attention attends to it
once. Pure torch: the same on CPU and GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pivotrl.policy.prefix_tree import Ints, PrefixTree


@dataclass(frozen=True)
class ScanPlan:
    """S rows in N chunks of at most Q rows, chunks of the same depth side by side."""

    rows: Tensor  # [N, Q] row of the tree of each place; a place without one: row 0
    real: Tensor  # [N, Q] False: a place without a row
    place: Tensor  # [S] place of each row among the N * Q
    parents: tuple[Tensor, ...]  # of each depth but the first: [chunks] number of the parent in the depth above
    sizes: tuple[int, ...]  # chunks of each depth
    ancestors: Tensor  # [S, kernel - 1] rows 1, 2, ... above each row; S: none

    @classmethod
    def of(cls, tree: PrefixTree, longest: int, kernel: int, device: torch.device) -> ScanPlan:
        """Args: `longest` rows of a chunk; `kernel` rows that the convolution before the scan sees."""
        parent = parents_of(tree)
        first, last = _chunks(parent, longest)
        above = np.where(parent[first] >= 0, np.searchsorted(first, parent[first], side="right") - 1, -1)
        depth = np.zeros(len(first), dtype=np.int64)
        for chunk, up in enumerate(above.tolist()):  # a parent comes before its children
            depth[chunk] = depth[up] + 1 if up >= 0 else 0
        order = np.argsort(depth, kind="stable")
        sizes = np.bincount(depth)
        start = np.cumsum(sizes) - sizes  # of each depth among the ordered chunks
        number = np.empty_like(order)
        number[order] = np.arange(len(order)) - start[depth[order]]  # within its depth
        offsets = np.arange(int((last - first).max()))
        rows = first[order, None] + offsets
        real = rows < last[order, None]
        place = np.empty(len(parent), dtype=np.int64)
        place[rows[real]] = np.flatnonzero(real)
        of_depth = np.split(number[above[order]], start[1:])[1:]
        return cls(
            rows=torch.from_numpy(np.where(real, rows, 0)).to(device),
            real=torch.from_numpy(real).to(device),
            place=torch.from_numpy(place).to(device),
            parents=tuple(torch.from_numpy(x).to(device) for x in of_depth),
            sizes=tuple(sizes.tolist()),
            ancestors=torch.from_numpy(_ancestors(parent, kernel - 1)).to(device),
        )


def parents_of(tree: PrefixTree) -> Ints:
    """The row above each row; -1 at a root."""
    parent = np.arange(len(tree.token_ids), dtype=np.int64) - 1
    for chain in tree.chains:
        parent[chain.start] = chain.path[-1][1] - 1 if chain.path else -1
    return parent


def _chunks(parent: Ints, longest: int) -> tuple[Ints, Ints]:
    """First rows of the chunks and the rows after their last ones. A chunk begins at every child of a branching row,
    so that the parent of its first row is the last row of another."""
    count = len(parent)
    new = np.arange(count) - 1 != parent
    branching = np.bincount(parent[parent >= 0], minlength=count) > 1
    new[1:] |= branching[:-1]
    new[0] = True
    starts = np.flatnonzero(new)
    since = np.arange(count) - np.repeat(starts, np.diff(np.append(starts, count)))  # rows since the chain's first
    first = np.flatnonzero(since % longest == 0)
    return first, np.append(first[1:], count)


def _ancestors(parent: Ints, depth: int) -> Ints:
    count = len(parent)
    up = np.append(np.where(parent < 0, count, parent), count)  # above nothing is nothing
    found = np.empty((count, depth), dtype=np.int64)
    at = np.arange(count)
    for step in range(depth):
        at = up[at]
        found[:, step] = at
    return found


def tree_conv(x: Tensor, weight: Tensor, bias: Tensor | None, plan: ScanPlan) -> Tensor:
    """Causal depthwise convolution along the paths of the tree.

    x [S, c], weight [c, 1, kernel] as torch's Conv1d has it (the last column is the row itself), bias [c] -> [S, c].
    """
    padded = torch.cat([x, x.new_zeros(1, x.shape[1])])
    out = x * weight[:, 0, -1]
    for step in range(plan.ancestors.shape[1]):
        out = torch.addcmul(out, padded.index_select(0, plan.ancestors[:, step]), weight[:, 0, -2 - step])
    return out if bias is None else out + bias


def tree_scan(x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, plan: ScanPlan) -> Tensor:
    """h = exp(dt * decay) * h of the row above + dt * x b^T; y = h c, of every row.

    Args: x [S, heads, p]; dt [S, heads] positive; decay [heads] negative; b, c [S, groups, n], a group serves
    heads / groups heads that follow on each other. All float32.
    Returns: y [S, heads, p].
    """
    chunks, length = plan.rows.shape
    heads, p = x.shape[1:]
    groups = b.shape[1]

    def chunked(t: Tensor) -> Tensor:  # [S, ...] -> [N, Q, ...]
        return t.index_select(0, plan.rows.view(-1)).view(chunks, length, *t.shape[1:])

    # a place without a row takes no time: it neither decays nor adds
    steps = chunked(dt) * plan.real[:, :, None]  # [N, Q, heads]
    shape = (chunks, groups, heads // groups, length)

    def of_heads(t: Tensor) -> Tensor:  # [N, Q, heads, ...] -> [N, groups, heads of one, Q, ...]
        return t.transpose(1, 2).reshape(*shape, *t.shape[3:])

    since = of_heads((steps * decay).cumsum(1))  # log of the decay since the chunk's start
    xs = of_heads(chunked(x) * steps[..., None])  # [N, groups, heads of one, Q, p]
    bs, cs = (chunked(t).transpose(1, 2) for t in (b, c))  # [N, groups, Q, n]

    future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
    between = (since[..., :, None] - since[..., None, :]).masked_fill(future, -torch.inf).exp()
    # what rows of the same chunk give: [N, groups, heads of one, Q, Q] @ [..., Q, p]
    out = ((cs @ bs.transpose(2, 3))[:, :, None] * between) @ xs

    left = (since[..., -1:] - since).exp()[..., None]  # of each row at the chunk's end
    added = (xs * left).transpose(3, 4).flatten(2, 3) @ bs  # [N, groups, heads of one * p, n]
    kept = since[..., -1].exp()[..., None].expand(*shape[:3], p).reshape(chunks, groups, -1, 1)
    states = _start_states(added, kept, plan)
    seen = (cs @ states.transpose(2, 3)).view(chunks, groups, length, -1, p).transpose(2, 3)
    out = out + seen * since.exp()[..., None]
    return out.reshape(chunks, heads, length, p).transpose(1, 2).reshape(-1, heads, p).index_select(0, plan.place)


def _start_states(added: Tensor, kept: Tensor, plan: ScanPlan) -> Tensor:
    """The state before each chunk [N, ..., n], from what each adds and which share [N, ..., 1] it keeps."""
    adds, keeps = added.split(plan.sizes), kept.split(plan.sizes)
    starts = [torch.zeros_like(adds[0])]
    end = adds[0]
    for depth, parent in enumerate(plan.parents, 1):
        starts.append(end.index_select(0, parent))
        end = torch.addcmul(adds[depth], keeps[depth], starts[-1])
    return torch.cat(starts)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """RMSNorm of x * silu(gate), over each of `groups` equal parts of the features. x, gate [S, d] -> [S, d]."""
    wide = (x.float() * F.silu(gate.float())).view(x.shape[0], groups, -1)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.view(x.shape).to(gate.dtype)
