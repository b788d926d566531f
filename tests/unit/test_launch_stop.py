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
  *node_check*) exit "${CHECK:-0}" ;;
  *) echo "end=$SLURM_JOB_END_TIME"; [ -n "$WHY" ] && echo "$WHY" > "$PIVOTRL_STOP_FILE"
     [ -n "$KEPT" ] && touch "$PIVOTRL_STOP_FILE.kept"
     [ -n "$FAILED" ] && echo "$FAILED" > "$PIVOTRL_STOP_FILE.failed"; exit "$CODE" ;;
esac
"""
SCONTROL = """#!/bin/bash
if [ "$1 $2" = "show job" ]; then echo "$JOB"; elif [ "$1" = show ]; then echo node1; else echo "$@" >> "$LOG"; fi
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


def run_job(folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """launch/job.sh with one stage, where srun does what `more` says; scontrol's calls go to scontrol.log."""
    tool(folder, "srun", SRUN)
    tool(folder, "scontrol", SCONTROL)
    tool(folder, "squeue", "#!/bin/bash\necho 2030-01-01T00:00:00\n")
    run_dir = folder / "run"
    settings = f"stages=(train); python=python; run_dir={run_dir}; srun_flags=(); container=(); gpus_per_node=0"
    settings += "; check_seconds=5; max_fruitless_starts=2"
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1", "SLURM_NTASKS": "1"}
    tools = {"PATH": f"{folder}:{os.environ['PATH']}", "LOG": str(folder / "scontrol.log"), "TZ": "UTC"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    command = ["bash", "-c", f"{settings}; source {ROOT / 'launch' / 'job.sh'}"]
    environment = {**kept, **slurm, **tools, **more}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert not list(run_dir.glob(".jobs/*stopped*")), done.stderr
    return done


def requeued(folder: Path) -> int:
    """How often the job has queued itself again."""
    log = folder / "scontrol.log"
    lines = log.read_text().splitlines() if log.exists() else []
    assert set(lines) <= {"requeue 7"}
    return len(lines)


@pytest.mark.parametrize(
    ("why", "code", "wanted", "again"),
    [
        ("SIGUSR1", 143, 75, True),  # srun's code, where it ended the slower processes
        ("the deadline", 75, 75, True),
        ("SIGTERM", 75, 75, False),
        ("SIGTERM", 137, 137, False),  # a process was killed, and srun stopped the others
        ("SIGTERM failed 1", 75, 1, False),  # a process crashed, and srun stopped the others
        ("", 138, 75, True),  # SIGUSR1 came before python could listen
        ("", 1, 1, False),
        ("", 0, 0, False),
    ],
)
def test_job_queues_itself_again(tmp_path: Path, why: str, code: int, wanted: int, again: bool) -> None:
    why, _, failed = why.partition(" failed ")
    done = run_job(tmp_path, WHY=why, CODE=str(code), FAILED=failed)
    assert done.returncode == wanted, done.stderr
    assert "end=1893456000" in done.stdout
    assert requeued(tmp_path) == again
    assert (tmp_path / "run" / ".jobs" / "7.starts").exists() == (wanted == 75)


@pytest.mark.parametrize(
    ("job", "again"),
    [
        ("JobState=RUNNING PreemptTime=2026-01-01T00:00:00", True),
        ("JobState=RUNNING PreemptTime=None", False),
        ("JobState=CANCELLED PreemptTime=2026-01-01T00:00:00", False),
    ],
)
def test_a_preempted_job_queues_itself_again(tmp_path: Path, job: str, again: bool) -> None:
    assert run_job(tmp_path, WHY="SIGTERM", CODE="75", JOB=job).returncode == 75
    assert requeued(tmp_path) == again


def test_a_signal_during_the_node_check(tmp_path: Path) -> None:
    assert run_job(tmp_path, CHECK="138", CODE="0").returncode == 75
    assert requeued(tmp_path) == 1
    assert run_job(tmp_path, CHECK="143", CODE="0").returncode == 4
    assert requeued(tmp_path) == 1


def test_a_job_that_keeps_nothing_is_not_queued_for_ever(tmp_path: Path) -> None:
    """Two starts in a row may keep nothing. What was kept before, by any start, ends the row."""
    stop = {"WHY": "the deadline", "CODE": "75"}
    for restart, kept in enumerate(["", "1", "", "1", ""]):
        done = run_job(tmp_path, **stop, KEPT=kept, SLURM_RESTART_COUNT=str(restart))
        assert done.returncode == 75, done.stderr
    assert requeued(tmp_path) == 5
    done = run_job(tmp_path, **stop, SLURM_RESTART_COUNT="5")
    assert done.returncode == 3
    assert "job 7: 2 starts in a row kept nothing (no step saved, no stage done)" in done.stderr
    assert requeued(tmp_path) == 5
    assert not (tmp_path / "run" / ".jobs" / "7.starts").exists()
    assert run_job(tmp_path, **stop, SLURM_RESTART_COUNT="0").returncode == 75  # submitted again, by a person


def test_a_job_that_loses_its_nodes_is_not_queued_for_ever(tmp_path: Path) -> None:
    """SLURM queues it again by itself, and nothing of the former starts could tell how it ended."""
    run = tmp_path / "run"
    (run / ".jobs").mkdir(parents=True)
    (run / ".jobs" / "7.starts").write_text("2\n")
    (run / ".jobs" / "7.stopped.kept").touch()
    assert run_job(tmp_path, CODE="0", SLURM_RESTART_COUNT="2").returncode == 0
    (run / ".jobs" / "7.starts").write_text("2\n")
    done = run_job(tmp_path, CODE="0", SLURM_RESTART_COUNT="2")
    assert done.returncode == 3
    assert "2 starts in a row kept nothing" in done.stderr
    assert "end=" not in done.stdout


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
    process.communicate(timeout=120)
    assert process.returncode == 75
