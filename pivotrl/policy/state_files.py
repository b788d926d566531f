"""Pieces of global tensors on disk, in megatron-core's distributed format ("torch_dist"): each rank has a file.

No collective is needed to write, and none to read: a rank reads the pieces that reach into what it holds, whatever
layout they were written in. Nothing is unpickled but what a reader of plain tensors and metadata needs.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from checkpoint_tools.dist_format import DistReader
from pivotrl.errors import UserError
from pivotrl.io import write_json

_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_BLOCK = 1 << 22  # bytes read at a time for a checksum


class Piece(NamedTuple):
    """A rectangle of the global tensor `key`: at `offsets`, of the shape of `tensor`; `size` is the whole's."""

    key: str
    size: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor


class Entry(NamedTuple):
    """Where a piece lies on disk."""

    key: str
    dtype: torch.dtype
    size: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class Written:
    """What one rank wrote: its pieces, and bytes and CRC-32 of its files."""

    entries: list[Entry]
    files: dict[str, tuple[int, int]]


def rectangles(shape: Sequence[int], begin: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Cut elements [begin, end) of a contiguous tensor into rectangles: (offsets, sizes, first element), in order.

    A run of elements is at most a part of a row, whole rows, and a part of a row, at every depth.
    """
    if begin >= end:
        return
    if len(shape) <= 1:
        yield ((begin,), (end - begin,), begin) if shape else ((), (), begin)
        return
    inner = math.prod(shape[1:])
    while begin < end:
        row, inside = divmod(begin, inner)
        rows = (end - begin) // inner
        if inside == 0 and rows:
            yield (row, *(0 for _ in shape[1:])), (rows, *shape[1:]), begin
            begin += rows * inner
            continue
        stop = min(end, (row + 1) * inner)
        for offsets, sizes, first in rectangles(shape[1:], inside, inside + stop - begin):
            yield (row, *offsets), (1, *sizes), row * inner + first
        begin = stop


def write_pieces(folder: Path, rank: int, pieces: Iterable[Piece]) -> Written:
    """Write this rank's pieces to a file of its own, flushed to the disk. Raises OSError (no space, not writable)."""
    name = f"__{rank}_0.distcp"
    entries: list[Entry] = []
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # torch.load does not look at them; the file has a checksum
    try:
        with (folder / name).open("wb") as file:
            for piece in pieces:
                start, tensor = file.tell(), piece.tensor.detach().cpu()
                if tensor.untyped_storage().nbytes() != tensor.nbytes:
                    tensor = tensor.clone()  # torch.save writes the whole storage of a view
                _save(tensor, file)
                place = (name, start, file.tell() - start)
                entries.append(
                    Entry(piece.key, tensor.dtype, tuple(piece.size), tuple(piece.offsets), tuple(tensor.shape), *place)
                )
            file.flush()
            os.fsync(file.fileno())
    finally:
        torch.serialization.set_crc32_options(before)
    return Written(entries, {name: checksum(folder / name)})


def _save(tensor: Tensor, file: io.BufferedWriter) -> None:
    """torch.save through memory: torch's own writer tells a full disk as a RuntimeError without a cause."""
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    file.write(buffer.getbuffer())


def checksum(path: Path) -> tuple[int, int]:
    """(bytes, CRC-32) of a file."""
    crc = size = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return size, crc


def write_index(folder: Path, written: Iterable[Written], iteration: int) -> dict[str, tuple[int, int]]:
    """Rank 0, after all have written: the files that say what lies where. Returns their bytes and checksums."""
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for entry in (e for w in written for e in w.entries):
        held = tensors.get(entry.key)
        if held is None:
            properties = TensorProperties(dtype=entry.dtype)
            held = tensors[entry.key] = TensorStorageMetadata(properties, torch.Size(entry.size), [])
        chunk = ChunkStorageMetadata(torch.Size(entry.offsets), torch.Size(entry.shape))
        held.chunks.append(chunk)
        places[MetadataIndex(entry.key, chunk.offsets)] = _StorageInfo(entry.file, entry.start, entry.length)
    torch.save({"iteration": iteration, "checkpoint_version": 3.0}, folder / "common.pt")
    write_json(folder / "metadata.json", _BACKENDS)
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(Metadata(dict(tensors), None, places, StorageMeta(), "1.0.0"), file)
        file.flush()
        os.fsync(file.fileno())
    return {name: checksum(folder / name) for name in ("common.pt", "metadata.json", ".metadata")}


class RegionReader:
    """Reads rectangles of global tensors. Raises UserError naming the file and tensor for whatever is wrong."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stored = DistReader(folder)  # unpickles metadata with a reader that builds nothing else
        self._last: tuple[tuple[str, int], Tensor] | None = None

    def read(self, key: str, size: Sequence[int], offsets: Sequence[int], shape: Sequence[int], padded: bool) -> Tensor:
        """The part at `offsets` of tensor `key`, of whole size `size`. `padded`: the size may differ, by padding.

        Raises UserError where the checkpoint has no such tensor, or one of another size.
        """
        held = self.stored.tensors.get(key)
        if held is None:
            raise UserError(f"{self.folder}: has no tensor {key}; it was saved from another model or optimizer")
        if held.size != tuple(size) and not padded:
            raise UserError(
                f"{self.folder}: {key} has the size {list(held.size)}, this model's is {list(size)}; "
                "set model.path and precision to what it was saved with"
            )
        out = torch.zeros(tuple(shape), dtype=held.dtype)
        filled = 0
        for piece in held.pieces:
            low = [max(o, p) for o, p in zip(offsets, piece.offsets, strict=True)]
            ends = [min(o + s, p + q) for o, s, p, q in zip(offsets, shape, piece.offsets, piece.sizes, strict=True)]
            if any(a >= b for a, b in zip(low, ends, strict=True)):
                continue
            spans = list(zip(low, ends, strict=True))
            here = tuple(slice(a - o, b - o) for (a, b), o in zip(spans, offsets, strict=True))
            there = tuple(slice(a - o, b - o) for (a, b), o in zip(spans, piece.offsets, strict=True))
            out[here] = self._load(key, piece.file, piece.start, piece.length, piece.sizes, held.dtype)[there]
            filled += math.prod(b - a for a, b in spans)
        if filled != out.numel() and not padded:
            raise UserError(f"{self.folder}: {key}: parts of it are missing; delete this folder to use an older one")
        return out

    def _load(self, key: str, name: str, start: int, length: int, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self._last is not None and self._last[0] == (name, start):  # neighbouring parts come from one piece
            return self._last[1]
        path = self.folder / name
        try:
            with path.open("rb") as file:
                file.seek(start)
                tensor = torch.load(io.BytesIO(file.read(length)), map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise UserError(
                f"{path}: {key} cannot be read ({reason}); delete the folder to go on from an older checkpoint"
            ) from error
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != sizes or tensor.dtype != dtype:
            raise UserError(f"{path}: {key}: holds something else than .metadata says; the folder was changed")
        self._last = ((name, start), tensor)
        return tensor
