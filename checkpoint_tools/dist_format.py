"""megatron-core's distributed checkpoint ("torch_dist"), read piece by piece, without megatron or ranks.

A folder of `__<n>_0.distcp` files (one `torch.save` a piece), `.metadata` (pickled
torch.distributed.checkpoint.Metadata: pieces of every tensor and where they lie), `common.pt` and `metadata.json`.
It knows no parallel layout: megatron-core cuts its shards from the pieces when it loads, in any layout.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import pickle
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from checkpoint_tools.torch_file import Found, locate
from pivotrl.errors import UserError
from pivotrl.models import extents
from pivotrl.models.extents import Extent
from pivotrl.models.safetensors_header import read_json_object

_MISTAKES = (
    pickle.UnpicklingError,
    EOFError,
    AttributeError,
    ImportError,
    IndexError,
    KeyError,
    TypeError,
    ValueError,
    RuntimeError,
    RecursionError,
    OverflowError,
    MemoryError,
    struct.error,
)


_Held = TypeVar("_Held", Tensor, Found)


class _Unpickler(pickle.Unpickler):
    """Builds only what a checkpoint's metadata is made of: a file from elsewhere must not run code here."""

    _MODULES = ("torch.distributed.checkpoint.", "megatron.core.dist_checkpointing.strategies.")
    _PLAIN = frozenset(
        {
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("collections", "OrderedDict"),
            ("builtins", "set"),
            ("pathlib", "PosixPath"),
            ("pathlib", "Path"),
            ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
            ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("megatron."):  # save plans that megatron-core keeps for itself; megatron may be absent
            return type(name, (_Opaque,), {})
        if (module, name) in self._PLAIN:
            return super().find_class(module, name)
        if module.startswith(self._MODULES) and name[:1].isalpha() | name.startswith("_") and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__.startswith("torch.distributed.checkpoint."):
                return found
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint metadata needs")


class _Opaque:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...


@dataclass(frozen=True)
class Piece:
    """One stored part of a tensor: its offsets and sizes in the whole, and its bytes in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    dtype: torch.dtype
    size: tuple[int, ...]
    pieces: tuple[Piece, ...]


class DistReader:
    """A distributed checkpoint on disk. Raises UserError naming the file and key for whatever is wrong with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._at: dict[tuple[str, int], dict[tuple[int, ...], list[Piece]]] = {}
        self._files: dict[str, int] = {}  # descriptors that stay open, for looking into pieces
        self._lock = threading.Lock()
        config = read_json_object(folder / "metadata.json")
        if config.get("sharded_backend") != "torch_dist":
            raise UserError(
                f"{folder / 'metadata.json'}: sharded_backend is {config.get('sharded_backend')!r}; only 'torch_dist' "
                "is read: load it with the megatron-core that wrote it and save it with --ckpt-format torch_dist"
            )
        metadata = self._metadata()
        self.objects = sorted(k for k, v in metadata.state_dict_metadata.items() if isinstance(v, BytesStorageMetadata))
        try:
            self.tensors = {
                key: self._stored(key, value, metadata.storage_data)
                for key, value in metadata.state_dict_metadata.items()
                if not isinstance(value, BytesStorageMetadata)
            }
        except _MISTAKES as error:
            raise UserError(
                f"{folder / '.metadata'}: malformed ({error}); save or convert the checkpoint again"
            ) from error

    def _metadata(self) -> Metadata:
        path = self.folder / ".metadata"
        try:
            with path.open("rb") as file:
                metadata = _Unpickler(file).load()
            if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
                raise ValueError("no checkpoint metadata in it")
            if not all(isinstance(k, str) for k in metadata.state_dict_metadata):
                raise ValueError("a key is not a string")
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}); the checkpoint was not finished") from error
        except _MISTAKES as error:
            raise UserError(f"{path}: cannot be read ({error}); save or convert the checkpoint again") from error
        return metadata

    def _stored(self, key: str, value: TensorStorageMetadata, places: Mapping[MetadataIndex, Any]) -> StoredTensor:
        pieces = []
        for chunk in value.chunks:
            place = places.get(MetadataIndex(key, chunk.offsets))
            if place is None:
                raise ValueError(f"{key}: nothing is stored at {list(chunk.offsets)}")
            if Path(place.relative_path).name != place.relative_path:
                raise ValueError(f"{key}: {place.relative_path!r} is not a file of this folder")
            pieces.append(
                Piece(tuple(chunk.offsets), tuple(chunk.sizes), place.relative_path, place.offset, place.length)
            )
        stored = StoredTensor(value.properties.dtype, tuple(value.size), tuple(pieces))
        held = {(p.offsets, p.sizes) for p in pieces}
        volume = sum(math.prod(sizes) for _, sizes in held)
        if len(held) != len(pieces) or volume != math.prod(stored.size):
            what = "twice" if len(held) != len(pieces) or volume > math.prod(stored.size) else "not at all"
            raise ValueError(f"{key}: a part of the tensor is stored {what}")
        return stored

    @property
    def common(self) -> dict[str, Any]:
        """common.pt, as far as it holds plain values; {} where it needs classes of the program that wrote it."""
        try:
            value = torch.load(self.folder / "common.pt", map_location="cpu", weights_only=True)
        except (OSError, *_MISTAKES):
            return {}
        return value if isinstance(value, dict) else {}

    def check_files(self, keys: Sequence[str]) -> None:
        """Raise UserError naming every file that is absent or shorter than the pieces of `keys` need."""
        needed: dict[str, int] = {}
        for key in keys:
            for piece in self.tensors[key].pieces:
                needed[piece.file] = max(needed.get(piece.file, 0), piece.start + piece.length)
        problems = []
        for name, end in sorted(needed.items()):
            path = self.folder / name
            size = path.stat().st_size if path.is_file() else -1
            if size < end:
                problems.append(f"{name} is " + ("not there" if size < 0 else f"truncated: {size} of {end} bytes"))
        if problems:
            raise UserError(f"{self.folder}: {'; '.join(problems)}; copy the checkpoint again")

    def read(self, key: str, index: Sequence[int] = ()) -> Tensor:
        """Tensor `key` at `index` of its leading axes, whole over the others."""
        stored = self.tensors[key]
        shape, lead = stored.size[len(index) :], len(index)
        out: Tensor | None = None
        covered = 0
        for piece in self._pieces(key, tuple(index)):
            part = self._part(key, piece, tuple(index))
            covered += part.numel()
            if part.shape == shape:
                out = part
                continue
            out = torch.empty(shape, dtype=stored.dtype) if out is None else out
            region = tuple(slice(o, o + s) for o, s in zip(piece.offsets[lead:], piece.sizes[lead:], strict=True))
            out[region] = part
        if out is None or covered != math.prod(shape):
            raise UserError(f"{self.folder}: {key}{list(index) or ''}: parts of it are missing or stored twice")
        return out

    def extents(self, key: str, index: Sequence[int] = ()) -> list[Extent] | None:
        """Where the bytes of `read`'s tensor lie, in order; None where they do not lie row by row in plain pieces."""
        shape, lead = self.tensors[key].size[len(index) :], len(index)
        if not shape:
            return None
        found: list[Extent] = []
        row = 0
        for piece in sorted(self._pieces(key, tuple(index)), key=lambda p: p.offsets[lead]):
            if piece.sizes[lead + 1 :] != shape[1:] or piece.offsets[lead] != row:
                return None
            extent = self._extent(key, piece, tuple(index))
            if extent is None:
                return None
            found.append(extent)
            row += piece.sizes[lead]
        return found if row == shape[0] else None

    def _extent(self, key: str, piece: Piece, index: tuple[int, ...]) -> Extent | None:
        """Where a piece's bytes at `index` of the leading axes lie; None for a piece that only torch.load can read."""
        place = self._located(key, piece)
        if place is None:
            return None
        number = 0
        for i, offset, size in zip(index, piece.offsets, piece.sizes, strict=False):
            number = number * size + i - offset
        length = math.prod(piece.sizes[len(index) :]) * place.dtype.itemsize
        return Extent(self.folder / piece.file, place.position + number * length, length)

    def _part(self, key: str, piece: Piece, index: tuple[int, ...]) -> Tensor:
        """What a piece holds at `index` of the leading axes, in memory of its own."""
        extent = self._extent(key, piece, index)
        if extent is not None:
            return extents.read([extent], key).view(self.tensors[key].dtype).reshape(piece.sizes[len(index) :])
        part = self._load(key, piece)[tuple(i - o for i, o in zip(index, piece.offsets, strict=False))]
        return part.clone() if part.untyped_storage().nbytes() > 2 * part.nbytes else part

    def _located(self, key: str, piece: Piece) -> Found | None:
        with self._lock:
            descriptor = self._files.get(piece.file)
            if descriptor is None:
                try:
                    descriptor = self._files[piece.file] = os.open(self.folder / piece.file, os.O_RDONLY)
                except OSError as error:
                    raise UserError(f"{self.folder / piece.file}: cannot be read ({error.strerror})") from error
        found = locate(descriptor, piece.start, piece.length)
        return self._checked(key, piece, found) if found else None

    def __del__(self) -> None:
        for descriptor in self.__dict__.get("_files", {}).values():
            os.close(descriptor)

    def _pieces(self, key: str, index: tuple[int, ...]) -> list[Piece]:
        """Pieces of a tensor that reach into `index` of its leading axes; found by a table, for there may be 10^4."""
        place = (key, len(index))
        if place not in self._at:
            at: dict[tuple[int, ...], list[Piece]] = {}
            for piece in self.tensors[key].pieces:
                ranges = (range(o, o + s) for o, s in zip(piece.offsets[: len(index)], piece.sizes, strict=False))
                for reached in itertools.product(*ranges):
                    at.setdefault(reached, []).append(piece)
            self._at[place] = at
        return self._at[place].get(index, [])

    def _load(self, key: str, piece: Piece) -> Tensor:
        path = self.folder / piece.file
        try:
            with path.open("rb") as file:
                file.seek(piece.start)
                raw = file.read(piece.length)
            tensor = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
        except (OSError, *_MISTAKES) as error:
            raise UserError(f"{path}: {key}: cannot be read ({error}); copy the checkpoint again") from error
        if not isinstance(tensor, Tensor):
            raise UserError(f"{path}: {key}: no tensor is stored there; save the checkpoint again")
        return self._checked(key, piece, tensor)

    def _checked(self, key: str, piece: Piece, held: _Held) -> _Held:
        """`held`, or UserError where its shape or dtype is not what .metadata says."""
        if tuple(held.shape) != piece.sizes or held.dtype != self.tensors[key].dtype:
            where = self.folder / piece.file
            raise UserError(f"{where}: {key}: holds something else than .metadata says; save the checkpoint again")
        return held
