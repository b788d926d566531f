"""megatron-core's distributed checkpoint ("torch_dist"), written piece by piece, without megatron or ranks.

The format is described in dist_format.py. `.metadata` is written last, so that an unfinished folder is not a
checkpoint for any reader.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

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

from checkpoint_tools.torch_file import around
from pivotrl.errors import UserError
from pivotrl.io import write_json
from pivotrl.models import extents
from pivotrl.models.extents import Extent

BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
COMMON = {"common_backend": "torch", "common_backend_version": 1}


class DistWriter:
    """Writes pieces; threads write to files of their own (`stream` numbers them)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tensors: dict[str, TensorStorageMetadata] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}
        self._files: dict[int, tuple[str, int]] = {}  # stream -> file name and descriptor
        self._ends: dict[int, int] = {}
        self._lock = threading.Lock()

    def add(self, key: str, size: Sequence[int], offsets: Sequence[int], piece: Tensor, stream: int = 0) -> None:
        """Write `piece` as the part at `offsets` of tensor `key`, whose whole size is `size`."""
        self._add(key, size, offsets, piece.dtype, piece.shape, piece, stream)

    def add_bytes(
        self,
        key: str,
        size: Sequence[int],
        offsets: Sequence[int],
        dtype: torch.dtype,
        shape: Sequence[int],
        source: Sequence[Extent],
        stream: int = 0,
    ) -> None:
        """Write a piece of that dtype and shape from where its bytes lie; bytes that lack at its end are zeros."""
        self._add(key, size, offsets, dtype, shape, source, stream)

    def _add(
        self,
        key: str,
        size: Sequence[int],
        offsets: Sequence[int],
        dtype: torch.dtype,
        shape: Sequence[int],
        data: Tensor | Sequence[Extent],
        stream: int,
    ) -> None:
        with self._lock:
            if stream not in self._files:
                name = f"__{stream}_0.distcp"
                descriptor = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
                self._files[stream], self._ends[stream] = (name, descriptor), 0
            (file, descriptor), start = self._files[stream], self._ends[stream]
        before, after = around(dtype, tuple(shape))
        length = torch.Size(shape).numel() * dtype.itemsize
        extents.write(descriptor, memoryview(before), start)
        if isinstance(data, Tensor):
            extents.write(descriptor, extents.bytes_of(data), start + len(before))
        else:
            extents.copy(data, descriptor, start + len(before), key)
        extents.write(descriptor, memoryview(after), start + len(before) + length)  # a gap before it reads as zeros
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape))
        with self._lock:
            self._ends[stream] = start + len(before) + length + len(after)
            entry = self._tensors.get(key)
            if entry is None:
                properties = TensorProperties(dtype=dtype)
                entry = self._tensors[key] = TensorStorageMetadata(properties, torch.Size(size), [])
            if tuple(entry.size) != tuple(size) or entry.properties.dtype != dtype:
                raise UserError(
                    f"{key}: parts of different size or dtype ({entry.properties.dtype}, {dtype}); "
                    "give --dtype, so that all become alike"
                )
            entry.chunks.append(chunk)
            place = _StorageInfo(file, start, self._ends[stream] - start)
            self._places[MetadataIndex(key, chunk.offsets)] = place

    def finish(self, common: Mapping[str, Any]) -> None:
        """Flush everything to disk and write `.metadata`, last."""
        descriptors = [descriptor for _, descriptor in self._files.values()]
        with ThreadPoolExecutor(max(1, len(descriptors))) as pool:
            list(pool.map(os.fsync, descriptors))
        self.close()
        torch.save(dict(common), self.folder / "common.pt")
        write_json(self.folder / "metadata.json", {**BACKEND, **COMMON})
        metadata = Metadata(dict(self._tensors), None, self._places, StorageMeta(), "1.0.0")
        with (self.folder / ".metadata").open("wb") as file:
            pickle.dump(metadata, file)
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        """Close the files; for a conversion that failed."""
        for _, descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()
