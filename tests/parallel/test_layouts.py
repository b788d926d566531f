"""Two gloo processes give what one gives, in every layout that two can have (one launch: starting costs most)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_models import save_tiny

SCRIPT = Path(__file__).with_name("layouts.py")
ROOT = SCRIPT.parents[2]


@pytest.mark.parallel
def test_layouts_of_two_processes_equal_one(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "llama", vocab_size=121)  # odd: does not divide over two ranks
    save_tiny("qwen3_moe", tmp_path / "qwen3_moe", num_hidden_layers=4)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    alone = [sys.executable, str(SCRIPT), str(tmp_path), "1"]
    subprocess.run(alone, check=True, env=environment, timeout=300)
    both = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(SCRIPT),
        str(tmp_path),
        "2",
    ]
    result = subprocess.run(both, env=environment, timeout=600, capture_output=True, text=True, check=False)
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr[-4000:]
