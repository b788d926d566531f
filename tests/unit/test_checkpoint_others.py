"""NeMo 2.0 folders, other formats of Megatron, and architectures that Megatron-Bridge must convert."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from checkpoint_tools import convert, inspect, verify
from checkpoint_tools.convert import megatron_to_hf
from checkpoint_tools.dist_format import DistReader
from checkpoint_tools.keys import Style
from checkpoint_tools.sides import find_dist
from pivotrl.errors import UserError
from tests.checkpoint_makers import CONFIGS, equal, read_all, save_as_ranks, save_hf


def test_nemo_folder_is_read_without_nemo(tmp_path: Path) -> None:
    save_hf(CONFIGS["moe"], tmp_path / "hf")
    style = Style("stacked", "te")
    save_as_ranks(CONFIGS["moe"], tmp_path / "hf", tmp_path / "nemo" / "weights", 2, 2, 1, 1, style, prefix="module.")
    (tmp_path / "nemo" / "context").mkdir()
    assert verify.verify(tmp_path / "hf", tmp_path / "nemo").same(0.0)
    facts = inspect.describe(tmp_path / "nemo")
    assert facts["kind"].startswith("NeMo 2.0") and facts["step"] == 120
    with pytest.raises(UserError, match="give --source"):
        megatron_to_hf(tmp_path / "nemo", tmp_path / "back")
    (tmp_path / "old.nemo").write_bytes(b"")
    with pytest.raises(UserError, match=r"nemo-toolkit\[nlp\]>=2.0,<3"):
        find_dist(tmp_path / "old.nemo")


def test_nemo_folder_is_written_with_the_context_of_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = save_hf(CONFIGS["moe"], tmp_path / "hf")
    command = ["hf-to-megatron", str(tmp_path / "hf"), str(tmp_path / "nemo"), "--nemo-context", str(tmp_path / "old")]
    assert convert.main(command) == 2
    assert "nemo-toolkit[nlp]>=2.0,<3" in capsys.readouterr().err
    (tmp_path / "old" / "context").mkdir(parents=True)
    (tmp_path / "old" / "context" / "io.json").write_text("{}")
    assert convert.main(command) == 0
    reader = DistReader(tmp_path / "nemo" / "weights")
    assert all(k.startswith("module.") for k in reader.tensors)
    assert (tmp_path / "nemo" / "context" / "io.json").read_text() == "{}"
    assert inspect.describe(tmp_path / "nemo")["kind"].startswith("NeMo 2.0")
    megatron_to_hf(tmp_path / "nemo", tmp_path / "back")
    assert equal(read_all(tmp_path / "back"), wanted)


def test_other_backends_are_named(tmp_path: Path) -> None:
    (tmp_path / "iter_0000007" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(UserError, match="--ckpt-format torch_dist"):
        find_dist(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("8")
    with pytest.raises(UserError, match="iter_0000008 is not there"):
        find_dist(tmp_path)
    (tmp_path / "zarr").mkdir()
    (tmp_path / "zarr" / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(UserError, match="'zarr'"):
        DistReader(tmp_path / "zarr")


def test_other_architectures_go_to_megatron_bridge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["DeepseekV3ForCausalLM"]}')
    assert convert.main(["hf-to-megatron", str(tmp_path), str(tmp_path / "m")]) == 2
    error = capsys.readouterr().err
    assert "DeepseekV3ForCausalLM" in error and "install megatron-bridge" in error
    command = ["megatron-to-hf", str(tmp_path / "m"), str(tmp_path / "hf"), "--source", str(tmp_path)]
    assert convert.main(command) == 2
    assert "install megatron-bridge" in capsys.readouterr().err


def test_megatron_bridge_is_asked_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both directions, with a double of it: whole folders or none, and an existing one stays."""
    import types

    calls = []

    class AutoBridge:
        @classmethod
        def from_hf_pretrained(cls, path: str) -> AutoBridge:
            calls.append(("from", path))
            return cls()

        @classmethod
        def import_ckpt(cls, source: str, target: str) -> None:
            calls.append(("import", source))
            (Path(target) / "iter_0000000").mkdir()

        def export_ckpt(self, source: str, target: str) -> None:
            calls.append(("export", source))
            raise RuntimeError("no GPU")

    module = types.ModuleType("megatron.bridge")
    module.AutoBridge = AutoBridge  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.bridge", module)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text('{"architectures": ["DeepseekV3ForCausalLM"]}')
    hf, megatron = str(tmp_path / "hf"), str(tmp_path / "m")
    assert convert.main(["hf-to-megatron", hf, megatron]) == 0
    assert (tmp_path / "m" / "iter_0000000").is_dir()
    assert convert.main(["hf-to-megatron", hf, megatron]) == 2
    with pytest.raises(RuntimeError, match="no GPU"):
        convert.main(["megatron-to-hf", megatron, str(tmp_path / "back"), "--source", hf])
    assert calls == [("import", hf), ("from", hf), ("export", megatron)]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "m"]
