"""torch.distributed and the parallel groups of megatron-core: gloo on CPU, NCCL with CUDA, one program for both."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state as groups

from pivotrl.config import Parallel
from pivotrl.errors import UserError
from pivotrl.policy import agree, cpu_shim


@dataclass(frozen=True)
class Layout:
    """Sizes that the groups of this process were made with."""

    tensor: int
    pipeline: int
    context: int
    expert: int
    expert_tensor: int


_layout: Layout | None = None


def initialise(parallel: Parallel) -> None:
    """Start torch.distributed (torchrun's environment, or alone) and the groups of megatron-core, once a process.

    Raises UserError where the sizes do not fit the number of processes.
    """
    global _layout
    agree.join()
    world, model = dist.get_world_size(), parallel.tensor * parallel.pipeline * parallel.context
    experts = parallel.expert * parallel.expert_tensor * parallel.pipeline
    if world % model or world % experts:
        raise UserError(
            f"parallel: {world} processes cannot be split into tensor x pipeline x context = {model} "
            f"and expert x expert_tensor x pipeline = {experts}; start a multiple of both"
        )
    wanted = Layout(parallel.tensor, parallel.pipeline, parallel.context, parallel.expert, parallel.expert_tensor)
    if groups.model_parallel_is_initialized():
        if wanted != _layout:
            raise RuntimeError(
                f"this process has the layout {_layout}; call shutdown_groups() before asking for {wanted}"
            )
        return
    cpu_shim.enable()
    with cpu_shim.scope():
        groups.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            context_parallel_size=parallel.context,
            expert_model_parallel_size=parallel.expert,
            expert_tensor_parallel_size=parallel.expert_tensor,
        )
    _layout = wanted


def shutdown_groups() -> None:
    """Forget the groups of megatron-core, so that a policy with another layout can be loaded."""
    global _layout
    groups.destroy_model_parallel()
    _layout = None
