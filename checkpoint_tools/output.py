"""Output folders that appear whole or not at all, and tensors written as a sharded Hugging Face folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pivotrl.errors import UserError
from pivotrl.io import write_json
from pivotrl.locks import hold
from pivotrl.models.folder import INDEX, SINGLE, WEIGHT_FILES
from pivotrl.models.safetensors_header import NAMES

MARGIN = 64 * 2**20  # bytes beside the tensors: headers, metadata, tokenizer


@contextmanager
def new_folder(target: Path, need_bytes: int, force: bool) -> Iterator[Path]:
    """A folder beside `target` to write into; takes its name when the block ends without an exception.

    A process killed in between leaves `<target>.partial`, which the next run removes. Raises UserError where the
    target exists and `force` is off, or where the disk lacks `need_bytes`.
    """
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


def carry_over(source: Path, target: Path, dtype: torch.dtype | None) -> None:
    """Copy everything of a Hugging Face folder but its weights; config.json keeps every key, its dtype is set.

    Args: `dtype` None leaves the config as it is.
    """
    weights = {f for pattern in WEIGHT_FILES for f in source.glob(pattern)}
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.iterdir()):
        if file.is_file() and file not in weights:
            shutil.copy2(file, target / file.name)
    if dtype is None:
        return
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    present = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]  # newer and older name
    write_json(target / "config.json", config | dict.fromkeys(present, str(dtype).removeprefix("torch.")))


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


def write_safetensors(
    folder: Path, files: Sequence[Sequence[Planned]], read: Callable[[str], Tensor], workers: int
) -> None:
    """Write planned files and their index, one tensor at a time in each of `workers` threads."""
    many = len(files) > 1
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" if many else SINGLE for i in range(len(files))]
    with ThreadPoolExecutor(workers) as pool:
        jobs = [pool.submit(_write_file, folder / name, file, read) for name, file in zip(names, files, strict=True)]
        try:
            for job in jobs:
                job.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    if many:
        weight_map: Mapping[str, str] = {t.name: name for name, file in zip(names, files, strict=True) for t in file}
        total = sum(t.nbytes for file in files for t in file)
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_file(path: Path, tensors: Sequence[Planned], read: Callable[[str], Tensor]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        offsets = [position, position + tensor.nbytes]
        header[tensor.name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        position += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            value = read(tensor.name).contiguous()
            if value.dtype != tensor.dtype or tuple(value.shape) != tensor.shape:
                raise UserError(f"{tensor.name}: read as {value.dtype} {list(value.shape)}, planned as {tensor}")
            file.write(value.reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
