"""The whole state of a policy as pieces of global tensors: weights, float32 main weights, Adam's moments and count.

megatron-core says which part of which global tensor a parameter of this rank is (`sharded_state_dict`). The
distributed optimizer holds a run of elements of it; a run is a few rectangles of the global tensor, so that every
rank writes what it holds and nothing is gathered, and any other layout can read it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from megatron.core import parallel_state as groups
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from torch import Tensor

from pivotrl.errors import UserError
from pivotrl.policy import cpu_shim
from pivotrl.policy.optimizer import members
from pivotrl.policy.state_files import Piece, RegionReader, rectangles
from pivotrl.policy.weights import named_parameters

if TYPE_CHECKING:
    from pivotrl.policy.policy import MegatronPolicy

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Part:
    """A rectangle of a global tensor that is a run of a parameter's elements on this rank."""

    key: str
    size: tuple[int, ...]  # of the global tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]  # as many axes as the global tensor
    start: int  # first element in the flattened parameter
    writes_weight: bool  # no other rank does
    writes_state: bool  # of the ranks with this shard; each holds another run of the optimizer's state
    padded: bool  # the vocabulary, whose padding depends on the layout

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Run:
    """Elements [start, end) of a parameter, whose optimizer state this rank holds."""

    parameter: Tensor
    start: int
    end: int
    state: dict[str, Tensor]  # "param", and after the first step Adam's; flat, end - start elements


@cpu_shim.on_cpu
def parts_of(policy: MegatronPolicy) -> dict[Tensor, list[Part]]:
    """The parts of every parameter of this rank, in order of their elements. Raises RuntimeError for unknown kinds."""
    group = groups.get_data_parallel_group(with_context_parallel=True)
    described = [chunk.sharded_state_dict(metadata={"dp_cp_group": group}) for chunk in policy.chunks]
    found: dict[Tensor, list[Part]] = {}
    for value in nested_values(described):
        if isinstance(value, ShardedTensorFactory):
            shards = list(nested_values(value.build()))
        elif isinstance(value, ShardedTensor):
            shards = [value]
        elif getattr(value, "key", "").endswith("_extra_state"):
            continue  # Transformer Engine's history of maxima (recipe `delayed`): it fills again within some steps
        else:
            raise RuntimeError(f"megatron-core describes {value!r}, which is no tensor")
        parameter = value.data
        found[parameter] = sorted((_part(shard, parameter) for shard in shards), key=lambda p: p.start)
    for name, parameter in named_parameters(policy.chunks, policy.dims):
        if sum(p.numel for p in found.get(parameter, [])) != parameter.numel():
            raise RuntimeError(f"megatron-core describes only a part of {name}")
    return found


def _part(shard: ShardedTensor, parameter: Tensor) -> Part:
    data = shard.data
    assert data.is_contiguous(), shard.key
    pipeline, tensor, _ = shard.replica_id
    return Part(
        key=shard.key,
        size=tuple(shard.global_shape),
        offsets=tuple(shard.global_offset),
        shape=(1,) * shard.prepend_axis_num + tuple(shard.local_shape),
        start=(data.data_ptr() - parameter.data_ptr()) // parameter.element_size(),
        writes_weight=is_main_replica(shard.replica_id),
        writes_state=pipeline == 0 and tensor == 0,
        padded=shard.allow_shape_mismatch,
    )


def _runs(policy: MegatronPolicy) -> Iterator[Run]:
    for optimizer in members(policy.optimizer):
        for buffer in optimizer.gbuf_ranges:
            for buckets in buffer.values():
                for bucket in buckets:
                    for parameter, at in bucket["param_map"].items():
                        state = optimizer._get_main_param_and_optimizer_states(parameter)
                        yield Run(parameter, at["param"].start, at["param"].end, state)


def _kept(policy: MegatronPolicy, adam_steps: int) -> tuple[str, ...]:
    """Names of the optimizer's tensors that are stored: in float32 the weights are the main weights."""
    main = ("param",) if policy.model.config.params_dtype is not torch.float32 else ()
    return main + (_MOMENTS if adam_steps else ())


def adam_steps(policy: MegatronPolicy) -> int:
    """Steps that Adam has taken: less than `policy.step` where steps were skipped."""
    for optimizer in members(policy.optimizer):
        for group in optimizer.optimizer.param_groups:
            if group.get("step"):  # Transformer Engine's and Apex's count is the group's
                return int(group["step"])
        for state in optimizer.optimizer.state.values():
            if "step" in state:
                return int(state["step"])
    return 0


def snapshot(policy: MegatronPolicy, count: int) -> Iterator[Piece]:
    """What this rank has to write: weights, main weights, and moments if Adam has taken `count` > 0 steps (views)."""
    policy.settle()
    parts = parts_of(policy)
    for parameter, of_parameter in parts.items():
        flat = parameter.detach().reshape(-1)
        for part in of_parameter:
            if part.writes_weight:
                yield Piece(part.key, part.size, part.offsets, flat[part.start :][: part.numel].view(part.shape))
    names = _kept(policy, count)
    for run in _runs(policy):
        for part in parts[run.parameter]:
            if part.writes_state:
                for offsets, sizes, at in _overlap(part, run):
                    for name in names:
                        data = run.state[name].detach().reshape(-1)[at : at + math.prod(sizes)]
                        yield Piece(_state_key(name, part.key), part.size, offsets, data.view(sizes))


def _overlap(part: Part, run: Run) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Rectangles that a part and a run share: offsets in the global tensor, sizes, first element of the run."""
    begin, end = max(part.start, run.start), min(part.start + part.numel, run.end)
    for offsets, sizes, first in rectangles(part.shape, begin - part.start, end - part.start):
        place = tuple(a + b for a, b in zip(part.offsets, offsets, strict=True))
        yield place, sizes, part.start + first - run.start


def _state_key(name: str, key: str) -> str:
    """megatron-core's name of an optimizer tensor."""
    return f"optimizer.state.{name}.{key}"


@cpu_shim.on_cpu
def load(policy: MegatronPolicy, folder: Path, policy_steps: int, count: int) -> None:
    """Set weights, optimizer and step of `policy` to those in `folder`, in whatever layout they were written.

    The reference weights stay those that the policy was loaded with. Raises UserError for a folder of another model.
    """
    reader = RegionReader(folder)
    parts = parts_of(policy)
    if count:
        _make_states(policy)
    with torch.no_grad():
        for parameter, of_parameter in parts.items():
            flat = parameter.data.view(-1)
            for part in of_parameter:
                region = reader.read(part.key, part.size, part.offsets, part.shape, part.padded)
                if region.dtype != parameter.dtype:
                    raise UserError(
                        f"{folder}: {part.key} is {region.dtype}, this policy's is {parameter.dtype}; "
                        "set precision.policy to what it was saved with"
                    )
                flat[part.start :][: part.numel].copy_(region.reshape(-1))
        for run in _runs(policy):
            for name in _kept(policy, count):
                target = run.state[name].detach().view(-1)
                for part in parts[run.parameter]:
                    for offsets, sizes, at in _overlap(part, run):
                        region = reader.read(_state_key(name, part.key), part.size, offsets, sizes, part.padded)
                        target[at : at + region.numel()].copy_(region.reshape(-1))
    _set_adam_steps(policy, count)
    policy.step = policy_steps


def _make_states(policy: MegatronPolicy) -> None:
    """Moments to fill in. megatron-core's way is a step on zero gradients, which must move no weight."""
    for optimizer in members(policy.optimizer):
        before = [(g["lr"], g["weight_decay"]) for g in optimizer.optimizer.param_groups]
        for group in optimizer.optimizer.param_groups:
            group["lr"] = group["weight_decay"] = 0.0
        optimizer._init_optimizer_states_with_dummy_values()
        for group, (rate, decay) in zip(optimizer.optimizer.param_groups, before, strict=True):
            group["lr"], group["weight_decay"] = rate, decay


def _set_adam_steps(policy: MegatronPolicy, count: int) -> None:
    for optimizer in members(policy.optimizer):
        for group in optimizer.optimizer.param_groups:
            if "step" in group:
                group["step"] = count
        for state in optimizer.optimizer.state.values():
            if "step" in state:
                state["step"].fill_(count)
