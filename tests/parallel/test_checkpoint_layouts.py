"""megatron-core loads converted checkpoints in every layout of one and two processes; what it saves converts back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from checkpoint_tools.convert import hf_to_megatron, megatron_to_hf
from checkpoint_tools.verify import verify
from pivotrl.models.folder import ModelFolder
from tests.tiny_models import save_tiny
from tests.true_configs import TRUE

SCRIPT = Path(__file__).with_name("checkpoint_layouts.py")
ROOT = SCRIPT.parents[2]


@pytest.mark.parallel
def test_megatron_core_loads_and_saves_what_the_tools_convert(tmp_path: Path) -> None:
    """Field reports H1, H2, H3, H7."""
    save_tiny("llama", tmp_path / "llama", vocab_size=121)  # odd: padded over two ranks
    save_tiny("qwen3", tmp_path / "qwen3")
    save_tiny("qwen3_moe", tmp_path / "qwen3_moe", num_hidden_layers=4)
    for name in ("llama", "qwen3", "qwen3_moe"):
        hf_to_megatron(tmp_path / name, tmp_path / f"{name}.local", norms="local")
    for name, (config, _) in TRUE.items():
        short = {**config, "num_hidden_layers": 2} if config["num_hidden_layers"] > 48 else config
        (tmp_path / f"shapes-{name}").mkdir()
        (tmp_path / f"shapes-{name}" / "config.json").write_text(json.dumps(short))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for world, command in ((1, [sys.executable]), (2, torchrun)):
        result = subprocess.run(
            [*command, str(SCRIPT), str(tmp_path), str(world)],
            env=environment,
            timeout=600,
            capture_output=True,
            text=True,
            check=False,
        )
        print(result.stdout)
        assert result.returncode == 0, result.stdout + result.stderr[-4000:]
    saved = sorted((tmp_path / "saved").iterdir())
    assert len(saved) == 20
    for folder in saved:
        source = tmp_path / folder.name.partition("-")[0]
        back = tmp_path / "back" / folder.name
        megatron_to_hf(folder, back, config_from=source)
        assert verify(source, back).same(0.0), folder.name
        a, b = ModelFolder(source), ModelFolder(back)
        assert set(a.shapes) == set(b.shapes) and all(torch.equal(a.tensor(n), b.tensor(n)) for n in a.shapes)
    assert verify(saved[0], saved[1], source=tmp_path / saved[0].name.partition("-")[0]).same(0.0)
