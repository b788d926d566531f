"""Exported folders load elsewhere with equal logits, and a killed conversion leaves nothing that looks whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_tools import verify
from checkpoint_tools.convert import hf_to_megatron, megatron_to_hf
from checkpoint_tools.sides import find_dist, is_hf
from pivotrl.errors import UserError
from pivotrl.models.folder import ModelFolder
from tests.checkpoint_makers import CONFIGS, HYBRID, MTP, equal, read_all, save_hf
from tests.tiny_models import NAMES

ROOT = Path(__file__).parents[2]
# the process ends by SIGKILL at the n-th call of a function: while tensors, metadata, config are written, at renaming
KILL = """
import os, signal, sys
from pathlib import Path
from checkpoint_tools import convert, dist_writer
from pivotrl.models import output
where, count, arguments = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
owner = {"add_bytes": dist_writer.DistWriter, "finish": dist_writer.DistWriter, "carry_over": convert,
         "put_bytes": output.SafetensorsWriter, "rename": Path}[where]
original, calls = getattr(owner, where), []
def killed(*args, **kwargs):
    calls.append(1)
    if len(calls) == count:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args, **kwargs)
setattr(owner, where, killed)
sys.exit(convert.main(arguments))
"""


@pytest.mark.parametrize("name", NAMES)
def test_exported_folder_gives_equal_logits_in_transformers(
    name: str, tiny_folders: dict[str, tuple[Path, Any]], tmp_path: Path
) -> None:
    """Field report H1."""
    from transformers import AutoModelForCausalLM

    folder, model = tiny_folders[name]
    hf_to_megatron(folder, tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", shard_bytes=100_000)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    ids = (torch.arange(20)[None] * 11) % 128
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_fp8_folder_loads_in_transformers(tiny_folders: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    """transformers undoes the blocks where it has no kernel for them: its logits are those of the weights read here."""
    from transformers import AutoModelForCausalLM

    folder, model = tiny_folders["qwen3_moe"]
    hf_to_megatron(folder, tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "fp8", dtype=torch.float8_e4m3fn)
    hf_to_megatron(tmp_path / "fp8", tmp_path / "again")
    megatron_to_hf(tmp_path / "again", tmp_path / "plain")
    ids = (torch.arange(20)[None] * 11) % 128
    logits = []
    for name in ("fp8", "plain"):
        loaded = AutoModelForCausalLM.from_pretrained(
            tmp_path / name, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        with torch.no_grad():
            logits.append(loaded(ids).logits)
    torch.testing.assert_close(logits[0], logits[1], atol=1e-5, rtol=0)
    with torch.no_grad():
        far = (logits[0] - model(ids).logits).abs().max().item()
    assert 1e-4 < far < 0.5


def test_hybrid_that_transformers_saved_comes_back(tmp_path: Path) -> None:
    """Nemotron-H as transformers names it in files, through Megatron's names and back: equal bits, equal logits."""
    from transformers import AutoModelForCausalLM, NemotronHConfig, NemotronHForCausalLM

    sizes = {key: CONFIGS["hybrid moe"][key] for key in HYBRID if key not in ("architectures", *MTP)}
    torch.manual_seed(0)
    config = NemotronHConfig(
        vocab_size=128,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        num_experts_per_tok=2,
        **sizes,
    )
    model = NemotronHForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "hf")
    hf_to_megatron(tmp_path / "hf", tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    assert equal(read_all(tmp_path / "back"), read_all(tmp_path / "hf"))
    ids = (torch.arange(12)[None] * 11) % 128
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_logits_of_a_prompt(
    tiny_folders: dict[str, tuple[Path, Any]],
    smollm2_tokenizer: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from tests.tiny_models import save_tiny

    for seed in (0, 1):
        save_tiny("llama", tmp_path / f"hf{seed}", vocab_size=49152, hidden_size=16, seed=seed)
        for file in smollm2_tokenizer.glob("*token*"):
            (tmp_path / f"hf{seed}" / file.name).write_bytes(file.read_bytes())
    hf_to_megatron(tmp_path / "hf0", tmp_path / "megatron")
    arguments = [str(tmp_path / "hf0"), str(tmp_path / "megatron"), "--prompt", "Where is my order?"]
    assert verify.main(arguments) == 0
    assert "logits: greatest difference 0" in capsys.readouterr().out
    result = verify.verify(tmp_path / "hf0", tmp_path / "hf1", prompt="Where is my order?")
    assert result.logits is not None and result.logits > 0.01 and not result.same(0.0)
    folder, _ = tiny_folders["qwen3"]
    with pytest.raises(UserError, match="tokenizer"):
        verify.verify(folder, folder, prompt="a")


@pytest.mark.parametrize("where", ["add_bytes-30", "finish-1", "rename-1"])
def test_killed_import_leaves_nothing_that_loads(where: str, tmp_path: Path) -> None:
    save_hf(CONFIGS["moe"], tmp_path / "hf")
    arguments = ["hf-to-megatron", str(tmp_path / "hf"), str(tmp_path / "out")]
    _killed(where, arguments)
    with pytest.raises(UserError):
        find_dist(tmp_path / "out")
    hf_to_megatron(tmp_path / "hf", tmp_path / "out")
    assert verify.verify(tmp_path / "hf", tmp_path / "out").same(0.0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "out"]


@pytest.mark.parametrize("where", ["put_bytes-30", "carry_over-1"])
def test_killed_export_leaves_nothing_that_loads(where: str, tmp_path: Path) -> None:
    save_hf(CONFIGS["moe"], tmp_path / "hf")
    hf_to_megatron(tmp_path / "hf", tmp_path / "megatron")
    arguments = ["megatron-to-hf", str(tmp_path / "megatron"), str(tmp_path / "out"), "--shard-size", "2KB"]
    _killed(where, arguments)
    assert not is_hf(tmp_path / "out")
    with pytest.raises(UserError):
        _ = ModelFolder(tmp_path / "out.partial").config
    megatron_to_hf(tmp_path / "megatron", tmp_path / "out")
    assert verify.verify(tmp_path / "hf", tmp_path / "out").same(0.0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "megatron", "out"]


def test_killed_replacement_keeps_the_old_one(tmp_path: Path) -> None:
    """Killed just before the new folder takes the name: the old one is whole, under its name or as .old."""
    save_hf(CONFIGS["llama"], tmp_path / "hf")
    hf_to_megatron(tmp_path / "hf", tmp_path / "out")
    _killed("rename-2", ["hf-to-megatron", str(tmp_path / "hf"), str(tmp_path / "out"), "--force"])
    assert not (tmp_path / "out").exists()
    assert verify.verify(tmp_path / "hf", tmp_path / "out.old").same(0.0)
    hf_to_megatron(tmp_path / "hf", tmp_path / "out")
    assert verify.verify(tmp_path / "hf", tmp_path / "out").same(0.0)


def test_time_and_memory_of_a_conversion(tmp_path: Path) -> None:
    """A small size of benchmarks/convert.py: bytes are copied, neither time nor memory follows the tensors' sizes."""
    from benchmarks.convert import convert_once, copy, synthetic

    size = synthetic(tmp_path / "hf", 200) / 1e6
    copied = min(copy(tmp_path / "hf", tmp_path / f"copy{i}")["cpu"] for i in range(2))
    for way, source, target in (("hf-to-megatron", "hf", "megatron"), ("megatron-to-hf", "megatron", "back")):
        row = convert_once(way, tmp_path / source, tmp_path / target)
        assert row["peak_mb"] - row["imports_mb"] < 0.2 * size, row
        # processor time, since others write to the same disk: bookkeeping for 300 tensors, and twice the copying
        assert row["cpu"] < 2.0 + 3 * copied, (row, copied)
    assert equal(read_all(tmp_path / "back"), read_all(tmp_path / "hf"))


def _killed(where: str, arguments: list[str]) -> None:
    function, _, count = where.partition("-")
    command = [sys.executable, "-c", KILL, function, count, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=environment, timeout=120, capture_output=True, text=True, check=False)
    assert result.returncode == -signal.SIGKILL, result.stderr
