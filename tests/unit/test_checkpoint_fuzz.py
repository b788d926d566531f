"""Whatever stands in a safetensors header, an index, a config or a checkpoint's metadata: it reads, or a UserError."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint_tools import verify
from checkpoint_tools.convert import hf_to_megatron
from pivotrl.errors import UserError
from pivotrl.models.folder import INDEX, SINGLE, ModelFolder
from pivotrl.models.safetensors_header import read_header
from tests.checkpoint_makers import CONFIGS, read_all, save_hf

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
HEADER = st.dictionaries(
    st.sampled_from(["a", "b", "__metadata__", "c"]) | st.text(max_size=6),
    st.fixed_dictionaries(
        {},
        optional={
            "dtype": st.sampled_from(["F32", "BF16", "F4", "U8"]) | JSON,
            "shape": st.lists(st.integers(-2, 2**65), max_size=3) | JSON,
            "data_offsets": st.lists(st.integers(-8, 2**65), max_size=3) | JSON,
        },
    )
    | JSON,
    max_size=4,
)
FEW = settings(max_examples=60)


@pytest.fixture(scope="module")
def whole() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as root:
        save_hf(CONFIGS["moe"], Path(root) / "hf")
        hf_to_megatron(Path(root) / "hf", Path(root) / "megatron")
        yield Path(root)


def reads_or_says(read: Callable[[], Any], file: str) -> None:
    try:
        read()
    except UserError as error:
        assert file in str(error) and len(str(error)) > 30


@FEW
@given(header=HEADER, data=st.binary(max_size=16))
def test_any_header(header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + data)
        reads_or_says(lambda: read_all(Path(folder)), SINGLE)


@FEW
@given(raw=st.binary(max_size=64))
def test_any_bytes(raw: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / SINGLE).write_bytes(raw)
        reads_or_says(lambda: read_header(Path(folder) / SINGLE), SINGLE)


@FEW
@given(value=st.fixed_dictionaries({"weight_map": st.dictionaries(st.text(max_size=5), st.text(max_size=5))}) | JSON)
def test_any_index(value: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / INDEX).write_text(json.dumps(value))
        reads_or_says(lambda: read_all(Path(folder)), INDEX)


@FEW
@given(key=st.sampled_from(sorted(CONFIGS["moe"])), value=JSON)
def test_any_config_value(key: str, value: Any, whole: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(whole / "hf" / SINGLE, folder)
        (Path(folder) / "config.json").write_text(json.dumps({**CONFIGS["moe"], key: value}))
        reads_or_says(lambda: verify.verify(Path(folder), whole / "megatron"), "")


@FEW
@given(where=st.floats(0, 1), byte=st.integers(0, 255), cut=st.booleans())
@pytest.mark.parametrize(
    "file",
    [
        "hf/model.safetensors",
        "megatron/release/.metadata",
        "megatron/release/metadata.json",
        "megatron/release/__0_0.distcp",
    ],
)
def test_a_changed_byte_or_a_cut(file: str, where: float, byte: int, cut: bool, whole: Path) -> None:
    raw = bytearray((whole / file).read_bytes())
    position = int(where * min(len(raw) - 1, 60_000))
    raw = raw[:position] if cut else raw[:position] + bytes([byte]) + raw[position + 1 :]
    with tempfile.TemporaryDirectory() as root:
        changed = shutil.copytree(whole / Path(file).parts[0], Path(root) / "changed")
        (changed / Path(*Path(file).parts[1:])).write_bytes(bytes(raw))
        sides = (changed, whole / "megatron") if file.startswith("hf") else (whole / "hf", changed)
        reads_or_says(lambda: verify.verify(*sides), "changed")


def test_a_key_that_stands_twice_is_named(tmp_path: Path) -> None:
    entry = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    text = f'{{"expert.0":{entry},"expert.0":{entry}}}'.encode()
    (tmp_path / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + b"\0")
    with pytest.raises(UserError, match=r"expert\.0.*twice"):
        read_header(tmp_path / SINGLE)


def test_own_reader_agrees_with_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    made = {
        str(dtype): torch.arange(6).reshape(2, 3).to(dtype)
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64)
    }
    made |= {"empty": torch.empty(0, 4), "scalar": torch.tensor(3.0), "bool": torch.tensor([True, False])}
    save_file(made, tmp_path / SINGLE)
    read = read_all(tmp_path)
    assert set(read) == set(made)
    assert all(torch.equal(read[n].float(), made[n].float()) and read[n].dtype == made[n].dtype for n in made)
    assert ModelFolder(tmp_path).shapes["scalar"] == ()
