"""`pivotrl run` as a user starts it: real trajectories in, real engines, a Hugging Face checkpoint and a report out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pivotrl.io import read_json, read_jsonl
from tests.tiny_models import save_tiny

REPOSITORY = Path(__file__).resolve().parents[2]
STAGES = ["turns", "warmup", "profile", "select", "train", "sft", "evaluate", "report"]


@pytest.fixture(scope="module")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory, smollm2_tokenizer: Path) -> Path:
    """A random Qwen3-MoE with SmolLM2's tokenizer: every stage is real, only the model is small."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tiny_moe")
    save_tiny("qwen3_moe", folder, vocab_size=49152, head_dim=32, max_position_embeddings=8192, initializer_range=0.02)
    AutoTokenizer.from_pretrained(str(smollm2_tokenizer)).save_pretrained(str(folder))
    return folder


def arguments(run_dir: Path, model: Path, data: Path) -> list[str]:
    return [
        f"run_dir={run_dir}",
        "model=tiny_moe",
        f"model.path={model}",
        "model.context_length=4608",
        f"trajectories.path={data / 'tau_bench' / 'airline_sft_compact.jsonl'}",
        "domain.verifier.name=tests.parity_verifier:Parity",
        "precision=fp32",
        "tracking=disabled",
        "sampling.max_new_tokens=12",
        "profile.max_turns=8",
        "profile.rollouts_per_turn=4",
        "select.set=mixed",
        "algorithm.steps=2",
        "algorithm.pivots_per_step=2",
        "algorithm.group_size=4",
        "algorithm.kl_beta=0.01",
        "algorithm.reprofile.every_steps=1",
        "algorithm.reprofile.turns=4",
        "algorithm.optimizer.learning_rate=1e-3",
        "warmup.steps=1",
        "warmup.trajectories_per_step=1",
        "sft.steps=1",
        "sft.trajectories_per_step=1",
        "evaluate.tasks=2",
        f"evaluate.ood_path={data / 'ood' / 'hellaswag_val_200.jsonl'}",
        "evaluate.ood_rows=3",
    ]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}


def start(args: list[str], log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pivotrl.cli", "run", *args]
    with log.open("ab") as file:
        return subprocess.Popen(command, cwd=REPOSITORY, env=environment(), stdout=file, stderr=subprocess.STDOUT)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_moe: Path, shared_data: Path) -> Path:
    """A run that was killed with -9 after its profile, and started again with the same command."""
    run_dir = tmp_path_factory.mktemp("run")
    log = run_dir / "log.txt"
    args = arguments(run_dir, tiny_moe, shared_data)
    first = start(args, log)
    deadline = time.monotonic() + 300
    while not (run_dir / "profile" / "stage.json").exists() or not (run_dir / "profile" / "summary.json").exists():
        assert first.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.wait()
    rollouts = run_dir / "profile" / "rollouts.jsonl"
    before = rollouts.stat().st_mtime_ns
    again = start(args, log)
    assert again.wait(timeout=500) == 0, log.read_text()
    assert rollouts.stat().st_mtime_ns == before, "a finished profile was made again"
    return run_dir


@pytest.mark.engine
def test_every_stage_leaves_its_summary(finished: Path):
    assert [stage for stage in STAGES if not (finished / stage / "summary.json").exists()] == []
    turns = read_json(finished / "turns" / "summary.json")
    assert turns["trajectories"]["read"] == 44
    assert (finished / "report" / "report.html").stat().st_size > 10_000
    assert "http://" not in (finished / "report" / "report.html").read_text().replace("http://www.w3.org", "")


@pytest.mark.engine
def test_trainer_and_engine_agree_before_and_after_refits(finished: Path):
    rows = list(read_jsonl(finished / "train" / "metrics.jsonl"))
    assert len(rows) == 2
    assert rows[0]["gate_mismatch"] < 1e-4
    assert all(row["mismatch_abs"] < 1e-4 for row in rows)  # float32; the second row is after a refit
    assert all(row["kl"] >= 0 for row in rows)


@pytest.mark.engine
def test_only_generated_tokens_carry_loss(finished: Path):
    # kl_beta > 0: every scored rollout is trained, so target tokens are the generated tokens, neither more nor fewer
    rollouts = list(read_jsonl(finished / "train" / "rollouts.jsonl"))
    for row in read_jsonl(finished / "train" / "metrics.jsonl"):
        generated = sum(len(r["token_ids"]) for r in rollouts if r["step"] == row["step"])
        assert row["target_tokens"] == generated


@pytest.mark.engine
def test_rollouts_are_of_the_current_weights(finished: Path):
    assert all(r["weight_version"] == r["step"] for r in read_jsonl(finished / "train" / "rollouts.jsonl"))


@pytest.mark.engine
def test_what_the_verifier_counted_is_in_the_summaries(finished: Path):
    profile = read_json(finished / "profile" / "summary.json")
    assert profile["verifier"]["pairs"] >= profile["rollouts"]
    rows = list(read_jsonl(finished / "train" / "metrics.jsonl"))
    again = list(read_jsonl(finished / "train" / "reprofile" / "step-000001" / "sample" / "verifier.jsonl"))
    train = read_json(finished / "train" / "summary.json")["verifier"]
    rollouts = list(read_jsonl(finished / "train" / "rollouts.jsonl"))
    assert train["pairs"] == sum(row["verifier/pairs"] for row in rows) >= len(rollouts)
    assert sum(row["pairs"] for row in again) >= 4 * 4
    assert train["scored"] + sum(v for k, v in train.items() if k.startswith("unscorable/")) == train["pairs"]


@pytest.mark.engine
def test_turns_are_profiled_again_with_the_weights_of_that_step(finished: Path):
    folder = finished / "train" / "reprofile" / "step-000001"
    rollouts = list(read_jsonl(folder / "sample" / "rollouts.jsonl"))
    assert len(rollouts) == read_json(folder / "summary.json")["rollouts"] == 4 * 4
    assert {r["weight_version"] for r in rollouts} == {1}
    assert len(list(read_jsonl(folder / "profile" / "turns.jsonl"))) == 8
    engine = read_json(finished / "train" / "summary.json")["engine"]
    assert (engine["train"]["rollouts"], engine["reprofile"]["rollouts"]) == (2 * 2 * 4, 4 * 4)


@pytest.mark.engine
def test_the_checkpoint_is_new_and_generates(finished: Path, tiny_moe: Path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = finished / "train" / "checkpoint"
    trained = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    initial = AutoModelForCausalLM.from_pretrained(finished / "warmup" / "checkpoint", dtype=torch.float32)
    moved = [n for (n, a), b in zip(trained.named_parameters(), initial.parameters(), strict=True) if not a.equal(b)]
    assert any("experts" in name for name in moved)
    assert any("self_attn" in name for name in moved)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = trained.generate(**ids, max_new_tokens=4, do_sample=False)
    assert out.shape[1] > ids["input_ids"].shape[1]


@pytest.mark.engine
def test_evaluation_compares_the_three_policies(finished: Path):
    summary = read_json(finished / "evaluate" / "summary.json")
    assert list(summary["policies"]) == ["base", "sft", "pivotrl"]
    for policy in summary["policies"].values():
        assert 0 <= policy["greedy"]["success"] <= 1
        assert policy["ood"]["n"] == 3
    assert set(summary["differences"]) == {"sft - base", "pivotrl - base"}
