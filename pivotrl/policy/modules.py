"""The element-wise parts of a layer, with hand-written backwards that keep only what cannot be made again cheaply."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _RMSNorm(torch.autograd.Function):
    """x [..., d], weight [d] -> [..., d]; statistics in float32. Keeps x and one float32 a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.linalg.vecdot(wide, wide).div_(x.shape[-1]).add_(eps).rsqrt_()[..., None]  # [..., 1]
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        grad = grads[0].float()
        normal = x.float() * scale  # not in place: .float() of a float32 tensor is that tensor
        grad_weight = (grad * normal).reshape(-1, x.shape[-1]).sum(0)
        grad = grad * weight
        along = torch.linalg.vecdot(grad, normal).div_(x.shape[-1])[..., None]
        return torch.addcmul(grad, normal, along, value=-1).mul_(scale).to(x.dtype), grad_weight.to(weight.dtype), None


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
        out: Tensor = _RMSNorm.apply(x, self.weight, self.eps)
        return out


class _SwiGLU(torch.autograd.Function):
    """x [..., 2 * f] (gate, up) -> silu(gate) * up [..., f]. Keeps x only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        out = torch.empty_like(x)
        torch.mul(grads[0], F.silu(gate), out=out[..., up.shape[-1] :])
        out[..., : up.shape[-1]] = torch.ops.aten.silu_backward(grads[0] * up, gate)
        return out


class SwiGLU(torch.nn.Module):
    """Activation module of the MLP (megatron-core's `use_te_activation_func` hook: it takes both halves of fc1)."""

    def __init__(self, config: Any) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _SwiGLU.apply(x)
        return out
