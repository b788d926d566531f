"""Ends a run that makes no progress: the stacks of all ranks go to `<run_dir>/stacks/`, and the exit code is 3.

A rank that hangs in a collective hangs the others, too; the first that notices tells the rest by a file, so that
each writes its stacks before the launcher ends them all.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EXIT_STALLED = 3
_FAREWELL_SECONDS = 3.0  # for the other ranks to see the alarm and write theirs
_last = 0.0
_started = False


def beat() -> None:
    """Something was done: a step, a chunk of rollouts, a policy measured."""
    global _last
    _last = time.monotonic()


def launch_name(environ: os._Environ[str] | dict[str, str]) -> str:
    """The same on all ranks of a launch, and another one in every launch."""
    if "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" in environ:
        words = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        return "-".join(environ.get(w, "0") for w in words)
    if "TORCHELASTIC_RUN_ID" in environ:
        return f"{environ['TORCHELASTIC_RUN_ID']}-{environ.get('MASTER_PORT', '0')}"
    return f"pid-{os.getpid()}"


@contextmanager
def watchdog(limit_seconds: float | None, what: str, run_dir: Path) -> Iterator[None]:
    """Watch this process while the block runs; None watches nothing."""
    global _started
    if limit_seconds is None or _started:
        yield
        return
    beat()
    _started = True
    done = threading.Event()
    folder = run_dir / "stacks"
    rank = int(os.environ.get("RANK", "0"))
    alarm = folder / f"{launch_name(os.environ)}.alarm"
    watcher = threading.Thread(
        target=_watch, args=(limit_seconds, what, folder, alarm, rank, done), name="watchdog", daemon=True
    )
    watcher.start()
    try:
        yield
    finally:
        _started = False
        done.set()


def _watch(limit: float, what: str, folder: Path, alarm: Path, rank: int, done: threading.Event) -> None:
    pause = min(max(limit / 10, 0.05), 5.0)
    # Python's own threads stand still where native code keeps the interpreter's lock; this one is the system's.
    # It needs a real file: sys.stderr is none in a notebook.
    faulthandler.dump_traceback_later(limit + 60, exit=True, file=2)
    armed = _last
    try:
        while not done.wait(pause):
            if _last != armed:
                faulthandler.dump_traceback_later(limit + 60, exit=True, file=2)
                armed = _last
            if time.monotonic() - _last > limit or alarm.exists():
                _give_up(limit, what, folder, alarm, rank, pause)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _give_up(limit: float, what: str, folder: Path, alarm: Path, rank: int, pause: float) -> None:
    path = folder / f"{alarm.stem}.rank-{rank}.txt"
    told = str(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        alarm.touch()
        with path.open("w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file, all_threads=True)
    except OSError as error:  # a file system that hangs or is full may be the cause
        told = f"this log ({error})"
        faulthandler.dump_traceback(2, all_threads=True)
    print(
        f"pivotrl {what}: no progress for {limit / 60:.3g} min (checkpoint.watchdog_minutes), process {rank}; "
        f"stacks of all its threads: {told}. The same command continues from the last checkpoint",
        file=sys.stderr,
        flush=True,
    )
    time.sleep(_FAREWELL_SECONDS + 2 * pause)
    os._exit(EXIT_STALLED)
