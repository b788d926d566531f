"""Run megatron-core on CPU with gloo: `enable()` once, then calls within `scope()`. Does nothing where CUDA is.

megatron-core names CUDA in many places where any device would do. Each patch below says which place needs it; they
were found one by one on megatron-core 0.16.1 (0.19.2 names the same places).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_enabled = False
P = ParamSpec("P")
R = TypeVar("R")


class _CudaMeansCpu(TorchFunctionMode):
    """Literal device="cuda" (schedules, optimizer, clip_grads, p2p), `.cuda()`, pinned memory, and the optimizer's
    check that a parameter's type is 'torch.cuda.FloatTensor'."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


class _NoStream:
    """Stands for a CUDA stream or event: every method does nothing and gives another one."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: _NoStream()


def enable() -> None:
    """Patch megatron-core for CPU, once a process. With CUDA: no-op."""
    global _enabled
    if torch.cuda.is_available() or _enabled:
        return
    _enabled = True
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.optimizer import clip_grads
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel import random as parallel_random
    from megatron.core.transformer.moe import moe_layer, moe_utils, token_dispatcher

    from pivotrl.policy.modules import ReplicatedLinear

    # device=torch.cuda.current_device(): buffers of sequence parallel, all-to-all outputs, rotary frequencies
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *args, **kwargs: None  # pipeline communication, checkpoint saving
    # side stream of the all-to-all dispatcher (torch.cuda.Stream itself stays: others use it in type hints)
    stream = _NoStream()
    token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = stream
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *args, **kwargs: stream  # type: ignore[assignment]
    # split sizes must become numpy also when their tensors are on CPU already
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )
    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 reads this name without Transformer Engine
        moe_utils.te_general_gemm = None
    if not moe_layer.HAVE_TE:  # asked for by latent experts alone
        moe_layer.TELinear, moe_layer.HAVE_TE = ReplicatedLinear, True
    # an official option: its fork() needs no CUDA generator (no dropout is used, so no per-rank dropout state is lost)
    parallel_random.initialize_rng_tracker(inference_rng_tracker=True)
    # activation recompute saves and restores CUDA generator states
    parallel_random._get_cuda_rng_state = parallel_random._set_cuda_rng_state = lambda *args, **kwargs: None
    clip_grads.multi_tensor_scale_impl = _scale  # without Apex megatron-core clips into a copy of every gradient
    _keep_adam_step(DistributedOptimizer)
    _skip_lone_collectives(param_and_grad_buffer)


def scope() -> AbstractContextManager[Any]:
    """Within it, device="cuda" means CPU. For calls into megatron-core only: it costs microseconds an operation,
    which a generator in the same process should not pay.
    """
    return _CudaMeansCpu() if _enabled else nullcontext()


def on_cpu(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function within `scope()`."""

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with scope():
            return function(*args, **kwargs)

    return wrapped


def _scale(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: list[list[torch.Tensor]], scale: float) -> None:
    """Apex's `multi_tensor_scale`: sources times `scale` into destinations, which may be the sources."""
    for source, destination in zip(*tensor_lists, strict=True):
        torch.mul(source, scale, out=destination)


def _keep_adam_step(optimizer_class: Any) -> None:
    """Loading a checkpoint with torch's Adam: megatron-core drops 'step' from the states and then asks for it."""
    original = optimizer_class._set_main_param_and_optimizer_states

    def set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> Any:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if "step" in state:
            tensors.setdefault("step", state["step"])
        return original(self, model_param, tensors)

    optimizer_class._set_main_param_and_optimizer_states = set_states


def _skip_lone_collectives(module: Any) -> None:
    """A gradient or parameter buffer of a group of one is where it belongs already. gloo would copy it in a thread of
    its own, and from then on there are two teams of OpenMP threads on the cores: neither spins between operations any
    more, and small operations take twice the time."""
    gather, scatter = module.dist_all_gather_func, module.dist_reduce_scatter_func

    def all_gather(output: torch.Tensor, own: torch.Tensor, group: Any, **kwargs: Any) -> Any:
        return _copied(output, own) if group.size() == 1 else gather(output, own, group=group, **kwargs)

    def reduce_scatter(own: torch.Tensor, source: torch.Tensor, group: Any, **kwargs: Any) -> Any:
        return _copied(own, source) if group.size() == 1 else scatter(own, source, group=group, **kwargs)

    module.dist_all_gather_func, module.dist_reduce_scatter_func = all_gather, reduce_scatter


def _copied(output: torch.Tensor, source: torch.Tensor) -> None:
    if output.data_ptr() != source.data_ptr():
        output.copy_(source)
