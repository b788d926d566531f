"""Runs that are interrupted and compared with ones that are not: a server of processes, and what must be equal."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from checkpoint_tools.dist_format import DistReader
from pivotrl.io import read_jsonl, write_json, write_jsonl
from tests.tiny_models import save_tiny

ROOT = Path(__file__).resolve().parents[2]
STEPS = 6
# What the fake's completions are scored with is of no model; the real engine must agree with the trainer.
ENGINES = {"fake": "generation.max_mismatch=1e9", "vllm": "generation.kv_cache_gib=0.25"}
# Episodes of `pivotrl e2e`.
EPISODES = (
    "environment.name=tests.parity_world:ParityWorld",
    "environment.max_turns=3",
    f"end_to_end.steps={STEPS}",
    "end_to_end.tasks_per_step=2",
    "end_to_end.group_size=4",
    "watch.every=2",
    "watch.tasks=2",
    "watch.split=test",
)


class Server:
    """Runs commands in processes of their own, in which `engine` ("fake" or "vllm") samples."""

    def __init__(self, folder: Path, engine: str) -> None:
        self.base, self.model, self.folder, self.engine = folder / "base", folder / "model", folder, engine
        self.log = folder / "log.txt"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment = {k: v for k, v in environment.items() if not k.startswith("SLURM_")}
        script = str(Path(__file__).with_name("resume_server.py"))
        command = [sys.executable, script, engine, str(self.model), *common(self.base, self.model)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def run(self, run_dir: Path, *overrides: str, stage: str = "train", **request: Any) -> int:
        """The exit code of one command; what it printed is `said()`."""
        self.log.unlink(missing_ok=True)
        arguments = [stage, *common(run_dir, self.model), ENGINES[self.engine], *overrides]
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"arguments": arguments, "log": str(self.log), **request}) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def said(self) -> str:
        return self.log.read_text()

    def new(self, name: str) -> Path:
        """A run directory that has everything before `train`."""
        run_dir = self.folder / name
        shutil.copytree(self.base, run_dir)
        return run_dir


def common(run_dir: Path, model: Path) -> list[str]:
    return [
        f"run_dir={run_dir}",
        "model=tiny_moe",
        f"model.path={model}",
        "domain=outfitters",
        "environment.families=[cancel_order]",
        "trajectories.tasks=8",
        "domain.verifier.name=tests.parity_verifier:Parity",
        "precision=fp32",
        "tracking=disabled",
        "sampling.max_new_tokens=8",
        f"algorithm.steps={STEPS}",
        "algorithm.pivots_per_step=2",
        "algorithm.group_size=4",
        "algorithm.kl_beta=0.01",
        "algorithm.allow_foreign_profile=true",
        "algorithm.optimizer.learning_rate=1e-3",
        "profile.rollouts_per_turn=2",
        "profile.max_turns=6",
        f"sft.steps={STEPS}",
        "sft.trajectories_per_step=2",
        "evaluate.tasks=2",
        "checkpoint.keep_every=6",  # the state after the last step stays, to be compared
    ]


@contextmanager
def serve(folder: Path, tokenizer: Path, engine: str, **sizes: int) -> Iterator[Server]:
    """A server whose base has turns, and all of them as pivots, for a random mixture of experts of such sizes."""
    save_tiny("qwen3_moe", folder / "model", vocab_size=49152, max_position_embeddings=4096, **sizes)
    for file in tokenizer.iterdir():
        shutil.copy(file, folder / "model")
    made = Server(folder, engine)
    assert made.run(made.base, stage="turns") == 0, made.said()
    turns = [row for row in read_jsonl(made.base / "turns" / "turns.jsonl") if row["split"] == "train"]
    write_jsonl(made.base / "select" / "pivots.jsonl", [{"turn_id": row["id"]} for row in turns])  # of those drawn
    write_json(made.base / "profile" / "summary.json", {"fingerprint": {}})
    yield made
    assert made.process.stdin is not None
    made.process.stdin.close()
    made.process.wait(timeout=120)


def rows(run_dir: Path, stage: str = "train") -> list[dict[str, Any]]:
    """Metrics without what time and memory it took, and without what this process's cache of verdicts saved."""
    of_the_machine = ("seconds", "memory_", "tokens_per_second", "train_tokens_per_second", "verifier/")
    return [
        {k: v for k, v in row.items() if not k.startswith(of_the_machine)}
        for row in read_jsonl(run_dir / stage / "metrics.jsonl")
    ]


def without_times(value: Any) -> Any:
    """Of nested mappings: what took how long, and the size of the file that tells it, differ between equal runs."""
    of_time = ("seconds", "seconds_watch", "curve.jsonl")
    return {k: without_times(v) for k, v in value.items() if k not in of_time} if isinstance(value, dict) else value


def assert_same(run_dir: Path, wanted: Path, stage: str = "train", steps: int = STEPS) -> None:
    """Bit for bit: exported weights, optimizer, generators, sampled ids, logged steps."""
    one, two = run_dir / stage, wanted / stage
    if stage == "train":
        for name in ("rollouts.jsonl", "groups.jsonl"):
            assert (one / name).read_bytes() == (two / name).read_bytes(), name
    assert rows(run_dir, stage) == rows(wanted, stage)
    weights = [folder / "checkpoint" / "model.safetensors" for folder in (one, two)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    name = f"state/step-{steps:08d}"
    a, b = DistReader(one / name), DistReader(two / name)
    assert set(a.tensors) == set(b.tensors)
    assert any(key.startswith("optimizer.state.exp_avg_sq.") for key in a.tensors)
    assert all(torch.equal(a.read(key), b.read(key)) for key in a.tensors)
    assert (one / name / "rank-00000.json").read_bytes() == (two / name / "rank-00000.json").read_bytes()
    saved = [json.loads((folder / name / "state.json").read_text()) for folder in (one, two)]
    for key in ("step", "policy_step", "adam_steps", "extra", "logs", "identity", "engine_seed"):
        assert without_times(saved[0][key]) == without_times(saved[1][key]), key
    assert saved[0]["adam_steps"] == steps
