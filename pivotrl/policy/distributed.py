"""torch.distributed and the parallel groups of megatron-core: gloo on CPU, NCCL with CUDA, one program for both."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state as groups

from pivotrl.config import Parallel
from pivotrl.layout import Layout
from pivotrl.policy import agree, cpu_shim

_sizes: tuple[int, ...] | None = None  # that the groups of this process were made with


def initialise(parallel: Parallel) -> None:
    """Start torch.distributed (torchrun's environment, or alone) and the groups of megatron-core, once a process.

    Raises UserError where the sizes do not fit the number of processes.
    """
    global _sizes
    agree.join()
    Layout.of(parallel, dist.get_world_size())
    chunks = parallel.virtual_pipeline
    wanted = (parallel.tensor, parallel.pipeline, parallel.context, parallel.expert, parallel.expert_tensor, chunks)
    if groups.model_parallel_is_initialized():
        if wanted != _sizes:
            raise RuntimeError(
                f"this process has the sizes {_sizes}; call shutdown_groups() before asking for {wanted}"
            )
        return
    cpu_shim.enable()
    with cpu_shim.scope():
        groups.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
            context_parallel_size=parallel.context,
            expert_model_parallel_size=parallel.expert,
            expert_tensor_parallel_size=parallel.expert_tensor,
            create_gloo_process_groups=dist.get_backend() != "fake",  # a world on paper has no second backend
        )
    _sizes = wanted


def shutdown_groups() -> None:
    """Forget the groups of megatron-core, so that a policy with another layout can be loaded."""
    global _sizes
    groups.destroy_model_parallel()
    _sizes = None
