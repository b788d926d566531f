"""What no CPU shows: transports between GPUs, memory that moves, sleep that frees. Skipped without CUDA."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("refit_transports.py")


@pytest.mark.parametrize("kind", ["ipc", "nccl"])
def test_buckets_between_gpus(kind: str) -> None:
    if kind == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a GPU for each rank")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT), kind]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *launch], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_offload_gives_gpu_memory_back_and_leaks_none() -> None:
    from pivotrl.policy.offload import Stash

    tensors = [torch.randn(2**22, device="cuda") for _ in range(8)]  # 128 MiB
    want = [t.clone() for t in tensors]
    stash = Stash()
    levels = []
    for _ in range(50):
        before = torch.cuda.memory_allocated()
        stash.release(tensors)
        assert torch.cuda.memory_allocated() <= before - 8 * 2**24
        stash.restore()
        levels.append(torch.cuda.memory_allocated())
    assert len(set(levels)) == 1
    assert all(torch.equal(t, w) for t, w in zip(tensors, want, strict=True))


def test_sleep_refit_wake_frees_and_serves_the_new_weights(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from safetensors.torch import load_file

    from pivotrl.config import Generation
    from pivotrl.generation.engine import Sampling
    from pivotrl.generation.vllm_engine import VllmEngine
    from tests.tiny_models import save_served

    folders = [save_served("llama", tmp_path / str(seed), seed) for seed in (0, 1)]
    weights = [load_file(f / "model.safetensors") for f in folders]
    sampling, prompt = Sampling(temperature=0.0, max_new_tokens=8), [[5, 6, 7]]
    fresh = []
    for folder in folders:
        engine = VllmEngine(folder, Generation(gpu_memory_utilization=0.2), "fp32", 128, 0, [])
        fresh.append(engine.generate(prompt, sampling, 1, [0])[0][0].token_ids)
        if folder is not folders[-1]:
            engine.close()
    assert fresh[0] != fresh[1]
    for version, which in enumerate((0, 1) * 5):
        used = torch.cuda.mem_get_info()[0]
        engine.sleep()
        assert torch.cuda.mem_get_info()[0] > used
        engine.wake_weights()
        engine.refit(((n, t.cuda()) for n, t in weights[which].items()), version)
        engine.wake()
        assert engine.generate(prompt, sampling, 1, [0])[0][0].token_ids == fresh[which]
    engine.close()
