"""Four gloo processes: in every layout a tree computes what its sequences by themselves do (one launch)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parallel.tree_layouts import CASES, VOCABULARY, batches
from tests.tiny_models import save_tiny

SCRIPT = Path(__file__).with_name("tree_layouts.py")
ROOT = SCRIPT.parents[2]


@pytest.mark.parallel
def test_trees_equal_separate_sequences_in_every_layout(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "llama", vocab_size=VOCABULARY)
    save_tiny("qwen3_moe", tmp_path / "qwen3_moe", vocab_size=VOCABULARY, num_hidden_layers=4)
    save_tiny("nemotron_h", tmp_path / "nemotron_h", vocab_size=VOCABULARY)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command += [str(SCRIPT), str(tmp_path)]
    result = subprocess.run(command, env=environment, timeout=900, capture_output=True, text=True, check=False)
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr[-4000:]
    assert result.stdout.count("log-probs") == len(CASES) * len(batches())
