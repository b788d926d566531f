"""launch/local.sh under the real torchrun: what it is told reaches every process, and the same command goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.slurm.slow_stage import STEPS

ROOT = Path(__file__).parents[2]


def steps(run: Path) -> list[list[int]]:
    logs = [run / f"steps-{rank}" for rank in range(2)]
    return [[int(line) for line in log.read_text().split()] if log.exists() else [] for log in logs]


@pytest.mark.parallel
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM], ids=lambda n: n.name)
def test_a_signal_stops_all_processes_and_the_same_command_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    run, python = tmp_path / "run", tmp_path / "python"
    run.mkdir()
    for rank in range(2):
        (run / f"wait-{rank}").touch()
    # a stage that only counts, in the place of launch.step
    python.write_text(f'#!/bin/bash\nexec {sys.executable} "${{@/#launch.step/tests.slurm.slow_stage}}"\n')
    python.chmod(0o755)
    command = [str(ROOT / "launch" / "local.sh"), "2", "train", f"run_dir={run}"]
    environment = {**os.environ, "PIVOTRL_PYTHON": str(python)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 120
    while steps(run) != [list(range(5))] * 2:
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.1)
    process.send_signal(number)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 75, said
    assert steps(run) == [list(range(6))] * 2
    assert subprocess.run(command, env=environment, timeout=240, check=False).returncode == 0
    assert steps(run) == [list(range(STEPS))] * 2
