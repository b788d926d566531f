"""Cosines and sines of the rotary embedding at any positions, to the bit those of transformers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pivotrl.models.rope import NONE, Rope
from pivotrl.policy.tree_kernel import Tables


def rope_tables(position_ids: Tensor, head_dim: int, rope: Rope, dtype: torch.dtype) -> Tables:
    """Cosines and sines [S, head_dim] at `position_ids` [S] (half-rotation layout, as in Llama)."""
    if rope.kind == NONE:
        ones = torch.ones(len(position_ids), head_dim, dtype=dtype, device=position_ids.device)
        return ones, torch.zeros_like(ones)
    angles = position_ids.float()[:, None] * inverse_frequencies(rope, head_dim).to(position_ids.device)
    angles = torch.cat([angles, angles], -1)  # [S, head_dim]
    return (angles.cos() * rope.amplitude).to(dtype), (angles.sin() * rope.amplitude).to(dtype)


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians a position of each pair of dimensions: float32 [head_dim / 2], on CPU."""
    powers = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    plain = 1.0 / powers
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    if rope.kind == "yarn":
        return _yarn(plain, 1.0 / (rope.factor * powers), rope, head_dim)
    return plain  # "default", and "dynamic" within the positions that the model was trained on


def _llama3(plain: Tensor, rope: Rope) -> Tensor:
    """Long waves are slowed down, short ones stay, those between are blended."""
    waves = 2 * math.pi / plain
    slow = torch.where(waves > rope.original / rope.low, plain / rope.factor, plain)
    share = (rope.original / waves - rope.low) / (rope.high - rope.low)
    blended = (1 - share) * slow / rope.factor + share * slow
    between = (waves >= rope.original / rope.high) & (waves <= rope.original / rope.low)
    return torch.where(between, blended, slow)


def _yarn(plain: Tensor, slow: Tensor, rope: Rope, head_dim: int) -> Tensor:
    """From the dimension that turns `beta_fast` times over the pretraining's positions to that which turns `beta_slow`
    times, frequencies go over from those of the pretraining to those that are slowed down."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(rope.original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    kept = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    return slow * (1 - kept) + plain * kept
