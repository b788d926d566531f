"""Two gloo processes, real megatron-core and real vLLM: refits are exact in every pair of layouts (one launch)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_models import save_served

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("refit_layouts.py")


@pytest.mark.parallel
@pytest.mark.engine
def test_refits_of_two_processes_equal_fresh_engines(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    for seed in (0, 1):
        save_served("llama", tmp_path / f"llama{seed}", seed)
        save_served("qwen3_moe", tmp_path / f"moe{seed}", seed)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT), str(tmp_path)]
    result = subprocess.run(
        [sys.executable, *launch], env=environment, timeout=900, capture_output=True, text=True, check=False
    )
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr[-4000:]
