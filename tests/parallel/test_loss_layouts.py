"""Every aggregation with every advantage rule, and every loss: DP 2 and TP 2 in small micro-batches equal one rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_models import save_tiny

SCRIPT = Path(__file__).with_name("loss_layouts.py")
ROOT = SCRIPT.parents[2]


@pytest.mark.parallel
def test_losses_do_not_depend_on_the_layout(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "llama", vocab_size=121)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for world in ("1", "2"):
        start = [sys.executable, *(launcher if world == "2" else []), str(SCRIPT)]
        command = [*start, str(tmp_path / "llama"), str(tmp_path / "one"), world]
        result = subprocess.run(command, env=environment, timeout=600, capture_output=True, text=True, check=False)
        print(result.stdout)
        assert result.returncode == 0, result.stdout + result.stderr[-4000:]
