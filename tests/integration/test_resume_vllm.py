"""The real engine and the real trainer: a run that is killed goes on with the same samples, log-probs and weights."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")
sys.path.insert(0, str(Path(__file__).parent))
from resume_runs import assert_same, rows, serve

from pivotrl.io import read_jsonl

STEPS = 4
LENGTH = (f"algorithm.steps={STEPS}", f"checkpoint.keep_every={STEPS}")


@pytest.mark.engine
@pytest.mark.slow
def test_killed_and_resumed_equals_straight(tmp_path: Path, smollm2_tokenizer: Path) -> None:
    """kill -9 in a step and inside a save: ids and log-probs of all samples, metrics, weights, moments are equal."""
    with serve(tmp_path, smollm2_tokenizer, "vllm", head_dim=32) as server:
        straight, parts = server.new("straight"), server.new("parts")
        assert server.run(straight, *LENGTH) == 0, server.said()
        sampled = list(read_jsonl(straight / "train" / "rollouts.jsonl"))
        assert len({tuple(row["token_ids"]) for row in sampled}) > len(sampled) / 2
        assert any(row["cached_prompt_tokens"] for row in sampled)
        assert len({row["reward"] for row in rows(straight)}) > 1
        each = (*LENGTH, "checkpoint.every_steps=1")
        assert server.run(parts, *each, at={"event": "train", "number": 2, "do": "KILL"}) == -9, server.said()
        assert server.run(parts, *each, at={"event": "piece", "number": 9, "do": "KILL"}) == -9, server.said()
        assert f"continues after step 1 of {STEPS}" in server.said()
        assert server.run(parts, *LENGTH) == 0, server.said()
        assert "half-written" in server.said()
        assert f"continues after step 1 of {STEPS}" in server.said()
        assert_same(parts, straight, steps=STEPS)
