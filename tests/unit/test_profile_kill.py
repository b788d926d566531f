"""`pivotrl profile` under repeated kill -9 at random instants: the files are those of an uninterrupted run."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
from fake_profile import make, turns, use

from pivotrl.config import Adaptive, Config
from pivotrl.profiling.stage import run_profile

FORK = multiprocessing.get_context("fork")  # no import at each start, so that kills fall into the work
TURNS = turns(50, seed=5)
OPTIONS = {
    "fixed": {"second_rollouts": 2},
    "adaptive": {"adaptive": Adaptive(enabled=True, round=2, calibration_turns=20, error=0.1)},
}


def written(run_dir: Path) -> int:
    """Bytes of rollouts on disk."""
    return sum(f.stat().st_size for n in ("rollouts", "second") if (f := run_dir / "profile" / f"{n}.jsonl").exists())


def child(cfg: Config, run_dir: Path) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    run_profile(cfg, run_dir)


@pytest.mark.parametrize("kind", OPTIONS)
def test_any_number_of_kills_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    use(monkeypatch, tmp_path, seconds_per_call=0.004)
    run_profile(make(tmp_path / "whole", TURNS, **OPTIONS[kind]), tmp_path / "whole")
    total = written(tmp_path / "whole")
    cfg, draw = make(tmp_path / "killed", TURNS, **OPTIONS[kind]), random.Random(kind)
    kills, sizes = 0, set()
    while True:
        process = FORK.Process(target=child, args=(cfg, tmp_path / "killed"))
        process.start()
        # Most kills come once more rollouts were written, so that they fall into the work however fast the machine is.
        target = written(tmp_path / "killed") + (draw.randrange(total // 100) if kills % 4 else 0)
        while process.is_alive() and written(tmp_path / "killed") < target:
            time.sleep(0.001)
        process.join(draw.uniform(0.0, 0.008))
        if process.exitcode is None:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        kills += 1
        sizes.add(written(tmp_path / "killed"))
    assert kills >= 24
    assert len(sizes) >= 10, "the kills did not fall into the rollouts"
    for name in ("rollouts", "turns", *(["second", "second_turns"] if kind == "fixed" else [])):
        files = [tmp_path / run / "profile" / f"{name}.jsonl" for run in ("whole", "killed")]
        one, other = ([_sampled(line) for line in f.read_bytes().splitlines()] for f in files)
        assert one == other, name


def _sampled(line: bytes) -> bytes:
    # A scripted engine's prefix cache is new in every process, as a real one's is; what it samples is not.
    return line.split(b'"cached_prompt_tokens"')[0]
