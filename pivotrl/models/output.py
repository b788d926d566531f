"""Output folders that appear whole or not at all, and tensors written as a sharded Hugging Face folder.

The one writer of both the policy's checkpoints and the conversion's.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pivotrl.errors import UserError
from pivotrl.io import write_json
from pivotrl.locks import hold
from pivotrl.models import extents
from pivotrl.models.extents import Extent
from pivotrl.models.folder import INDEX, SINGLE, WEIGHT_FILES
from pivotrl.models.safetensors_header import NAMES

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)
MARGIN = 64 * 2**20  # bytes beside the tensors: headers, metadata, tokenizer


@contextmanager
def new_folder(target: Path, need_bytes: int, force: bool) -> Iterator[Path]:
    """A folder beside `target` to write into; takes its name when the block ends without an exception.

    A process killed in between leaves `<target>.partial`, which the next run removes. Raises UserError where the
    target exists and `force` is off, where the disk lacks `need_bytes`, or fills up or fails meanwhile.
    """
    try:
        with _new_folder(target, need_bytes, force) as folder:
            yield folder
    except OSError as error:
        if error.errno not in _DISK:
            raise
        raise UserError(
            f"{target}: {error.strerror}; nothing was left behind: make room there, or write elsewhere"
        ) from error


@contextmanager
def _new_folder(target: Path, need_bytes: int, force: bool) -> Iterator[Path]:
    if target.exists() and not force:
        raise UserError(f"{target}: exists already; give another folder, or --force to replace it")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial, old = (target.with_name(target.name + end) for end in (".partial", ".old"))
    lock = target.with_name(f".{target.name}.lock")
    with hold(lock, wait_seconds=0.0):
        try:
            shutil.rmtree(partial, ignore_errors=True)
            free, needed = shutil.disk_usage(target.parent).free, need_bytes + MARGIN
            if free < needed:
                raise UserError(
                    f"{target.parent}: {free / 2**30:.1f} GiB free, {needed / 2**30:.1f} GiB needed; make room"
                )
            partial.mkdir()
            yield partial
            shutil.rmtree(old, ignore_errors=True)
            if target.exists():
                target.rename(old)
            partial.rename(target)
            shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            lock.unlink(missing_ok=True)


def carry_over(source: Path, target: Path, dtype: torch.dtype | None, changes: Mapping[str, Any] | None = None) -> None:
    """Copy everything of a Hugging Face folder but its weights; config.json keeps every key, its dtype is set.

    Args: `dtype` None leaves the config's; `changes` are keys of config.json that are set besides (None removes one).
    """
    weights = {f for pattern in WEIGHT_FILES for f in source.glob(pattern)}
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.iterdir()):
        if file.is_file() and file not in weights:
            shutil.copyfile(file, target / file.name)
    if dtype is None and not changes:
        return
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if dtype is not None:
        present = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]  # newer and older name
        config |= dict.fromkeys(present, str(dtype).removeprefix("torch."))
    config |= changes or {}
    write_json(target / "config.json", {k: v for k, v in config.items() if v is not None or k not in (changes or {})})


@dataclass(frozen=True)
class Planned:
    """A tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def plan_files(tensors: Sequence[Planned], shard_bytes: int) -> list[list[Planned]]:
    """Cut the tensors, in order, into files of at most `shard_bytes` (a larger tensor has a file of its own)."""
    files: list[list[Planned]] = [[]]
    size = 0
    for tensor in tensors:
        if files[-1] and size + tensor.nbytes > shard_bytes:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += tensor.nbytes
    return files


class SafetensorsWriter:
    """Writes a Hugging Face folder's weights: numbered safetensors files of known content, and their index.

    Tensors may come in any order and from several threads; each goes to its place. A file is flushed to disk when its
    last tensor is there; `finish` writes the index, or raises naming what never came.
    """

    def __init__(self, folder: Path, tensors: Sequence[Planned], shard_bytes: int) -> None:
        self.folder = folder
        files = plan_files(tensors, shard_bytes)
        self.names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
        if len(files) == 1:
            self.names = [SINGLE]
        self._places: dict[str, tuple[Planned, str, int]] = {}
        self._lock = threading.Lock()
        self._left = {name: {t.name for t in file} for name, file in zip(self.names, files, strict=True)}
        for name, file in zip(self.names, files, strict=True):
            position = self._start(name, file)
            for tensor in file:
                self._places[tensor.name] = tensor, name, position
                position += tensor.nbytes

    def _start(self, name: str, tensors: Sequence[Planned]) -> int:
        """Write a file's header; returns where its tensors start (a multiple of 8)."""
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        position = 0
        for t in tensors:
            offsets = [position, position + t.nbytes]
            header[t.name] = {"dtype": NAMES[t.dtype], "shape": list(t.shape), "data_offsets": offsets}
            position += t.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        (self.folder / name).write_bytes(len(text).to_bytes(8, "little") + text)
        return 8 + len(text)

    def put(self, name: str, value: Tensor) -> None:
        """Write a tensor; it must have the planned dtype and shape."""
        planned = self._places[name][0]
        if value.dtype != planned.dtype or tuple(value.shape) != planned.shape:
            raise UserError(f"{name}: read as {value.dtype} {list(value.shape)}, planned as {planned}")
        with self._at(name) as (descriptor, position):
            extents.write(descriptor, extents.bytes_of(value), position)

    def put_bytes(self, name: str, source: Sequence[Extent]) -> None:
        """Write a tensor from where its bytes lie, without holding it."""
        planned, size = self._places[name][0], sum(e.length for e in source)
        if size != planned.nbytes:
            raise UserError(f"{name}: {size} bytes, planned as {planned}")
        with self._at(name) as (descriptor, position):
            extents.copy(source, descriptor, position, name)

    @contextmanager
    def _at(self, name: str) -> Iterator[tuple[int, int]]:
        _, file, position = self._places[name]
        descriptor = os.open(self.folder / file, os.O_WRONLY)
        try:
            yield descriptor, position
            with self._lock:
                self._left[file].remove(name)
                last = not self._left[file]
            if last:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def finish(self) -> None:
        """Write the index. Raises UserError naming tensors that were never written."""
        missing = sorted(name for names in self._left.values() for name in names)
        if missing:
            raise UserError(f"{self.folder}: {len(missing)} tensors were not written: {', '.join(missing[:10])}")
        if len(self.names) > 1:
            weight_map = {name: file for name, (_, file, _) in self._places.items()}
            total = sum(planned.nbytes for planned, _, _ in self._places.values())
            write_json(self.folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
