"""No progress: every process of a launch writes its stacks and ends with 3. Signals reach what holds them back."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pivotrl import watchdog

ROOT = Path(__file__).parents[2]

HANG = """
import sys, time
from pathlib import Path
from pivotrl.watchdog import beat, watchdog

def stuck_here():
    while True:
        time.sleep(0.05)
        if sys.argv[2] == "working":
            beat()

with watchdog(0.6, "train", Path(sys.argv[1])):
    stuck_here()
"""

STOP = """
import os, sys, time
from pivotrl.stopping import Stopped, held, released, requested, heeding

try:
    with heeding(), held():
        print("held", flush=True)
        while requested() is None:
            time.sleep(0.02)
        print("told", requested(), flush=True)
        if sys.argv[1] == "stay":
            time.sleep(60)
        with released():
            print("not reached", flush=True)
except Stopped as stopped:
    print("stopped", stopped.why, flush=True)
"""


def start(code: str, *arguments: str, **more: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **more}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_all_ranks_leave_their_stacks_when_one_hangs(tmp_path: Path) -> None:
    launch = {"TORCHELASTIC_RUN_ID": "one", "MASTER_PORT": "7"}
    modes = ("hanging", "working")  # the second beats: the first takes it along, for the launch is lost
    ranks = [start(HANG, str(tmp_path), mode, RANK=str(rank), **launch) for rank, mode in enumerate(modes)]
    for rank, process in enumerate(ranks):
        _, text = process.communicate(timeout=120)
        assert process.returncode == 3, text
        stacks = tmp_path / "stacks" / f"one-7.rank-{rank}.txt"
        assert "stuck_here" in stacks.read_text()
        assert f"process {rank}; stacks of all its threads: {stacks}" in text


def test_a_hanging_process_without_stderr_ends_too(tmp_path: Path) -> None:
    command = ["bash", "-c", 'exec "$0" "$@" 2>&-', sys.executable, "-c", HANG, str(tmp_path), "hanging"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60, check=False)
    assert done.returncode == 3
    assert "stuck_here" in next((tmp_path / "stacks").glob("*.txt")).read_text()


@pytest.mark.parametrize("stderr", [None, io.StringIO(), "pytest's"])
def test_watching_needs_no_stderr_of_python(stderr: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook's has no file descriptor, a daemon has none at all: the thread that watches must not die of it."""
    if stderr != "pytest's":
        monkeypatch.setattr(sys, "stderr", stderr)
    died: list[object] = []
    monkeypatch.setattr(threading, "excepthook", died.append)

    class Rounds:
        """An event that is set in the third look, with progress before each."""

        count = 0

        def wait(self, seconds: float) -> bool:
            watchdog.beat()
            self.count += 1
            return self.count > 2

    watching = (60.0, "train", tmp_path, tmp_path / "alarm", 0, Rounds())
    thread = threading.Thread(target=watchdog._watch, args=watching)
    thread.start()
    thread.join(120)
    with watchdog.watchdog(60.0, "train", tmp_path):
        (alive,) = (t for t in threading.enumerate() if t.name == "watchdog")
    alive.join(120)
    assert not (thread.is_alive() or alive.is_alive())
    assert died == []


def test_a_held_signal_is_told_and_raises_when_released() -> None:
    process = start(STOP, "go")
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    process.send_signal(signal.SIGUSR1)
    out, _ = process.communicate(timeout=120)
    assert out == "told SIGUSR1\nstopped SIGUSR1\n"
    assert process.returncode == 0


def test_what_srun_sends_when_another_process_has_stopped_is_no_second_signal(tmp_path: Path) -> None:
    note = tmp_path / "stopped"
    process = start(STOP, "stay", PIVOTRL_STOP_FILE=str(note))
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    process.send_signal(signal.SIGUSR1)
    assert process.stdout.readline() == "told SIGUSR1\n"
    time.sleep(2.1)
    note.write_text("SIGUSR1\n")  # the other's
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM


LOADING = """
import os, signal
from pivotrl import stopping
stopping.leave_on_warning()
stopping.kept()
os.kill(os.getpid(), signal.SIGUSR1)
"""


def test_a_signal_while_a_program_is_loaded_is_a_stop(tmp_path: Path) -> None:
    process = start(LOADING, PIVOTRL_STOP_FILE=str(tmp_path / "stopped"))
    assert process.wait(timeout=120) == 75
    assert (tmp_path / "stopped").read_text() == "SIGUSR1\n"
    assert (tmp_path / "stopped.kept").exists()


def test_one_signal_sent_twice_is_one_and_a_later_one_ends_at_once() -> None:
    process = start(STOP, "stay")
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "told SIGTERM\n"
    process.send_signal(signal.SIGTERM)  # the group's, and the parent's
    time.sleep(2.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, text = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    assert "a second signal (SIGTERM): ending at once" in text
