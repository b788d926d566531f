"""A hybrid of Mamba, attention and MLP layers goes the whole way: profile and GRPO with the real engines, on CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from pivotrl.io import read_json, read_jsonl
from tests.integration.test_run import arguments, start
from tests.tiny_models import save_served


@pytest.mark.engine
def test_trainer_and_engine_are_one_function_of_the_hybrid(
    tmp_path: Path, smollm2_tokenizer: Path, shared_data: Path
) -> None:
    from transformers import AutoTokenizer

    model = save_served("nemotron_h", tmp_path / "model", 0, vocab_size=49152, max_position_embeddings=8192)
    AutoTokenizer.from_pretrained(str(smollm2_tokenizer)).save_pretrained(str(model))
    run, log = tmp_path / "run", tmp_path / "log.txt"
    stages = "run.stages=[turns,warmup,profile,select,train]"
    args = arguments(run, model, shared_data)
    args = [a for a in args if not a.startswith(("evaluate", "sft", "algorithm.reprofile"))]
    assert start([*args, stages, "profile.max_turns=4"], log).wait(timeout=600) == 0, log.read_text()
    rows = list(read_jsonl(run / "train" / "metrics.jsonl"))
    assert len(rows) == 2
    assert rows[0]["gate_mismatch"] < 1e-4
    assert all(row["mismatch_abs"] < 1e-4 and row["kl"] >= 0 for row in rows)  # float32; the second: after a refit
    assert rows[0]["tokens_unique"] < rows[0]["tokens_total"]
    assert read_json(run / "profile" / "summary.json")["rollouts"] == 16
