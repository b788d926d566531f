"""Attention over a prefix tree, exact and without masked work.

In depth-first order every segment is seen (a) by itself, causally, and (b) in full by the contiguous rows of its
descendants. So the whole tree is at most two *unmasked* rectangles a segment, over slices of one row of tokens; the
partial softmaxes that a row collects from its ancestors are merged by their log-sum-exp, and the backward runs each
rectangle with the merged statistics (as ring attention does). Pairs of siblings are never computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from pivotrl.policy.prefix_tree import Segment

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

BLOCK_ELEMENTS = 2**20  # scores of one product in the backward: they stay in cache
LEAF_GROUP_WASTE = 1.3  # leaves are computed together while padding them costs less than this factor in rows


@dataclass(frozen=True)
class LeafGroup:
    """Segments of similar length, whose own causal attention is one batched call; their last row is the padding."""

    rows: Tensor  # [n, length]
    valid: Tensor  # [n, length] bool
    keep: Tensor  # places of the valid rows among the n * length

    def scatter(self, into: Tensor, values: Tensor) -> None:
        """Write values [n, h, length, ...] to their rows of `into` [h, S, ...]; every row is in one group only."""
        flat = values.transpose(1, 2).flatten(0, 1).index_select(0, self.keep)  # [rows, h, ...]
        into.index_copy_(1, self.rows.flatten().index_select(0, self.keep), flat.transpose(0, 1).to(into.dtype))


@dataclass(frozen=True)
class Blocks:
    """The rectangles of a tree."""

    groups: tuple[LeafGroup, ...]  # own causal attention of the segments
    descendants: tuple[tuple[int, int, int], ...]  # (start, end, subtree_end): rows [end, subtree_end) see [start, end)


def tree_blocks(segments: tuple[Segment, ...], device: torch.device) -> Blocks:
    """Group the causal parts of the segments by length; list the descendant rectangles."""
    by_length = sorted(segments, key=lambda s: s.start - s.end)  # longest first
    groups: list[list[Segment]] = []
    for s in by_length:
        longest = groups[-1][0].end - groups[-1][0].start if groups else 0
        if groups and longest <= LEAF_GROUP_WASTE * (s.end - s.start):
            groups[-1].append(s)
        else:
            groups.append([s])
    made = []
    for group in groups:
        starts = torch.tensor([s.start for s in group], device=device)[:, None]  # [n, 1]
        lengths = torch.tensor([s.end - s.start for s in group], device=device)[:, None]
        offsets = torch.arange(group[0].end - group[0].start, device=device)[None]  # [1, length]
        valid = offsets < lengths
        made.append(LeafGroup(starts + torch.minimum(offsets, lengths - 1), valid, valid.flatten().nonzero()[:, 0]))
    return Blocks(tuple(made), tuple((s.start, s.end, s.subtree_end) for s in segments if s.subtree_end > s.end))


@dataclass
class TreeParams(PackedSeqParams):
    """Travels through GPTModel.forward(packed_seq_params=...) to the attention and the head."""

    blocks: Blocks | None = None
    cosine: Tensor | None = None  # [S, head_dim]
    sine: Tensor | None = None  # [S, head_dim]
    pair_source: Tensor | None = None  # [P] index into `sources`
    sources: Tensor | None = None  # [U] rows whose logits are needed
    pair_token: Tensor | None = None  # [P]
    temperature: float = 1.0


def rope_tables(position_ids: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [S, head_dim] of the rotary embedding at any positions (half-rotation layout, as in Llama)."""
    exponent = torch.arange(0, head_dim, 2, device=position_ids.device, dtype=torch.float32) / head_dim
    angles = position_ids.float()[:, None] / theta**exponent  # [S, head_dim / 2]
    angles = torch.cat([angles, angles], -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary embedding of x [h, S, d]; with -sine it is undone."""
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1).mul_(sine).addcmul_(x, cosine)


class _TreeAttention(torch.autograd.Function):
    """q [S, h, d], k and v [S, g, d], before rotary embedding -> [S, h, d]."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, cosine: Tensor, sine: Tensor, blocks: Blocks, scale: float
    ) -> Tensor:
        heads_first = [x.transpose(0, 1) for x in (q, k, v)]
        qh, kh = _rotate(heads_first[0], cosine, sine), _rotate(heads_first[1], cosine, sine)  # [h, S, d], [g, S, d]
        vh = heads_first[2].contiguous()
        out = torch.empty_like(qh)  # [h, S, d]
        lse = torch.empty(qh.shape[:2], dtype=torch.float32)  # [h, S]
        share = qh.shape[0] // kh.shape[0]
        for group in blocks.groups:
            o, m = _flash(*_gather_group(group, share, qh, kh, vh), 0.0, True, scale=scale)
            group.scatter(out, o)
            group.scatter(lse, m)
        total = out.float() if blocks.descendants else out
        for start, end, stop in blocks.descendants:
            o, m = _flash(*_fold(qh, kh, vh, start, end, stop), 0.0, False, scale=scale)
            o, m = o.reshape(qh.shape[0], stop - end, -1), m.reshape(qh.shape[0], stop - end)
            old = lse[:, end:stop]
            both = torch.logaddexp(old, m)
            total[:, end:stop].mul_((old - both).exp_()[..., None]).addcmul_(o.float(), (m - both).exp_()[..., None])
            lse[:, end:stop] = both
        out = total.to(q.dtype)
        ctx.save_for_backward(qh, kh, vh, out, lse, cosine, sine)
        ctx.blocks, ctx.scale = blocks, scale
        return out.transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """P = exp(scale Q K' - lse), dV = P' dO, dS = P * (dO V' - delta), dQ = scale dS K, dK = scale dS' Q, where
        delta is the row sums of dO * O. Exact for each rectangle by itself: lse and delta are those of whole rows."""
        qh, kh, vh, out, lse, cosine, sine = ctx.saved_tensors
        grad = grads[0].transpose(0, 1).contiguous()  # [h, S, d]
        delta = torch.linalg.vecdot(grad.float(), out.float())  # [h, S]
        one = torch.ones(kh.shape[:2], dtype=torch.float32)
        # the last columns carry -lse and -delta into the products, so that both subtractions happen before rounding
        left = (_extend(qh * ctx.scale, -lse), _extend(grad, -delta))  # [h, S, d + extra] each
        right = (_extend(kh, one, repeat=True), _extend(vh, one, repeat=True))  # [g, S, d + extra]
        d, share = qh.shape[-1], qh.shape[0] // kh.shape[0]
        dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32) for x in (qh, kh, vh))
        for group in ctx.blocks.groups:
            n, length = group.rows.shape
            x, g = (_gather(t, group).reshape(n * kh.shape[0], share * length, -1) for t in left)
            if len(group.keep) < n * length:  # repeated rows have no gradient
                g = g.view(n, -1, length, g.shape[-1]).mul_(group.valid[:, None, :, None]).view_as(g)
            k, v = (_gather(t, group).flatten(0, 1) for t in right)
            gq, gk, gv = _rectangle(x, g, k, v, d, causal=length)
            for total, part in ((dq, gq), (dk, gk), (dv, gv)):
                group.scatter(total, part.reshape(n, total.shape[0], length, d))
        for start, end, stop in ctx.blocks.descendants:
            k, v = (t[:, start:end] for t in right)
            step = max(1, BLOCK_ELEMENTS // (qh.shape[0] * (end - start)))
            for a in range(end, stop, step):
                b = min(a + step, stop)
                x, g = (_fold_rows(t, kh.shape[0], a, b)[0] for t in left)
                gq, gk, gv = _rectangle(x, g, k, v, d)
                dq[:, a:b] += gq.reshape(qh.shape[0], b - a, d)
                dk[:, start:end] += gk
                dv[:, start:end] += gv
        back = cosine.float(), -sine.float()
        dq, dk = _rotate(dq.mul_(ctx.scale), *back), _rotate(dk, *back)
        return *(x.to(qh.dtype).transpose(0, 1) for x in (dq, dk, dv)), None, None, None, None


def _extend(x: Tensor, column: Tensor, repeat: bool = False) -> Tensor:
    """x [..., d] with a float32 column behind it: one column in float32; three in bfloat16, whose sum is nearly exact.

    `repeat` puts the same column (of ones) so many times, to multiply the parts of a split one.
    """
    if x.dtype is torch.float32:
        return torch.cat([x, column[..., None]], -1)
    parts = []
    for _ in range(3):
        parts.append(column.to(x.dtype))
        column = column if repeat else column - parts[-1].float()
    return torch.cat([x, torch.stack(parts, -1)], -1)


def _rectangle(
    q: Tensor, grad: Tensor, k: Tensor, v: Tensor, d: int, causal: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq / scale, dk, dv) of a batch of rectangles: q, grad [b, m, d + extra] on k, v [b, n, d + extra].

    `causal`: the rows are heads after one another, `causal` rows each, against as many keys.
    """
    p = torch.bmm(q, k.mT).exp_()  # [b, m, n]
    if causal is not None:
        p.view(p.shape[0], -1, causal, causal).tril_()
    ds = torch.bmm(grad, v.mT).mul_(p)
    q, grad, k = q[..., :d], grad[..., :d], k[..., :d]
    return torch.bmm(ds, k), torch.bmm(ds.mT, q), torch.bmm(p.mT, grad)


def _gather(x: Tensor, group: LeafGroup) -> Tensor:
    """x [h, S, ...] -> [n, h, length, ...]"""
    return x.index_select(1, group.rows.flatten()).unflatten(1, group.rows.shape).transpose(0, 1)


def _gather_group(group: LeafGroup, share: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Own rows of the group's segments, key-value heads repeated to the query heads: [n, h, length, d] each."""
    k, v = (_gather(x, group).repeat_interleave(share, 1) for x in (k, v))
    return _gather(q, group), k, v


def _fold_rows(x: Tensor, groups: int, end: int, stop: int) -> Tensor:
    """Rows [end, stop) of x [h, S, ...], query heads of a key-value head after one another: [1, g, share * n, ...]"""
    return x[:, end:stop].unflatten(0, (groups, -1)).flatten(1, 2)[None]


def _fold(q: Tensor, k: Tensor, v: Tensor, start: int, end: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of descendants against keys of the segment; without a mask, heads that share keys are just more rows."""
    return _fold_rows(q, k.shape[0], end, stop), k[None, :, start:end], v[None, :, start:end]


class TreeAttention(MegatronModule):
    """`core_attention` of the layer spec, for this rank's heads: [S, 1, h, d], [S, 1, g, d] twice -> [S, 1, h * d]."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        if not isinstance(packed_seq_params, TreeParams):
            raise TypeError("TreeAttention needs TreeParams: the model must be called with a prefix tree")
        if query.is_cuda:
            raise NotImplementedError("tree attention has a CPU kernel only so far; run the policy on CPU")
        p = packed_seq_params
        out = _TreeAttention.apply(query[:, 0], key[:, 0], value[:, 0], p.cosine, p.sine, p.blocks, self.scale)
        return out.reshape(out.shape[0], 1, -1)
