"""Tokens, FLOPs and memory of a step. MFU is of the *model's* work: recompute, attention scores and padding earn none.

Peaks are the makers' dense figures (without sparsity), in TFLOP/s.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from pivotrl.config import Precision
from pivotrl.models.dims import Dims
from pivotrl.policy.prefix_tree import TokenSequence, depth_first_order

if TYPE_CHECKING:
    from pivotrl.policy.policy import MegatronPolicy

# (part of the device's name, bf16, fp8); the first that fits counts
_PEAKS: tuple[tuple[str, float, float | None], ...] = (
    ("H100 PCIe", 756.0, 1513.0),
    ("H100 NVL", 835.0, 1671.0),
    ("H100", 989.0, 1979.0),
    ("H200", 989.0, 1979.0),
    ("H800", 989.0, 1979.0),
    ("H20", 148.0, 296.0),
    ("GB200", 2500.0, 5000.0),
    ("B200", 2250.0, 4500.0),
    ("A100", 312.0, None),
    ("A800", 312.0, None),
    ("L40S", 362.0, 733.0),
)


def peak_flops(device: str, precision: Precision) -> float | None:
    """Peak FLOP/s of a device by its CUDA name; None where it, or its peak in this precision, is not known."""
    if precision.policy != "bf16":
        return None
    for part, bf16, fp8 in _PEAKS:
        if part in device:
            peak = bf16 if precision.fp8 is None else fp8
            return None if peak is None else peak * 1e12
    return None


def active_parameters(dims: Dims, experts_per_token: int = 0) -> int:
    """Weights that multiply every token: without embedding, head and norms; of experts those that a token visits."""
    attention = dims.hidden * (2 * dims.size("q") + 2 * dims.size("kv"))
    if dims.hybrid:
        return sum(_hybrid_layer(dims, dims.kind(i), attention, experts_per_token) for i in range(dims.layers))
    total = 0
    for layer in range(dims.layers):
        ffn = 3 * dims.hidden * dims.ffn
        if dims.kind(layer) == "moe":
            ffn = 3 * dims.hidden * dims.moe_ffn * experts_per_token + dims.hidden * dims.experts
        total += attention + ffn
    return total


def _hybrid_layer(dims: Dims, kind: str, attention: int, experts_per_token: int) -> int:
    """Of a layer that is one thing. A Mamba layer's scan, like attention scores, does not count."""
    if kind == "mamba":
        return dims.hidden * (dims.size("mamba_in") + dims.size("inner"))
    if kind == "moe":
        routed = 2 * dims.size("expert_in") * dims.moe_ffn * experts_per_token
        around = 2 * dims.hidden * (dims.size("latent") + dims.size("shared"))
        return routed + around + dims.hidden * dims.experts
    return attention if kind == "attention" else 2 * dims.hidden * dims.ffn


def forward_flops(dims: Dims, experts_per_token: int, tokens: float, targets: float) -> float:
    """Of one forward over `tokens` unique rows whose head runs for `targets` of them. A backward is twice that."""
    return 2.0 * active_parameters(dims, experts_per_token) * tokens + 2.0 * dims.hidden * dims.vocab * targets


def unique_tokens(sequences: Sequence[TokenSequence]) -> int:
    """Nodes of the token trie of all sequences."""
    _, shared = depth_first_order(sequences)
    return sum(len(s.token_ids) for s in sequences) - sum(shared)


def memory() -> dict[str, float]:
    """Peaks of this process in GiB: resident since its start; of its GPU since the last call."""
    found = {"memory_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    if torch.cuda.is_available():
        found["gpu_memory_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
    return found


class Work:
    """Model FLOPs and seconds of a step's trainer phases -> MFU and speeds."""

    def __init__(self, dims: Dims, experts_per_token: int) -> None:
        self.dims, self.experts_per_token = dims, experts_per_token
        self.flops = 0.0

    @classmethod
    def of(cls, policy: MegatronPolicy) -> Work:
        return cls(policy.dims, policy.model.config.moe_router_topk if policy.dims.experts else 0)

    def forward(self, sequences: Sequence[TokenSequence]) -> None:
        targets = sum(len(s.targets) for s in sequences)
        self.flops += forward_flops(self.dims, self.experts_per_token, unique_tokens(sequences), targets)

    def train(self, tokens_unique: float, targets: float) -> None:
        self.flops += 3.0 * forward_flops(self.dims, self.experts_per_token, tokens_unique, targets)

    def mfu(self, seconds: float, precision: Precision) -> dict[str, float]:
        """{"mfu": ...} of all processes over `seconds` of trainer phases; nothing where the hardware is not known."""
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        peak = peak_flops(device, precision)
        world = int(os.environ.get("WORLD_SIZE", "1"))
        return {} if peak is None or seconds <= 0 else {"mfu": self.flops / (seconds * world * peak)}
