"""megatron-core's data-parallel wrappers and distributed optimizer, as `Optimizer` sets them."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from pivotrl.config import Optimizer


def data_parallel(chunks: list[Any], settings: Optimizer) -> list[DistributedDataParallel]:
    """This rank's model chunks, wrapped: gradients are reduced in float32 into the distributed optimizer's buffers."""
    config = chunks[0].config
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=settings.overlap_grad_reduce,
        overlap_param_gather=settings.overlap_param_gather,
    )
    # one bucket for all chunks but the first, as megatron-core's own training has it: their reduction is hidden
    wrapped = [
        DistributedDataParallel(config, ddp, chunk, disable_bucketing=number > 0) for number, chunk in enumerate(chunks)
    ]
    if settings.overlap_grad_reduce:  # once a step: in the backward of its last micro-batch
        functions = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = functions if len(functions) > 1 else functions[0]
    return wrapped


def make_optimizer(wrapped: list[DistributedDataParallel], settings: Optimizer) -> Any:
    """Adam over the wrapped chunks; float32 main weights and moments, sharded over data-parallel ranks."""
    config = wrapped[0].config
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=settings.learning_rate,
            min_lr=0.0,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_eps=settings.epsilon,
            clip_grad=settings.clip_grad,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=True,
            overlap_param_gather=settings.overlap_param_gather,
        ),
        wrapped,
    )
    for group in parameter_groups(optimizer):
        if "fused" in group and not torch.cuda.is_available():  # torch's Adam: one pass over memory instead of ten
            group.update(fused=True, foreach=False)
    return optimizer


def parameter_groups(optimizer: Any) -> list[dict[str, Any]]:
    """The torch parameter groups of a megatron-core optimizer, chained or not."""
    return [group for o in members(optimizer) for group in o.optimizer.param_groups]


def members(optimizer: Any) -> list[Any]:
    """The single optimizers of one of megatron-core that have a share on this rank; of None, none."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [o for o in chained if o is not None and o.optimizer is not None]
