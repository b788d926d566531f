"""One contiguous tensor in the format of `torch.save`, written around bytes and located in them, without being held.

torch.save writes a zip archive (https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT) of uncompressed records:
`data.pkl` (a pickle that rebuilds the tensor around a storage "0"), `data/0` (the bytes), `version`, `byteorder`.
Records here carry no CRC-32, which torch.load does not look at, and always the 64-bit sizes, for one way of writing.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch._utils import _rebuild_tensor_v2, _rebuild_tensor_v3  # type: ignore[attr-defined, unused-ignore]

_ALIGN = 64  # torch aligns storages so
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4s4H2IH")
_FULL = 0xFFFFFFFF  # "see the 64-bit field"
_TAIL = 64 * 1024  # bytes at the end of an archive in which its directory must lie
# dtypes that torch pickles by a storage class of their own; the others go by UntypedStorage and the dtype itself
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_CLASS_OF = {dtype: name for name, dtype in _STORAGES.items()}


class _Storage:
    """Stands for the storage of a tensor while its pickle is written or read."""

    def __init__(self, identity: Any = None) -> None:
        self.identity = identity


class _Tensor:
    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.dtype, self.shape = dtype, shape

    def __reduce__(self) -> tuple[Any, ...]:
        stride = tuple(torch.empty(self.shape, device="meta").stride())
        arguments: tuple[Any, ...] = (_Storage(), 0, self.shape, stride, False, OrderedDict())
        if self.dtype in _CLASS_OF:
            return _rebuild_tensor_v2, arguments
        return _rebuild_tensor_v3, (*arguments, self.dtype)


@lru_cache(maxsize=512)
def around(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """What stands before and after the bytes of a contiguous tensor in a file of torch.save."""
    elements = torch.Size(shape).numel()
    name = _CLASS_OF.get(dtype, "UntypedStorage")
    size = elements * dtype.itemsize

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            if isinstance(value, _Storage):
                kind = torch.UntypedStorage if dtype not in _CLASS_OF else getattr(torch, name)
                return ("storage", kind, "0", "cpu", elements if dtype in _CLASS_OF else size)
            return None

    text = io.BytesIO()
    Pickler(text, 2).dump(_Tensor(dtype, shape))
    head, directory = b"", b""
    for record, content in ((b"data.pkl", text.getvalue()), (b"version", b"3\n"), (b"byteorder", b"little")):
        directory += _central(record, len(content), len(head))
        head += _local(record, len(content), len(head)) + content
    directory += _central(b"data/0", size, len(head))
    head += _local(b"data/0", size, len(head))
    start = len(head) + size  # of the directory
    end = _END64.pack(b"PK\6\6", 44, 45, 45, 0, 0, 4, 4, len(directory), start)
    end += _LOCATOR.pack(b"PK\6\7", 0, start + len(directory), 1)
    end += _END.pack(b"PK\5\6", 0, 0, 4, 4, min(len(directory), _FULL), min(start, _FULL), 0)
    return head, directory + end


def _local(record: bytes, size: int, position: int) -> bytes:
    name = b"archive/" + record
    extra = struct.pack("<2H2Q", 1, 16, size, size)
    padding = -(position + _LOCAL.size + len(name) + len(extra) + 4) % _ALIGN
    extra += b"FB" + struct.pack("<H", padding) + b"Z" * padding
    return _LOCAL.pack(b"PK\3\4", 45, 0, 0, 0, 0, 0, _FULL, _FULL, len(name), len(extra)) + name + extra


def _central(record: bytes, size: int, position: int) -> bytes:
    name = b"archive/" + record
    extra = struct.pack("<2H3Q", 1, 24, size, size, position)
    fixed = _CENTRAL.pack(
        b"PK\1\2", 45, 45, 0, 0, 0, 0, 0, _FULL, _FULL, len(name), len(extra), 0, 0, 0, 0, _FULL
    )  # fmt: skip
    return fixed + name + extra


@dataclass(frozen=True)
class Found:
    """A contiguous tensor in a file: its dtype and shape, and where in the file its bytes start."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    position: int


def locate(descriptor: int, start: int, length: int) -> Found | None:
    """The tensor in the `length` bytes at `start` of an open file, or None where they are anything but one.

    None is not a verdict: views, compressed or older archives read well with torch.load, which tells what is wrong.
    """
    try:
        records = _records(descriptor, start, length)
        text = next(r for name, r in records.items() if name.endswith("/data.pkl"))
        at, size = _content(descriptor, start, *text)
        found = _Unpickler(io.BytesIO(os.pread(descriptor, size, at))).load()
        if not isinstance(found, tuple) or len(found) != 5 or not isinstance(found[0], _Storage):
            return None
        storage, offset, shape, stride, dtype = found
        key, count = storage.identity
        dense = tuple(torch.empty(shape, device="meta").stride())
        at, size = _content(descriptor, start, *next(r for n, r in records.items() if n.endswith(f"/data/{key}")))
        if offset != 0 or (tuple(stride) != dense and count > 1) or size != torch.Size(shape).numel() * dtype.itemsize:
            return None
        if at + size > start + length:
            return None
        return Found(dtype, tuple(shape), at)
    except Exception:  # whatever a damaged archive makes of it: torch.load is asked next, and names it
        return None


def _records(descriptor: int, start: int, length: int) -> dict[str, tuple[int, int]]:
    """Uncompressed records of an archive: name -> (position of its header in the archive, size)."""
    tail_at = max(0, length - _TAIL)
    tail = os.pread(descriptor, length - tail_at, start + tail_at)
    end = tail.rindex(b"PK\5\6")
    *_, entries, _, directory, _ = _END.unpack_from(tail, end)
    if directory == _FULL or (end >= _LOCATOR.size and tail[end - _LOCATOR.size :].startswith(b"PK\6\7")):
        _, _, end64, _ = _LOCATOR.unpack_from(tail, end - _LOCATOR.size)
        *_, entries, _, directory = _END64.unpack_from(tail, end64 - tail_at)
    found: dict[str, tuple[int, int]] = {}
    position = directory - tail_at
    for _ in range(entries):
        fields = _CENTRAL.unpack_from(tail, position)
        method, packed, size, name_length, extra_length, comment, header = (
            fields[i] for i in (4, 8, 9, 10, 11, 12, 16)
        )
        position += _CENTRAL.size
        name = tail[position : position + name_length].decode("ascii")
        extra = tail[position + name_length : position + name_length + extra_length]
        position += name_length + extra_length + comment
        wide = [value == _FULL for value in (size, packed, header)]
        if any(wide):
            values = iter(_wide(extra))
            size, packed, header = (
                next(values) if full else value for full, value in zip(wide, (size, packed, header), strict=True)
            )
        if method or size != packed:
            raise ValueError(f"{name} is compressed")
        found[name] = header, size
    return found


def _wide(extra: bytes) -> Sequence[int]:
    position = 0
    while position + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, position)
        if kind == 1:
            return struct.unpack_from(f"<{size // 8}Q", extra, position + 4)
        position += 4 + size
    raise ValueError("64-bit sizes are missing")


def _content(descriptor: int, start: int, header: int, size: int) -> tuple[int, int]:
    """(position in the file, size) of a record's content."""
    fields = _LOCAL.unpack(os.pread(descriptor, _LOCAL.size, start + header))
    if fields[0] != b"PK\3\4":
        raise ValueError("no record there")
    return start + header + _LOCAL.size + fields[9] + fields[10], size


class _Unpickler(pickle.Unpickler):
    """Builds only the description of a plain tensor; every other class is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name == "_rebuild_tensor_v2":
            return lambda storage, offset, size, stride, *_: (storage, offset, size, stride, self.dtype)
        if module == "torch._utils" and name == "_rebuild_tensor_v3":
            return lambda storage, offset, size, stride, _grad, _hooks, dtype: (storage, offset, size, stride, dtype)
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if (module, name) in (("torch.storage", "UntypedStorage"), ("torch", "UntypedStorage")):
            return None
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, identity: Any) -> Any:
        _, self.dtype, key, _, count = identity
        return _Storage((key, count))
