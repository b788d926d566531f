"""Byte ranges of files: what a tensor is on disk, read into memory or copied to another file without being held.

Reads are positional (`pread`), never mapped: a file that is truncated meanwhile, or a file system that fails, is an
error with a name and not a signal; and memory is what is held, which is one buffer a thread here.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pivotrl.errors import UserError

BUFFER = 2**20  # bytes that are copied at once: small enough to stay in the processor's cache
_LARGEST = 2**30  # Linux reads and writes at most 2^31 - 4096 bytes at once
_local = threading.local()


@dataclass(frozen=True)
class Extent:
    """`length` bytes of the file `path`, from `start`."""

    path: Path
    start: int
    length: int

    def part(self, start: int, length: int) -> Extent:
        """`length` of its bytes, from its byte `start`."""
        return Extent(self.path, self.start + start, length)


def joined(extents: Sequence[Extent]) -> list[Extent]:
    """The same bytes with neighbours that follow on each other in one file made one; empty ones left out."""
    merged: list[Extent] = []
    for extent in extents:
        last = merged[-1] if merged else None
        if last and last.path == extent.path and last.start + last.length == extent.start:
            merged[-1] = Extent(last.path, last.start, last.length + extent.length)
        elif extent.length:
            merged.append(extent)
    return merged


def cut(extents: Sequence[Extent], start: int, length: int) -> list[Extent]:
    """Bytes [start, start + length) of what the extents are together."""
    found: list[Extent] = []
    position = 0
    for extent in extents:
        first, last = max(start, position), min(start + length, position + extent.length)
        if first < last:
            found.append(extent.part(first - position, last - first))
        position += extent.length
    return found


def read(extents: Sequence[Extent], what: str) -> Tensor:
    """Their bytes, one after another, as a uint8 tensor of its own. `what` names the tensor in errors (UserError)."""
    raw = torch.empty(sum(e.length for e in extents), dtype=torch.uint8)
    view, done = bytes_of(raw), 0
    for extent in extents:
        with _opened(extent.path) as descriptor:
            _fill(descriptor, view[done : done + extent.length], extent, 0, what)
        done += extent.length
    return raw


def copy(extents: Sequence[Extent], target: int, position: int, what: str) -> None:
    """Write their bytes, one after another, to the open file `target` from byte `position` on.

    Raises UserError where a source has become shorter or cannot be read; OSError where the target cannot be written.
    """
    buffer = getattr(_local, "buffer", None)
    if buffer is None:
        buffer = _local.buffer = memoryview(bytearray(BUFFER))
    for extent in joined(extents):
        with _opened(extent.path) as descriptor:
            for start in range(0, extent.length, BUFFER):
                chunk = buffer[: min(BUFFER, extent.length - start)]
                _fill(descriptor, chunk, extent, start, what)
                write(target, chunk, position)
                position += len(chunk)


def write(target: int, data: memoryview, position: int) -> None:
    """Write all of `data` to the open file `target` at byte `position`."""
    done = 0
    while done < len(data):
        done += os.pwrite(target, data[done : done + _LARGEST], position + done)


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor on the CPU, in row order; copied only where it is not contiguous."""
    view: memoryview = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return view


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _fill(descriptor: int, view: memoryview, extent: Extent, offset: int, what: str) -> None:
    done = 0
    while done < len(view):
        try:
            count = os.preadv(descriptor, [view[done : done + _LARGEST]], extent.start + offset + done)
        except OSError as error:
            raise UserError(f"{extent.path}: {what}: cannot be read ({error.strerror}); copy it again") from error
        if count == 0:
            raise UserError(f"{extent.path}: truncated within tensor {what}; fetch or copy it again")
        done += count
