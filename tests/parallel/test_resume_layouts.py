"""Checkpoints know no parallel layout: what was saved in one goes on in another, by more or fewer processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_models import save_tiny

SCRIPT = Path(__file__).with_name("resume_layouts.py")
ROOT = SCRIPT.parents[2]


@pytest.mark.parallel
def test_checkpoints_go_on_in_another_layout(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "llama", vocab_size=121)  # odd: padded for two ranks
    save_tiny("qwen3_moe", tmp_path / "qwen3_moe", num_hidden_layers=4)
    save_tiny("nemotron_h", tmp_path / "nemotron_h")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    for part, launch in (("first", ()), ("two", torchrun), ("last", ())):
        command = [sys.executable, *launch, str(SCRIPT), part, str(tmp_path)]
        done = subprocess.run(command, env=environment, timeout=600, capture_output=True, text=True, check=False)
        print(done.stdout)
        assert done.returncode == 0, done.stdout + done.stderr[-4000:]
