"""The Mamba-2 mixer of a hybrid model on megatron-core's parallel linear layers, over prefix trees.

Heads, and the groups that share B and C, are split over tensor-parallel ranks. Under context parallelism every rank
convolves and scans all rows of a tree for its share of those heads: rows are gathered before and dealt out after.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as groups
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pivotrl.models.dims import Dims
from pivotrl.policy.tree_attention import ContextSplit, TreeParams, gather_rows
from pivotrl.policy.tree_scan import ScanPlan, gated_norm, tree_conv, tree_scan


@dataclass
class MambaParts:
    """Submodules of the layer spec."""

    in_proj: Any
    out_proj: Any


class _Scale(torch.nn.Module):
    """The weight of the gated norm."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(size, dtype=dtype))


class TreeMamba(MegatronModule):
    """In the place of a layer's attention: hidden states [R, 1, H] (a part of them with sequence parallelism) -> the
    same shape, and no bias."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        dims: Dims,
        submodules: MambaParts,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.tp_group = groups.get_tensor_model_parallel_group()
        ranks = self.tp_group.size()
        self.heads, self.inner, self.groups, self.states = (
            dims.size(name) // ranks for name in ("mamba_heads", "inner", "mamba_groups", "states")
        )
        shared = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tp_group}
        self.in_proj = build_module(
            submodules.in_proj,
            dims.hidden,
            dims.size("mamba_in"),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
            **shared,
        )
        conv, dtype = self.inner + 2 * self.states, config.params_dtype
        self.conv1d = torch.nn.Conv1d(
            conv, conv, dims.size("kernel"), groups=conv, bias=dims.has("conv_bias"), dtype=dtype
        )
        for name in ("A_log", "D", "dt_bias"):
            self.register_parameter(name, torch.nn.Parameter(torch.empty(self.heads, dtype=dtype)))
        self.norm = _Scale(self.inner, dtype)
        self.out_proj = build_module(
            submodules.out_proj,
            dims.size("inner"),
            dims.hidden,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
            **shared,
        )

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, packed_seq_params: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        if not isinstance(packed_seq_params, TreeParams) or packed_seq_params.scan is None:
            raise TypeError("TreeMamba needs TreeParams with a ScanPlan: the model must be called with a prefix tree")
        projected, _ = self.in_proj(hidden_states)  # [R, 1, z x B C dt of this rank's heads]
        z, rest = projected[:, 0].split([self.inner, projected.shape[-1] - self.inner], -1)
        if packed_seq_params.split is None:
            y = _again(self._local, z, rest, packed_seq_params.scan)
        else:
            y = self._dealt(z, rest, packed_seq_params.scan, packed_seq_params.split)
        out, _ = self.out_proj(y[:, None])  # of [R, inner]
        return out, None

    def _local(self, z: Tensor, rest: Tensor, plan: ScanPlan) -> Tensor:
        return self._normed(self._mix(rest, plan, slice(0, self.heads), None), z)

    def _dealt(self, z: Tensor, rest: Tensor, plan: ScanPlan, split: ContextSplit) -> Tensor:
        share, kept = self._share(split)
        everyone = gather_rows(rest, split)  # [S, ...]
        own = everyone.index_select(1, torch.cat([kept, self.inner + 2 * self.states + _range(share, kept)]))
        y = _DealRows.apply(_again(self._mix, own, plan, share, kept), split)
        return _again(self._normed, y, z)

    def _normed(self, y: Tensor, z: Tensor) -> Tensor:
        return gated_norm(y, z, self.norm.weight, self.groups, self.config.layernorm_epsilon)

    def _mix(self, rest: Tensor, plan: ScanPlan, share: slice, kept: Tensor | None) -> Tensor:
        """x B C dt [S, ...] -> what the scan gives a share of the heads, [S, heads of the share * width] float32.

        `kept`: columns of the convolution that are this share's; None: all of them.
        """
        weight, bias = self.conv1d.weight, self.conv1d.bias
        if kept is not None:
            weight, bias = weight.index_select(0, kept), None if bias is None else bias.index_select(0, kept)
        heads, width, size = share.stop - share.start, self.inner // self.heads, self.states // self.groups
        mixed, dt = rest.split([rest.shape[1] - heads, heads], -1)
        mixed = F.silu(tree_conv(mixed, weight, bias, plan)).float()
        states = (mixed.shape[1] - heads * width) // 2
        x, b, c = mixed.split([heads * width, states, states], -1)
        x = x.view(len(x), heads, width)
        y = tree_scan(
            x,
            F.softplus(dt.float() + self.dt_bias[share].float()),
            -self.A_log[share].float().exp(),
            b.view(len(b), -1, size),
            c.view(len(c), -1, size),
            plan,
        )
        return (y + self.D[share].float()[:, None] * x).flatten(1)

    def _share(self, split: ContextSplit) -> tuple[slice, Tensor]:
        """This context-parallel rank's heads, and their columns of x B C."""
        size, rank = split.group.size(), split.group.rank()
        heads = self.heads // size
        share = slice(rank * heads, (rank + 1) * heads)
        width, state = self.inner // self.heads, self.states // self.groups
        per_group = self.heads // self.groups
        device = self.A_log.device
        x = torch.arange(share.start * width, share.stop * width, device=device)
        own = torch.arange(share.start // per_group, (share.stop - 1) // per_group + 1, device=device)
        of_groups = (own[:, None] * state + torch.arange(state, device=device)).flatten()
        return share, torch.cat([x, self.inner + of_groups, self.inner + self.states + of_groups])

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """In parts that do not depend on the layout: z, x, B, C and dt of the projection are each split over ranks."""
        found: dict[str, Any] = {}
        for name in ("in_proj", "out_proj"):
            module = getattr(self, name)
            found |= sharded_state_dict_default(module, f"{prefix}{name}.", sharded_offsets, metadata)
        own = self.state_dict(prefix="", keep_vars=True)
        own = {k: v for k, v in own.items() if not k.startswith(("in_proj.", "out_proj."))}
        found |= make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            dict.fromkeys(own, 0),
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )
        conv = {"x": self.inner, "B": self.states, "C": self.states}
        parts = {
            "in_proj.weight": {"z": self.inner, **conv, "dt": self.heads},
            "conv1d.weight": conv,
            "conv1d.bias": conv,
        }
        for name, sections in parts.items():
            if prefix + name in found:
                found[prefix + name] = _in_sections(found[prefix + name], sections)
        return found


def _again(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Keeps the arguments alone for the backward, which computes the rest again: a twentieth of the projections."""
    result: Tensor = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return result


def _range(share: slice, like: Tensor) -> Tensor:
    return torch.arange(share.start, share.stop, device=like.device)


class _DealRows(torch.autograd.Function):
    """Own columns of every row [S, c] -> every rank's columns of own rows [R, c * ranks], and back in the backward."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, split: ContextSplit) -> Tensor:
        ctx.split = split
        sent = y.index_select(0, split.order)  # by rank
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=split.group)
        return received.view(split.group.size(), -1, y.shape[1]).transpose(0, 1).flatten(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        split, grad = ctx.split, grads[0]
        ranks = split.group.size()
        sent = grad.view(len(grad), ranks, -1).transpose(0, 1).contiguous()  # [ranks, R, c] by owner of the columns
        received = torch.empty_like(sent)  # [ranks, R, c] by owner of the rows
        dist.all_to_all_single(received, sent, group=split.group)
        return received.flatten(0, 1).index_select(0, split.place), None


def _in_sections(whole: ShardedTensor, sections: Mapping[str, int]) -> ShardedTensorFactory:
    """One rank's shard, of which each section of rows is a shard of a tensor of its own."""
    template = whole.without_data()

    @torch.no_grad()
    def build(key: str, data: Tensor, replica_id: Any, flattened_range: Any) -> list[ShardedTensor]:
        full = replace(template, key=key, data=data, dtype=data.dtype, replica_id=replica_id)
        found, start = [], 0
        for name, rows in sections.items():
            for shard in full.narrow(0, start, rows):
                shard.key = f"{key}.{name}"
                found.append(shard)
            start += rows
        return found

    def merge(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts))

    return ShardedTensorFactory(whole.key, whole.data, build, merge, whole.replica_id)
