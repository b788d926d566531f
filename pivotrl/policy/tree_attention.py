"""`core_attention` over a prefix tree: what travels with the tree, context parallelism, the kernel of the device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from pivotrl.policy.experts import Balance, Router
from pivotrl.policy.prefix_tree import Ints, PrefixTree
from pivotrl.policy.tree_kernel import CpuPlan, CpuTreeAttention, Tables
from pivotrl.policy.tree_scan import ScanPlan


@dataclass(frozen=True)
class ContextSplit:
    """Where the rows of a tree are: R of them, as many on each rank of a group."""

    group: Any
    order: Tensor  # [S] row of the tree of each place, the ranks' rows after one another
    place: Tensor  # [S] the inverse


@dataclass
class TreeParams(PackedSeqParams):
    """Travels through GPTModel.forward(packed_seq_params=...) to the attention and the head.

    R rows of this context-parallel rank among the S of the tree; all of them without context parallelism.
    """

    plan: Any = None  # CpuPlan, or FlexAttention's BlockMask on GPUs
    tables: Tables | None = None  # cosine and sine [R, d]
    key_tables: Tables | None = None  # [S, d]
    split: ContextSplit | None = None  # None: one rank
    scan: ScanPlan | None = None  # of all S rows, for Mamba layers
    pair_source: Tensor | None = None  # [P] index into `sources`
    sources: Tensor | None = None  # [U] rows of this rank whose logits are needed
    pair_token: Tensor | None = None  # [P]
    temperature: float = 1.0
    experts: Tensor | None = None  # [rows of this rank's routers, layers with experts, k], to be replayed
    balance: Balance | None = None  # of the load-balancing loss


def attention_plan(tree: PrefixTree, rows: Ints, device: torch.device) -> Any:
    """What the kernel of the device needs to know of the tree."""
    if device.type == "cuda":
        from pivotrl.policy.tree_flex import tree_mask

        return tree_mask(tree, rows, device)
    return CpuPlan.of(tree, rows)


class _GatherRows(torch.autograd.Function):
    """x [R, ...] of every rank -> [S, ...] in the order of the tree; the backward sums over ranks, in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: ContextSplit) -> Tensor:
        ctx.split = split
        everyone = x.new_empty(len(split.order), *x.shape[1:])
        dist.all_gather_into_tensor(everyone, x.contiguous(), group=split.group)
        return everyone.index_select(0, split.place)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        split = ctx.split
        everyone = grads[0].index_select(0, split.order).float()
        own = everyone.new_empty(len(split.order) // split.group.size(), *everyone.shape[1:])
        dist.reduce_scatter_tensor(own, everyone, group=split.group)
        return own.to(grads[0].dtype), None


def gather_rows(x: Tensor, split: ContextSplit) -> Tensor:
    """The rows [R, ...] of every context-parallel rank in the order of the tree: [S, ...]."""
    gathered: Tensor = _GatherRows.apply(x, split)
    return gathered


class _GatherPairs(torch.autograd.Function):
    """x [2, P of this rank] -> [2, P of all], by rank. Every rank goes on with the same loss, so the backward takes
    its own part of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: list[int], group: Any) -> Tensor:
        ctx.first, ctx.count = sum(counts[: group.rank()]), counts[group.rank()]
        padded = x.new_zeros(2, max(1, *counts))
        padded[:, : ctx.count] = x
        everyone = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(everyone, padded, group=group)
        return torch.cat([part[:, :n] for part, n in zip(everyone, counts, strict=True)], 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][:, ctx.first : ctx.first + ctx.count], None, None


def gather_pairs(x: Tensor, counts: list[int], group: Any) -> Tensor:
    """The values of every context-parallel rank's pairs, rank after rank: [2, P]."""
    gathered: Tensor = _GatherPairs.apply(x, counts, group)
    return gathered


class TreeAttention(MegatronModule):
    """`core_attention` of the layer spec, for this rank's heads: [R, 1, h, d], [R, 1, g, d] twice -> [R, 1, h * d]."""

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
        self.router: Router | None = None  # of the same layer, if it has experts
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
        p = packed_seq_params
        if self.router is not None:
            self.router.replay(p.experts, p.balance)
        q, k, v = query[:, 0], key[:, 0], value[:, 0]
        if p.split is not None:
            k, v = gather_rows(torch.stack([k, v], 1), p.split).unbind(1)  # [S, g, d]
        if query.is_cuda:
            from pivotrl.policy.tree_flex import flex_tree_attention

            out = flex_tree_attention(q, k, v, p.tables, p.key_tables, p.plan, self.scale)  # type: ignore[arg-type]
        else:
            out = CpuTreeAttention.apply(q, k, v, p.tables, p.key_tables, p.plan, self.scale)
        return out.reshape(out.shape[0], 1, -1)
