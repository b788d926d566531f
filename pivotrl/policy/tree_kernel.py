"""Attention over a prefix tree on CPU: the blocks of `tree_blocks`, forward and backward in one autograd function.

Partial softmaxes of a row (its diagonal, its rectangle) are merged by their log-sum-exp, and the backward runs each
block with the merged statistics (as ring attention does). Inside, the query heads that share a key-value head are
neighbours of one row, [g, S, h / g, d]: against a rectangle they are then just more rows, without any copy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pivotrl.policy.prefix_tree import Ints, PrefixTree
from pivotrl.policy.tree_blocks import Blocks, Diagonals, Rectangle, tree_blocks

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

BLOCK_ELEMENTS = 2**20  # scores of one product in the backward: they stay in cache
LONGEST_DIAGONAL = 256  # rows; in the backward half of a diagonal's work is above it
NEVER = -1e30  # a masked score, finite in bfloat16 too


@dataclass(frozen=True)
class Runs:
    """Diagonals as indices: a slice where they are all consecutive rows, else what to gather."""

    count: int
    length: int
    queries: slice | Tensor
    keys: slice | Tensor
    kept: Tensor | None  # places of rows that are not padding among count * length; None: all

    @classmethod
    def of(cls, diagonals: Diagonals) -> Runs:
        kept = None if diagonals.valid.all() else torch.from_numpy(diagonals.valid.ravel().nonzero()[0])
        count, length = diagonals.queries.shape
        return cls(count, length, _index(diagonals.queries), _index(diagonals.keys), kept)

    def take(self, x: Tensor, index: slice | Tensor) -> Tensor:
        """x [g, S, ...] -> [g, count, length, ...], a view where that can be."""
        rows = x[:, index] if isinstance(index, slice) else x.index_select(1, index)
        return rows.unflatten(1, (self.count, self.length))

    def put(self, into: Tensor, index: slice | Tensor, values: Tensor, add: bool) -> None:
        """values [g, count, length, ...] to (or onto) their rows of `into` [g, S, ...]; none of them is there twice."""
        if isinstance(index, slice):
            rows = into[:, index].unflatten(1, (self.count, self.length))
            rows.add_(values) if add else rows.copy_(values)
            return
        flat = values.flatten(1, 2)
        if self.kept is not None:
            flat, index = flat.index_select(1, self.kept), index.index_select(0, self.kept)
        put = into.index_add_ if add else into.index_copy_
        put(1, index, flat.to(into.dtype))


def _index(rows: Ints) -> slice | Tensor:
    flat = rows.ravel()
    if (flat[1:] - flat[:-1] == 1).all():
        return slice(int(flat[0]), int(flat[-1]) + 1)
    return torch.from_numpy(flat)


@dataclass(frozen=True)
class CpuPlan:
    """What of a tree the kernel needs: blocks for the forward and, with short diagonals, for the backward."""

    diagonals: tuple[Runs, ...]
    rectangles: tuple[Rectangle, ...]
    back_diagonals: tuple[Runs, ...]
    back_rectangles: tuple[Rectangle, ...]

    @classmethod
    def of(cls, tree: PrefixTree, rows: Ints | None = None) -> CpuPlan:
        def runs(blocks: Blocks) -> tuple[Runs, ...]:
            return tuple(Runs.of(d) for d in blocks.diagonals)

        whole, cut = tree_blocks(tree, rows), tree_blocks(tree, rows, LONGEST_DIAGONAL)
        return cls(runs(whole), whole.rectangles, runs(cut), cut.rectangles)


Tables = tuple[Tensor, Tensor]  # cosine and sine [S, d]


def rotate(x: Tensor, tables: Tables, back: bool = False) -> Tensor:
    """Rotary embedding of x [g, S, n, d] (half-rotation layout), contiguous; `back` undoes it."""
    out = torch.empty(x.shape, dtype=x.dtype)
    half = x.shape[-1] // 2
    cosine, sine = (t[:, None, :half] for t in tables)  # [S, 1, d / 2]
    a, b = x[..., :half], x[..., half:]
    torch.mul(a, cosine, out=out[..., :half]).addcmul_(b, sine, value=1.0 if back else -1.0)
    torch.mul(b, cosine, out=out[..., half:]).addcmul_(a, sine, value=-1.0 if back else 1.0)
    return out


class CpuTreeAttention(torch.autograd.Function):
    """q [R, h, d] of this rank's rows; k, v [S, g, d] of all rows; before rotary embedding -> [R, h, d]."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, q_tables: Tables, k_tables: Tables, plan: CpuPlan, scale: float
    ) -> Tensor:
        heads, share = k.shape[1], q.shape[1] // k.shape[1]
        qg = rotate(q.unflatten(1, (heads, share)).transpose(0, 1), q_tables)  # [g, R, h / g, d]
        kg = rotate(k.transpose(0, 1)[:, :, None], k_tables)[:, :, 0]  # [g, S, d]
        vg = v.transpose(0, 1).contiguous()
        result = torch.empty(q.shape[0], heads, share, q.shape[2], dtype=q.dtype)
        out = result.transpose(0, 1)  # [g, R, h / g, d]
        lse = torch.empty(qg.shape[:3], dtype=torch.float32)
        for runs in plan.diagonals:
            own = (
                runs.take(qg, runs.queries).flatten(0, 1).transpose(1, 2),  # [g * n, h / g, length, d]
                *(runs.take(x, runs.keys).flatten(0, 1)[:, None].expand(-1, share, -1, -1) for x in (kg, vg)),
            )
            o, m = _flash(*own, 0.0, True, scale=scale)
            shape = (heads, runs.count)
            runs.put(out, runs.queries, o.transpose(1, 2).unflatten(0, shape), add=False)
            runs.put(lse, runs.queries, m.transpose(1, 2).unflatten(0, shape), add=False)
        for block in plan.rectangles:
            rows = slice(block.start, block.stop)
            o, m = _flash(
                qg[None, :, rows].flatten(2, 3), _take(kg, block)[None], _take(vg, block)[None], 0.0, False, scale=scale
            )
            o, m = (x[0].unflatten(1, (-1, share)) for x in (o, m))
            old = lse[:, rows]
            both = torch.logaddexp(old, m)
            merged = out[:, rows].float().mul_((old - both).exp_()[..., None])
            out[:, rows] = merged.addcmul_(o.float(), (m - both).exp_()[..., None])
            lse[:, rows] = both
        ctx.save_for_backward(qg, kg, vg, result, lse, *q_tables, *k_tables)
        ctx.plan, ctx.scale = plan, scale
        return result.flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """P = exp(scale Q K' - lse), dV = P' dO, dS = P * (dO V' - delta), dQ = scale dS K, dK = scale dS' Q, where
        delta is the row sums of dO * O. Exact for each block by itself: lse and delta are those of whole rows."""
        qg, kg, vg, result, lse, *tables = ctx.saved_tensors
        heads, _, share, d = qg.shape
        grad = grads[0].unflatten(1, (heads, share))  # [R, g, h / g, d]
        delta = torch.linalg.vecdot(grad.float(), result.float()).transpose(0, 1)  # [g, R, h / g]
        # the last columns carry -lse and -delta into the products, so that both subtractions happen before rounding
        x, g = _extend(qg, -lse, ctx.scale), _extend(grad.transpose(0, 1), -delta)  # [g, R, h / g, d + extra]
        k, v = _extend(kg), _extend(vg)  # [g, S, d + extra]
        dq = torch.zeros(qg.shape, dtype=torch.float32)
        dk, dv = (torch.zeros(kg.shape, dtype=torch.float32) for _ in range(2))
        block = _Block(d, g.dtype)
        for runs in ctx.plan.back_diagonals:
            own = [runs.take(t, runs.queries).reshape(heads * runs.count, -1, t.shape[-1]) for t in (x, g)]
            if runs.kept is not None:  # repeated rows have no gradient
                valid = torch.zeros(runs.count * runs.length, dtype=g.dtype)
                valid[runs.kept] = 1
                own[1] = own[1].clone().view(heads, len(valid), -1).mul_(valid[:, None]).view_as(own[1])
            keys = [runs.take(t, runs.keys).reshape(heads * runs.count, -1, t.shape[-1]) for t in (k, v)]
            later = torch.full((runs.length, runs.length), NEVER, dtype=g.dtype).triu_(1).repeat_interleave(share, 0)
            step = max(1, BLOCK_ELEMENTS // later.numel())
            cut = [t.split(step) for t in (*own, *keys)]
            found = [block(qs, gs, ks, vs, later) for qs, gs, ks, vs in zip(*cut, strict=True)]
            parts = [torch.cat(t) for t in zip(*found, strict=True)]
            for total, index, part in zip((dq, dk, dv), (runs.queries, runs.keys, runs.keys), parts, strict=True):
                runs.put(total, index, part.view(heads, runs.count, runs.length, *total.shape[2:]), add=True)
        for rectangle in ctx.plan.back_rectangles:
            keys = [_take(t, rectangle) for t in (k, v)]
            step = max(1, BLOCK_ELEMENTS // (heads * share * keys[0].shape[1]))
            for a in range(rectangle.start, rectangle.stop, step):
                b = min(a + step, rectangle.stop)
                gq, gk, gv = block(x[:, a:b].flatten(1, 2), g[:, a:b].flatten(1, 2), *keys)
                dq[:, a:b] += gq.view(heads, b - a, share, d)
                _add(dk, rectangle, gk)
                _add(dv, rectangle, gv)
        dq = rotate(dq.mul_(ctx.scale), (tables[0].float(), tables[1].float()), back=True)
        dk = rotate(dk[:, :, None], (tables[2].float(), tables[3].float()), back=True)[:, :, 0]
        dq = torch.empty_like(grads[0]).copy_(dq.transpose(0, 1).flatten(1, 2))
        return dq, *(t.transpose(0, 1).to(kg.dtype) for t in (dk, dv)), None, None, None, None


def _take(x: Tensor, block: Rectangle) -> Tensor:
    """Keys of a rectangle of x [g, S, d]: [g, n, d], a view where they are one range."""
    parts = [x[:, a:b] for a, b in block.keys]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _add(into: Tensor, block: Rectangle, values: Tensor) -> None:
    done = 0
    for a, b in block.keys:
        into[:, a:b] += values[:, done : done + b - a]
        done += b - a


def _extend(x: Tensor, column: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """scale * x [..., d] with a float32 column behind it: one column in float32; three in bfloat16, whose sum is nearly
    exact. Without `column` there are as many columns of ones, to be multiplied with those of the other side."""
    d, extra = x.shape[-1], 1 if x.dtype is torch.float32 else 3
    out = torch.empty(*x.shape[:-1], d + extra, dtype=x.dtype)
    torch.mul(x, scale, out=out[..., :d]) if scale != 1.0 else out[..., :d].copy_(x)
    if column is None:
        out[..., d:] = 1.0
        return out
    for i in range(extra):
        out[..., d + i] = column
        column = column - out[..., d + i].float()
    return out


class _Block:
    """Gradients of blocks, with two buffers for scores that are used again: fresh pages cost as much as a product."""

    def __init__(self, d: int, dtype: torch.dtype) -> None:
        self.d = d
        self.buffers = [torch.empty(0, dtype=dtype) for _ in range(2)]

    def __call__(
        self, q: Tensor, grad: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq / scale, dk, dv) of a batch of blocks: q, grad [b, m, d + extra] on k, v [b, n, d + extra].

        `bias` [m, n] is added to the scores.
        """
        d, shape = self.d, (q.shape[0], q.shape[1], k.shape[1])
        size = math.prod(shape)
        if self.buffers[0].numel() < size:
            self.buffers = [b.new_empty(size) for b in self.buffers]
        p, ds = (b[:size].view(shape) for b in self.buffers)
        torch.bmm(q, k.mT, out=p)
        if bias is not None:
            p += bias
        p.exp_()
        torch.bmm(grad, v.mT, out=ds).mul_(p)
        return torch.bmm(ds, k[..., :d]), torch.bmm(ds.mT, q[..., :d]), torch.bmm(p.mT, grad[..., :d])
