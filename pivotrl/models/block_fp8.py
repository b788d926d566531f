"""FP8 weights in blocks, as published checkpoints (DeepSeek-V3, Qwen3-*-FP8) have them and vLLM reads them.

A linear `X.weight` [rows, columns] is float8_e4m3fn and beside it stands `X.weight_scale_inv`, float32, one value a
block of 128 x 128 (the last ones may be smaller): weight = value * scale_inv. config.json says so in
`quantization_config`. Embeddings, norms, routers and the head stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from pivotrl.errors import UserError
from pivotrl.models.mapping import Entry

BLOCK = 128
FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max  # 448
SCALE = "_scale_inv"
_BAND = 4096  # rows that are held in float32 at once; a multiple of BLOCK


def quantised(entry: Entry) -> bool:
    """True for the weights of linear layers that are split over ranks: neither router, norm, embedding nor head."""
    rule = entry.rule
    return rule.axis is not None and rule.layout != "vocab" and all(len(shape) == 2 for shape in entry.shapes)


def scale_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Shape of the scales of a weight [rows, columns]."""
    return math.ceil(shape[0] / BLOCK), math.ceil(shape[1] / BLOCK)


def _blocks(rows: Tensor) -> Tensor:
    """[r, c] -> [r / 128, 128, c / 128, 128], zeros where blocks reach beyond the edge."""
    r, c = rows.shape
    padded = torch.nn.functional.pad(rows, (0, -c % BLOCK, 0, -r % BLOCK))
    return padded.reshape(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)


def quantise(name: str, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(values in FP8 [rows, columns], scale_inv in float32): the largest of each block becomes 448.

    Raises UserError for a weight that is not finite, which no scale can hold.
    """
    values = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    scales = torch.empty(scale_shape(tuple(weight.shape)), dtype=torch.float32, device=weight.device)
    for start in range(0, weight.shape[0], _BAND):
        rows = weight[start : start + _BAND].float()
        blocks = _blocks(rows)
        largest = blocks.abs().amax((1, 3))
        if not largest.isfinite().all():
            raise UserError(f"{name}: holds NaN or infinity, which FP8 with scales cannot; store it in bfloat16")
        scale = torch.where(largest > 0, (largest / LARGEST).clamp_min(torch.finfo(torch.float32).tiny), 1.0)
        scaled = (blocks / scale[:, None, :, None]).clamp(-LARGEST, LARGEST)
        flat = scaled.reshape(-1, scaled.shape[2] * BLOCK)[: rows.shape[0], : rows.shape[1]]
        values[start : start + _BAND] = flat.to(FP8)
        scales[start // BLOCK : start // BLOCK + scale.shape[0]] = scale
    return values, scales


def is_finite(values: Tensor) -> bool:
    """FP8 values without a NaN (e4m3fn has no infinity)."""
    return not bool(((values.view(torch.uint8) & 0x7F) == 0x7F).any())


def dequantise(values: Tensor, scales: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """FP8 values [rows, columns] and their scales -> the weight in `dtype`."""
    out = torch.empty(values.shape, dtype=dtype)
    for number, scale in enumerate(scales.float()):  # [column blocks]
        rows = values[number * block[0] : (number + 1) * block[0]].float()
        out[number * block[0] : (number + 1) * block[0]] = rows * scale.repeat_interleave(block[1])[: rows.shape[1]]
    return out


def config_of(table: Iterable[Entry]) -> dict[str, Any]:
    """`quantization_config` of an exported folder; names the linear layers that stay as they are (head, routers)."""
    kept = [
        name.removesuffix(".weight")
        for entry in table
        if not quantised(entry) and not entry.rule.megatron.startswith("embedding.")
        for name, shape in zip(entry.hf, entry.shapes, strict=True)
        if len(shape) == 2
    ]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": kept,
    }


def block_size(config: Mapping[str, Any], where: str) -> tuple[int, int] | None:
    """Block size of a Hugging Face config's FP8 weights; None for weights that are not quantised.

    Raises UserError for any other quantisation: its weights cannot be read as numbers here.
    """
    quantisation = config.get("quantization_config")
    if quantisation is None:
        return None
    method = quantisation.get("quant_method") if isinstance(quantisation, dict) else quantisation
    block = quantisation.get("weight_block_size") if isinstance(quantisation, dict) else None
    whole = isinstance(block, list) and len(block) == 2 and all(type(b) is int and b > 0 for b in block)
    if method != "fp8" or not whole or block is None:
        raise UserError(
            f"{where}: quantization_config says {method!r}, block size {block}; only FP8 in blocks is read: "
            "give the unquantised model"
        )
    return block[0], block[1]
