"""The element-wise parts of a layer, with hand-written backwards that keep only what cannot be made again cheaply."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_ELEMENTS = 2**18  # elements worked on at a time: float32 temporaries then stay in cache


def _blocks(x: Tensor) -> list[slice]:
    """Slices of the rows of x [rows, d]. On an accelerator one kernel over all rows is best."""
    step = max(1, x.shape[0] if x.is_cuda else BLOCK_ELEMENTS // x.shape[1])
    return [slice(a, a + step) for a in range(0, x.shape[0], step)]


class _RMSNorm(torch.autograd.Function):
    """x [rows, d], weight [d] -> [rows, d]; statistics in float32. Keeps x and one float32 a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
        out = torch.empty_like(x)
        for rows in _blocks(x):
            wide = x[rows].float()
            scale[rows, 0] = torch.linalg.vecdot(wide, wide).div_(x.shape[1]).add_(eps).rsqrt_()
            out[rows] = (wide * scale[rows]).mul_(weight)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        grad_weight = torch.zeros(x.shape[1], dtype=torch.float32, device=x.device)
        for rows in _blocks(x):
            normal = x[rows].float() * scale[rows]  # not in place: .float() of a float32 tensor is that tensor
            grad = grads[0][rows].float()
            grad_weight += (grad * normal).sum(0)
            grad = grad * weight
            along = torch.linalg.vecdot(grad, normal).div_(x.shape[1])[:, None]
            grad_x[rows] = torch.addcmul(grad, normal, along, value=-1).mul_(scale[rows])
        return grad_x, grad_weight.to(weight.dtype), None


class RMSNorm(torch.nn.Module):
    """RMSNorm for every place of the layer spec.

    megatron-core's own wrapper refuses sequence parallel, which its mixture of experts needs with tensor parallel;
    all that is missing there is the tag by which the gradients of the weight are summed over the ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _RMSNorm.apply(x.reshape(-1, x.shape[-1]), self.weight, self.eps)
        return out.view(x.shape)


class _SwiGLU(torch.autograd.Function):
    """x [rows, 2 * f] (gate, up) -> silu(gate) * up [rows, f]. Keeps x only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        out = x.new_empty(x.shape[0], x.shape[1] // 2)
        for rows in _blocks(x):
            gate, up = x[rows].chunk(2, -1)
            torch.mul(F.silu(gate), up, out=out[rows])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        out = torch.empty_like(x)
        for rows in _blocks(x):
            grad = grads[0][rows]
            gate, up = x[rows].chunk(2, -1)
            by_gate, by_up = out[rows].chunk(2, -1)
            torch.mul(grad, F.silu(gate), out=by_up)
            by_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
        return out


class SwiGLU(torch.nn.Module):
    """Activation module of the MLP (megatron-core's `use_te_activation_func` hook: it takes both halves of fc1)."""

    def __init__(self, config: Any) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _SwiGLU.apply(x.reshape(-1, x.shape[-1]))
        return out.view(*x.shape[:-1], x.shape[-1] // 2)  # an expert may have no rows

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Nothing to save; megatron-core's MLP asks every part of it."""
        return {}


class ReplicatedLinear(torch.nn.Linear):
    """A linear layer that every tensor-parallel rank holds whole, as Transformer Engine's `parallel_mode="duplicated"`
    (the projections around latent experts), where that is not installed."""

    def __init__(self, size_in: int, size_out: int, *, config: Any, bias: bool, **_: Any) -> None:
        super().__init__(size_in, size_out, bias, dtype=config.params_dtype)
        for parameter in self.parameters():  # each rank sees its own rows: gradients are summed over the ranks
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


@cache
def with_bias(linear: Any) -> Any:
    """A linear layer's class of the layer spec that has a bias whatever its caller says: megatron-core gives the
    attention's output one only together with the MLP."""

    def __init__(self: Any, *args: Any, bias: bool, **kwargs: Any) -> None:
        linear.__init__(self, *args, bias=True, **kwargs)

    return type(linear.__name__, (linear,), {"__init__": __init__})
