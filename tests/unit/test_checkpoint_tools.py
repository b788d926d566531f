"""Conversion is exact in every layout, folders are whole or absent, and whatever is wrong is named."""

from __future__ import annotations

import errno
import json
import math
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_tools import convert, inspect, verify
from checkpoint_tools.convert import hf_to_megatron, megatron_to_hf
from checkpoint_tools.dist_format import DistReader
from checkpoint_tools.keys import Style
from checkpoint_tools.sides import find_dist
from pivotrl.errors import UserError
from pivotrl.models import extents, output
from pivotrl.models.folder import ModelFolder
from pivotrl.models.mapping import pack, unpack
from tests.checkpoint_makers import CONFIGS, equal, model_of, read_all, save_as_ranks, save_hf, tensors_of
from tests.true_configs import TRUE

STYLES = {f"{a}-{b}": Style(a, b) for a in ("stacked", "numbered") for b in ("te", "local")}  # type: ignore[arg-type]


@pytest.fixture
def converted(tmp_path: Path) -> tuple[Path, Path]:
    save_hf(CONFIGS["moe"], tmp_path / "hf")
    hf_to_megatron(tmp_path / "hf", tmp_path / "megatron")
    return tmp_path / "hf", tmp_path / "megatron"


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("style", STYLES)
def test_round_trip_is_bit_equal(kind: str, style: str, tmp_path: Path) -> None:
    """Field reports H1, H3."""
    wanted = save_hf(CONFIGS[kind], tmp_path / "hf", torch.bfloat16)
    names = STYLES[style]
    if ("first layer dense" in kind or "hybrid" in kind) and names.layers == "stacked":
        with pytest.raises(UserError, match="use numbered"):
            hf_to_megatron(tmp_path / "hf", tmp_path / "m", layers=names.layers, norms=names.norms)
        return
    hf_to_megatron(tmp_path / "hf", tmp_path / "m", layers=names.layers, norms=names.norms, pad_vocab_to=8)
    embedding = DistReader(tmp_path / "m" / "release").tensors["embedding.word_embeddings.weight"]
    assert embedding.size == (16, 8)
    megatron_to_hf(tmp_path / "m", tmp_path / "back", shard_bytes=600)
    assert equal(read_all(tmp_path / "back"), wanted)
    assert len(list((tmp_path / "back").glob("model-*-of-*.safetensors"))) > 3
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == {**CONFIGS[kind], "dtype": "bfloat16"}
    for file in ("chat_template.jinja", "tokenizer.json", "generation_config.json"):
        assert (tmp_path / "back" / file).read_bytes() == (tmp_path / "hf" / file).read_bytes()
    assert ("lm_head.weight" in wanted) == ("tied" not in kind)


@pytest.mark.parametrize("name", TRUE)
def test_true_shapes_are_complete(name: str, tmp_path: Path) -> None:
    config, parameters = TRUE[name]
    model = model_of(config, tmp_path)
    assert sum(math.prod(s) for e in model.table.values() for s in e.shapes) == parameters
    per_rule = {entry.rule: entry for entry in model.table.values()}
    for entry in per_rule.values():  # on meta tensors: no memory
        full = pack(entry, [torch.empty(s, device="meta") for s in entry.shapes], model.dims)
        assert full.numel() == sum(math.prod(s) for s in entry.shapes)
        assert [list(t.shape) for _, t in unpack(entry, full, model.dims)] == [list(s) for s in entry.shapes]
    assert len(per_rule) == 12
    per_layer = 2 + 4 + 2 + 1 + 3 * 128  # norms, projections, q and k norms, router, experts
    assert len(model.entry_of) == 3 + config["num_hidden_layers"] * per_layer


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_dtype_is_chosen_and_written_into_the_config(dtype: str, tmp_path: Path) -> None:
    wanted = save_hf(CONFIGS["llama"], tmp_path / "hf")
    kind = convert.DTYPES[dtype]
    assert kind is not None
    assert convert.main(["hf-to-megatron", str(tmp_path / "hf"), str(tmp_path / "m"), "--dtype", dtype]) == 0
    assert convert.main(["megatron-to-hf", str(tmp_path / "m"), str(tmp_path / "back")]) == 0
    assert equal(read_all(tmp_path / "back"), {n: t.to(kind) for n, t in wanted.items()})
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == str(kind).removeprefix("torch.")


def test_extra_state_may_be_there_or_not_and_nothing_else(converted: tuple[Path, Path]) -> None:
    """Field report H7."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    folder = converted[1] / "release"
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    tensors = metadata.state_dict_metadata
    tensors["decoder.layers.self_attention.linear_qkv._extra_state/shard_0_4"] = BytesStorageMetadata()
    tensors["decoder.layers.0.mlp.linear_fc1._extra_state"] = tensors["decoder.final_layernorm.weight"]
    place = next(p for p in metadata.storage_data if p.fqn == "decoder.final_layernorm.weight")
    twin = type(place)("decoder.layers.0.mlp.linear_fc1._extra_state", place.offset)
    metadata.storage_data[twin] = metadata.storage_data[place]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert verify.verify(*converted).same(0.0)
    del tensors["decoder.layers.3.self_attention.q_layernorm.weight"]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match=r"missing: decoder.layers.3.self_attention.q_layernorm.weight"):
        verify.verify(*converted)


def test_existing_output_stays_without_force(converted: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    hf, megatron = converted
    before = sorted(p.stat().st_mtime_ns for p in megatron.rglob("*"))
    assert convert.main(["hf-to-megatron", str(hf), str(megatron)]) == 2
    assert "--force" in capsys.readouterr().err
    assert sorted(p.stat().st_mtime_ns for p in megatron.rglob("*")) == before
    assert convert.main(["hf-to-megatron", str(hf), str(megatron), "--force"]) == 0
    assert sorted(p.name for p in megatron.parent.iterdir()) == ["hf", "megatron"]


def test_a_full_disk_is_found_before_anything_is_written(
    converted: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    with pytest.raises(UserError, match=r"0\.0 GiB free"):
        megatron_to_hf(converted[1], converted[1].with_name("back"))
    assert not list(converted[1].parent.glob("*back*"))


@pytest.mark.parametrize("way", ["hf-to-megatron", "megatron-to-hf"])
def test_a_disk_that_fills_up_meanwhile(
    way: str, converted: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls, write = [], extents.write

    def full(descriptor: int, data: memoryview, position: int) -> None:
        calls.append(1)
        if len(calls) > 40:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(descriptor, data, position)

    monkeypatch.setattr(extents, "write", full)
    source = converted[0] if way == "hf-to-megatron" else converted[1]
    assert convert.main([way, str(source), str(source.with_name("out"))]) == 2
    assert "No space left on device; nothing was left behind" in capsys.readouterr().err
    assert sorted(p.name for p in source.parent.iterdir()) == ["hf", "megatron"]


def test_the_commands_of_the_documentation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    commands = re.findall(r"^    python -m checkpoint_tools\.(\w+) (.+)$", text, re.MULTILINE)
    assert len(commands) == 5
    save_hf(CONFIGS["moe"], tmp_path / "models" / "Qwen3-30B-A3B")
    monkeypatch.chdir(tmp_path)
    for module, arguments in commands:
        assert {"convert": convert, "verify": verify, "inspect": inspect}[module].main(arguments.split()) == 0
    capsys.readouterr()


def test_fingerprint_is_of_the_values_whatever_the_format(
    converted: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

    def of(folder: Path) -> Any:
        assert inspect.main([str(folder), "--values", "--json"]) == 0
        return json.loads(capsys.readouterr().out)["fingerprint"]

    before = of(converted[0])
    assert of(converted[1]) == before
    tensors = load_file(converted[0] / "model.safetensors")
    tensors["model.norm.weight"][3] += 1
    save_file(tensors, converted[0] / "model.safetensors")
    assert of(converted[0]) != before


def test_an_error_in_between_leaves_nothing(converted: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "carry_over", lambda *args: (_ for _ in ()).throw(OSError("gone")))
    with pytest.raises(OSError, match="gone"):
        megatron_to_hf(converted[1], converted[1].with_name("back"))
    assert sorted(p.name for p in converted[1].parent.iterdir()) == ["hf", "megatron"]


@pytest.mark.parametrize("damage", ["truncated", "absent", "garbage", "no metadata", "missing", "extra", "shape"])
def test_damaged_megatron_checkpoints_are_named(damage: str, converted: tuple[Path, Path]) -> None:
    """Field report H7."""
    folder = converted[1] / "release"
    file = sorted(folder.glob("*.distcp"))[0]
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    key = "decoder.layers.2.mlp.experts.experts.linear_fc2.weight"
    wanted = {
        "truncated": f"{file.name} is truncated",
        "absent": f"{file.name} is not there",
        "garbage": f"{file.name}.* cannot be read",
        "no metadata": "no finished distributed checkpoint",
        "missing": r"missing: decoder.layers.2.mlp.experts.local_experts.0.linear_fc2.weight",
        "extra": "unknown tensor decoder.layers.9.extra.weight",
        "shape": r"linear_fc2.weight is \[5, 8, 8\], config.json says \[4, 8, 8\]",
    }[damage]
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "absent":
        file.unlink()
    elif damage == "garbage":
        file.write_bytes(b"\0" * file.stat().st_size)
    elif damage == "no metadata":
        (folder / ".metadata").unlink()
    else:
        tensors = metadata.state_dict_metadata
        if damage == "missing":
            del tensors[key]
        elif damage == "extra":
            tensors["decoder.layers.9.extra.weight"] = tensors["decoder.final_layernorm.weight"]
            for place, info in list(metadata.storage_data.items()):
                if place.fqn == "decoder.final_layernorm.weight":
                    metadata.storage_data[type(place)("decoder.layers.9.extra.weight", place.offset)] = info
        else:
            tensors[key].size = torch.Size([5, 8, 8])
            chunk = tensors[key].chunks[0]
            tensors[key].chunks.append(type(chunk)(torch.Size([4, 0, 0]), chunk.sizes))
            place = next(p for p in metadata.storage_data if p.fqn == key)
            metadata.storage_data[type(place)(key, torch.Size([4, 0, 0]))] = metadata.storage_data[place]
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match=f"(?s){wanted}"):
        megatron_to_hf(converted[1], converted[1].with_name("back"))
    assert not converted[1].with_name("back").exists()


def test_metadata_cannot_run_code(converted: tuple[Path, Path]) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (converted[0] / "touched",))

    (converted[1] / "release" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(UserError, match=r"\.metadata.*cannot be read"):
        find_and_read(converted[1])
    assert not (converted[0] / "touched").exists()


def find_and_read(path: Path) -> DistReader:
    return DistReader(find_dist(path))


def test_duplicated_expert_in_two_files_is_named(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    made = save_hf(CONFIGS["moe"], tmp_path)
    (tmp_path / "model.safetensors").unlink()
    twice = "model.layers.1.mlp.experts.2.up_proj.weight"
    save_file(made, tmp_path / "a.safetensors")
    save_file({twice: made[twice], "x": torch.ones(1)}, tmp_path / "b.safetensors")
    index = {"weight_map": {**dict.fromkeys(made, "a.safetensors"), "x": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=f"{twice} is both in a.safetensors and in b.safetensors"):
        hf_to_megatron(tmp_path, tmp_path / "m")


def test_verify_names_every_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import save_file

    made = save_hf(CONFIGS["llama"], tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    other = dict(made)
    other["model.norm.weight"] = made["model.norm.weight"] + 0.5
    other["lm_head.weight"] = made["lm_head.weight"].double()
    other["model.embed_tokens.weight"] = made["model.embed_tokens.weight"][:5].contiguous()
    other["more"] = other.pop("model.layers.0.input_layernorm.weight")
    save_file(other, tmp_path / "b" / "model.safetensors")
    assert verify.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    text = capsys.readouterr().out
    for line in (
        "only in A: model.layers.0.input_layernorm.weight",
        "only in B: more",
        "shape differs: model.embed_tokens.weight: [11, 8] and [5, 8]",
        "dtype differs: lm_head.weight: float32 and float64",
        "value differs: model.norm.weight: by 0.5",
    ):
        assert line in text
    assert verify.main([str(tmp_path / "a"), str(tmp_path / "a")]) == 0


def test_verify_megatron_of_two_layouts(tmp_path: Path) -> None:
    for name, tp, style in (("a", 1, Style("stacked", "te")), ("b", 4, Style("numbered", "local"))):
        save_as_ranks(CONFIGS["qwen3 tied"], tmp_path / "hf", tmp_path / name, tp, 1, 1, 2, style)
    result = verify.verify(tmp_path / "a", tmp_path / "b", source=tmp_path / "hf")
    assert result.same(0.0) and result.compared == len(tensors_of(model_of(CONFIGS["qwen3 tied"], tmp_path / "hf")))


def test_nan_is_a_difference() -> None:
    one, nan = torch.ones(3), torch.tensor([1.0, math.nan, 1.0])
    assert verify.max_difference(one, nan) == math.inf
    assert verify.max_difference(nan, nan.double()) == 0.0
    assert verify.max_difference(torch.tensor([math.inf]), torch.tensor([math.inf]).double()) == 0.0


def test_inspect_prints_a_tree(converted: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    for folder, kind in zip(converted, ("Hugging Face folder", "distributed checkpoint"), strict=True):
        assert inspect.main([str(folder)]) == 0
        text = capsys.readouterr().out
        assert kind in text and "layers.*" in text and "parameters" in text
    assert inspect.main([str(converted[1]), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["step"] == 0 and facts["parameters"] == sum(
        math.prod(s) for s in ModelFolder(converted[0]).shapes.values()
    )


@pytest.mark.parametrize(("text", "size"), [("4GB", 4 * 10**9), ("1.5 MB", 1_500_000), ("70", 70), ("2k", 2000)])
def test_sizes(text: str, size: int) -> None:
    assert convert.size_of(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1GB", "big", "4XB"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match="--shard-size"):
        convert.size_of(text)
