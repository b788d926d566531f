"""A profile by the real engine, killed with -9 in the middle: continued, it is the uninterrupted one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pivotrl.io import read_json, read_jsonl
from pivotrl.profiling.ledger import Cost, CostLog
from pivotrl.rollouts import Rollout, read_rollouts
from tests.tiny_models import save_tiny

REPOSITORY = Path(__file__).resolve().parents[2]
TURNS, K = 10, 4


def start(command: str, run_dir: Path, model: Path) -> subprocess.Popen[bytes]:
    arguments = [
        *(f"run_dir={run_dir}", "domain=outfitters", f"model.path={model}", "model.context_length=2048"),
        *("trajectories.tasks=6", "trajectories.warmup_fraction=0", "sampling.max_new_tokens=24", "precision=fp32"),
        *(f"profile.rollouts_per_turn={K}", f"profile.max_turns={TURNS}", "tracking=disabled"),
        *("generation.max_sequences=1", "generation.kv_cache_gib=0.25"),  # four rollouts in flight: one turn
    ]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    with (run_dir / "log.txt").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "pivotrl.cli", command, *arguments],
            cwd=REPOSITORY,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def finish(command: str, run_dir: Path, model: Path) -> None:
    assert start(command, run_dir, model).wait(timeout=300) == 0, (run_dir / "log.txt").read_text()


def turns_on_disk(run_dir: Path) -> int:
    path = run_dir / "profile" / "rollouts.jsonl"
    return path.read_bytes().count(b"\n") // K if path.exists() else 0


def plain(rollout: Rollout) -> tuple[object, ...]:
    """What was sampled; how much of a prompt was cached depends on what went before."""
    return rollout.turn_id, rollout.index, rollout.completion.token_ids, rollout.completion.finish_reason


@pytest.mark.engine
def test_resumed_equals_uninterrupted(tmp_path: Path, smollm2_tokenizer: Path) -> None:
    from transformers import AutoTokenizer

    model, whole, killed = tmp_path / "model", tmp_path / "whole", tmp_path / "killed"
    save_tiny("llama", model, vocab_size=49152, head_dim=32, max_position_embeddings=2048, initializer_range=0.02)
    AutoTokenizer.from_pretrained(str(smollm2_tokenizer)).save_pretrained(str(model))
    whole.mkdir()
    finish("turns", whole, model)
    shutil.copytree(whole, killed)
    process = start("profile", killed, model)
    deadline = time.monotonic() + 240
    while turns_on_disk(killed) < 2:
        assert process.poll() is None, (killed / "log.txt").read_text()
        assert time.monotonic() < deadline, (killed / "log.txt").read_text()
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    folder = killed / "profile"
    done, left = turns_on_disk(killed), (folder / "rollouts.jsonl").read_bytes()
    told = sum(CostLog(folder / "cost.jsonl").totals().values(), Cost()).rollouts
    assert 2 <= done < TURNS and not (folder / "summary.json").exists()
    # The row of the ledger follows the rollouts, one submission (here one turn) at a time: one may be missing, no more.
    assert told in (K * done, K * (done - 1))
    finish("profile", killed, model)
    finish("profile", whole, model)
    # Nothing that was on disk is lost or done again, but for a turn whose rollouts were not all there.
    whole_turns = b"".join(left.splitlines(keepends=True)[: K * done])
    assert (folder / "rollouts.jsonl").read_bytes().startswith(whole_turns)
    summary = read_json(folder / "summary.json")
    assert summary["rollouts"] == K * TURNS
    assert summary["engine"]["profile"]["rollouts"] == told + K * (TURNS - done)
    one, other = (list(read_rollouts(d / "profile" / "rollouts.jsonl")) for d in (whole, killed))
    assert list(map(plain, one)) == list(map(plain, other))
    for a, b in zip(one, other, strict=True):
        # Sums of a prompt whose beginning was cached come in another order.
        assert a.completion.logprobs == pytest.approx(b.completion.logprobs, abs=1e-4)
    assert list(read_jsonl(whole / "profile" / "turns.jsonl")) == list(read_jsonl(folder / "turns.jsonl"))
