"""Models of 30, 120 and 235 billion parameters, built rank by rank on up to 1,024 ranks that exist on paper only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.true_configs import NEMOTRON_3_SUPER, QWEN3_30B_A3B, QWEN3_235B_A22B

SCRIPT = Path(__file__).with_name("paper_world.py")


def hugging_face_count(config: dict[str, Any]) -> int:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {k: v for k, v in config.items() if k != "architectures"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parallel
def test_every_shard_is_built_once_and_sums_to_hugging_face() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[2])}
    clock = time.monotonic()
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    print(f"{time.monotonic() - clock:.1f} s in all", done.stdout)
    found = json.loads(done.stdout)
    for name, config, published in (
        ("30B on 256", QWEN3_30B_A3B, 30_532_122_624),
        ("235B on 1024", QWEN3_235B_A22B, 235_093_634_560),
        ("120B hybrid on 512", NEMOTRON_3_SUPER, 120_668_687_360),
    ):
        assert hugging_face_count(config) == published
        assert found[name]["parameters"] == found[name]["counted"] == published
