"""Strict reading of the safetensors format (https://github.com/huggingface/safetensors): header, then plain reads.

Every mistake in a file is a UserError that names the file and the tensor.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pivotrl.errors import UserError
from pivotrl.models.extents import Extent, read

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER = 100 * 10**6  # bytes; the limit of the reference implementation


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file; `start` and `end` are byte positions in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int

    def extent(self, path: Path) -> Extent:
        """Where its bytes lie, given the file."""
        return Extent(path, self.start, self.end - self.start)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`object_pairs_hook` of json: a key that stands twice is an error, not silently the last one."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} stands there twice")
        found[key] = value
    return found


def read_json_object(path: Path, raw: bytes | None = None) -> dict[str, Any]:
    """A JSON object from a file (or from `raw`, which `path` names). Raises UserError for anything else."""
    try:
        value = json.loads((path.read_bytes() if raw is None else raw).decode("utf-8"), object_pairs_hook=unique_keys)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error}); fetch or write the file again") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: a JSON object was expected, found {type(value).__name__}")
    return value


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Tensors of a safetensors file by name. Raises UserError for a truncated or malformed file."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(MAX_HEADER, size - 8):
                raise UserError(
                    f"{path}: truncated, or no safetensors file: {size} bytes, header of {length}; fetch it again"
                )
            header = read_json_object(path, file.read(length))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    header.pop("__metadata__", None)
    tensors = {name: _info(path, name, entry, 8 + length) for name, entry in header.items()}
    position = 8 + length
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if info.start != position:
            raise UserError(
                f"{path}: tensor {name} starts at byte {info.start}, {position} was expected; fetch it again"
            )
        position = info.end
    if position != size:
        what = "truncated" if size < position else "has bytes after its last tensor"
        raise UserError(f"{path}: {what}: {size} bytes, the header speaks of {position}; fetch it again")
    return tensors


def _info(path: Path, name: str, entry: Any, base: int) -> TensorInfo:
    def integers(value: Any) -> bool:
        return isinstance(value, list) and all(type(x) is int and 0 <= x < 2**63 for x in value)

    if not isinstance(entry, dict) or not integers(entry.get("shape")) or not integers(entry.get("data_offsets")):
        raise UserError(f"{path}: tensor {name}: needs dtype, shape and data_offsets of non-negative whole numbers")
    dtype, offsets = entry.get("dtype"), entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise UserError(f"{path}: tensor {name}: dtype {dtype!r} is not known; known: {', '.join(DTYPES)}")
    expected = math.prod(entry["shape"]) * DTYPES[dtype].itemsize
    if len(offsets) != 2 or offsets[1] - offsets[0] != expected:
        raise UserError(f"{path}: tensor {name}: data_offsets {offsets} do not hold {expected} bytes of its shape")
    return TensorInfo(DTYPES[dtype], tuple(entry["shape"]), base + offsets[0], base + offsets[1])


def read_tensor(path: Path, name: str, info: TensorInfo) -> Tensor:
    """Read one tensor into memory of its own. Raises UserError where the file has become shorter."""
    return read([info.extent(path)], name).view(info.dtype).reshape(info.shape)
