"""What the scripts make of a launch that was told to stop: their code, and whether the job queues itself again."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRUN = """#!/bin/bash
case "$*" in
  *node_check*) exit 0 ;;
  *) echo "end=$SLURM_JOB_END_TIME"; [ -n "$WHY" ] && echo "$WHY" > "$PIVOTRL_STOP_FILE"
     [ -n "$FAILED" ] && echo "$FAILED" > "$PIVOTRL_STOP_FILE.failed"; exit "$CODE" ;;
esac
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo node1; else echo "$@" >> "$LOG"; fi
"""
TORCHRUN = """#!/bin/bash
trap 'echo SIGUSR1 > "$PIVOTRL_STOP_FILE"; exit 1' USR1
trap 'echo SIGTERM > "$PIVOTRL_STOP_FILE"; exit 1' TERM
echo "$@"
for _ in $(seq 200); do sleep 0.1; done
"""


def tool(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("why", "code", "wanted", "requeued"),
    [
        ("SIGUSR1", 143, 75, True),  # srun's code, where it ended the slower processes
        ("the deadline", 75, 75, True),
        ("SIGTERM", 75, 75, False),
        ("SIGTERM", 137, 137, False),  # a process was killed, and srun stopped the others
        ("SIGTERM failed 1", 75, 1, False),  # a process crashed, and srun stopped the others
        ("", 1, 1, False),
        ("", 0, 0, False),
    ],
)
def test_job_queues_itself_again(tmp_path: Path, why: str, code: int, wanted: int, requeued: bool) -> None:
    log = tmp_path / "scontrol.log"
    tool(tmp_path, "srun", SRUN)
    tool(tmp_path, "scontrol", SCONTROL)
    tool(tmp_path, "squeue", "#!/bin/bash\necho 2030-01-01T00:00:00\n")
    settings = f"stages=(train); python=python; run_dir={tmp_path}; srun_flags=(); container=(); gpus_per_node=0"
    command = ["bash", "-c", f"{settings}; check_seconds=5; source {ROOT / 'launch' / 'job.sh'}"]
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1", "SLURM_NTASKS": "1"}
    more = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "WHY": why.split(" failed ")[0],
        "CODE": str(code),
        "LOG": str(log),
        "TZ": "UTC",
    }
    more["FAILED"] = why.partition(" failed ")[2]
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    done = subprocess.run(command, env={**kept, **slurm, **more}, capture_output=True, text=True, check=False)
    assert done.returncode == wanted, done.stderr
    assert "end=1893456000" in done.stdout
    assert log.exists() == requeued
    if requeued:
        assert log.read_text() == "requeue 7\n"
    assert not list(tmp_path.glob(".stopped-*"))


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_local_launch_passes_signals_on_and_tells_that_it_was_stopped(tmp_path: Path, number: signal.Signals) -> None:
    tool(tmp_path, "python", TORCHRUN)
    process = subprocess.Popen(
        [str(ROOT / "launch" / "local.sh"), "2", "train", "seed=1"],
        env={**os.environ, "PIVOTRL_PYTHON": str(tmp_path / "python")},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert "--nproc-per-node=2" in line
    assert "-m launch.step train seed=1" in line
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == 75
