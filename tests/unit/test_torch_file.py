"""The bytes around a tensor are those of torch.save as far as torch.load sees, and are found again in files of both."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from checkpoint_tools.torch_file import Found, around, locate
from pivotrl.errors import UserError
from pivotrl.models import extents
from pivotrl.models.extents import Extent, cut, joined

DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float64, torch.float8_e4m3fn, torch.int64, torch.bool)


def made(dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 100).to(dtype).reshape(tuple(shape))


def find(path: Path, start: int, length: int) -> Found | None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return locate(descriptor, start, length)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5), (7,), (), (0, 4), (1, 1, 6), (200, 33)])
def test_torch_reads_what_is_written_and_both_are_located(
    dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path
) -> None:
    tensor = made(dtype, shape)
    before, after = around(dtype, shape)
    assert len(before) % 64 == 0
    ours = before + bytes(extents.bytes_of(tensor)) + after
    read = torch.load(io.BytesIO(ours), weights_only=True)
    assert read.dtype == dtype and read.shape == tensor.shape and torch.equal(read.float(), tensor.float())
    theirs = io.BytesIO()
    torch.save(tensor, theirs)
    for number, data in enumerate((ours, theirs.getvalue())):
        file = tmp_path / str(number)
        file.write_bytes(b"x" * 77 + data + b"y" * 33)
        found = find(file, 77, len(data))
        if tensor.numel() == 0:
            continue
        assert found is not None and found.dtype == dtype and found.shape == shape
        raw = file.read_bytes()[found.position : found.position + tensor.nbytes]
        assert raw == bytes(extents.bytes_of(tensor))


def test_more_than_four_gigabytes(tmp_path: Path) -> None:
    """A sparse file: 64-bit sizes and positions."""
    shape = (5 * 2**20, 1024)
    before, after = around(torch.uint8, shape)
    with (tmp_path / "big").open("wb") as file:
        file.write(before)
        file.seek(len(before) + shape[0] * shape[1])
        file.write(after)
    found = find(tmp_path / "big", 0, (tmp_path / "big").stat().st_size)
    assert found == Found(torch.uint8, shape, len(before))
    assert tuple(torch.load(tmp_path / "big", mmap=True, weights_only=True).shape) == shape


def test_views_and_strangers_are_left_to_torch(tmp_path: Path) -> None:
    file = tmp_path / "f"
    for strange in (torch.arange(12.0).reshape(3, 4).t(), {"a": torch.ones(2)}, torch.nn.Parameter(torch.ones(2)), 5):
        torch.save(strange, file)
        found = find(file, 0, file.stat().st_size)
        assert found is None
    view = torch.arange(12.0)[4:8]
    torch.save(view, file)
    assert find(file, 0, file.stat().st_size) is None
    torch.save(torch.ones(3), file, _use_new_zipfile_serialization=False)
    assert find(file, 0, file.stat().st_size) is None


@settings(max_examples=150)
@given(where=st.floats(0, 1), byte=st.integers(0, 255), cut_off=st.booleans())
def test_damage_is_never_a_crash(
    where: float, byte: int, cut_off: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tensor = made(torch.float32, (3, 5))
    before, after = around(torch.float32, (3, 5))
    data = bytearray(before + bytes(extents.bytes_of(tensor)) + after)
    position = int(where * (len(data) - 1))
    data = data[:position] if cut_off else data[:position] + bytes([byte]) + data[position + 1 :]
    file = tmp_path_factory.getbasetemp() / "damaged"
    file.write_bytes(bytes(data))
    found = find(file, 0, len(data))
    assert found is None or found.position + torch.Size(found.shape).numel() * found.dtype.itemsize <= len(data)


@given(lengths=st.lists(st.integers(0, 9), max_size=6), start=st.integers(0, 30), length=st.integers(0, 30))
def test_cutting_and_joining_keep_the_bytes(lengths: list[int], start: int, length: int) -> None:
    parts = [Extent(Path("a" if i % 3 else "b"), 10 * i, n) for i, n in enumerate(lengths)]

    def flat(found: list[Extent]) -> list[tuple[str, int]]:
        return [(str(e.path), e.start + i) for e in found for i in range(e.length)]

    assert flat(cut(parts, start, length)) == flat(parts)[start : start + length]
    assert flat(joined(parts)) == flat(parts)
    assert joined([Extent(Path("a"), 0, 3), Extent(Path("a"), 3, 4)]) == [Extent(Path("a"), 0, 7)]


def test_copies_of_more_than_a_buffer_and_what_cannot_be_read(tmp_path: Path) -> None:
    data = os.urandom(3 * extents.BUFFER + 17)
    (tmp_path / "in").write_bytes(data)
    whole = Extent(tmp_path / "in", 5, len(data) - 5)
    target = os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT)
    extents.copy([whole, whole.part(0, 3)], target, 2, "w")
    assert (tmp_path / "out").read_bytes() == b"\0\0" + data[5:] + data[5:8]
    assert bytes(extents.bytes_of(extents.read([whole], "w"))) == data[5:]
    for bad, message in (
        (Extent(tmp_path / "in", 9, len(data)), "truncated within tensor w"),
        (Extent(tmp_path / "no", 0, 1), "cannot be read"),
    ):
        with pytest.raises(UserError, match=message):
            extents.copy([bad], target, 0, "w")
        with pytest.raises(UserError, match=message):
            extents.read([bad], "w")
    os.close(target)
