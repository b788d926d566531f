"""Stopping well: SIGTERM, SIGUSR1, or a deadline. No torch.

The first signal stops at the next point where everything is saved: at once, except within `held()` (training), whose
owner looks at `requested()`. A second signal, more than two seconds after the first, ends the process at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from pivotrl.config import Checkpoint

EXIT_STOPPED = 75  # sysexits' EX_TEMPFAIL: try again. The same command continues
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
STOP_FILE = "PIVOTRL_STOP_FILE"  # names a file that says that this launch was stopped, where a launcher hides codes
_STARTED = "PIVOTRL_JOB_START"  # of `pivotrl run`, for its stages
_DEBOUNCE_SECONDS = 2.0  # launchers may send one signal twice: to the group, and by the parent
_LEAD_SHARE = 0.1  # of a job's length: a job of ten minutes does not stop five minutes before its end


class Stopped(BaseException):
    """Told to stop. Not an Exception: nothing on the way may take it for a failure of its own."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


_why: str | None = None
_first: float | None = None  # when the first signal came that was not our own deadline's
_by_deadline = False
_holds = 0
_kept = False
_peer_ended = False
_deadline: float | None = None  # of time.monotonic: the wall clock is read once, so that its jumps do no harm


def requested() -> str | None:
    """Why this process should stop, or None."""
    return _why


def seconds_left() -> float:
    """Until the deadline; infinite without one."""
    return float("inf") if _deadline is None else _deadline - time.monotonic()


@contextmanager
def held() -> Iterator[None]:
    """Within it, a first signal only makes itself known by `requested()`."""
    global _holds
    _holds += 1
    try:
        yield
    finally:
        _holds -= 1


@contextmanager
def released() -> Iterator[None]:
    """Within it, inside `held()`, a signal raises `Stopped` again, also one that has come before."""
    global _holds
    before, _holds = _holds, 0
    try:
        if _why is not None:
            raise Stopped(_why)
        yield
    finally:
        _holds = before


def job_start(environ: Mapping[str, str], now: float) -> float:
    """Seconds since the epoch: SLURM's start of the job, that of `pivotrl run`, or now."""
    for name in ("SLURM_JOB_START_TIME", _STARTED):
        try:
            return float(environ[name])
        except (KeyError, ValueError):
            continue
    return now


def seconds_until_deadline(settings: Checkpoint, environ: Mapping[str, str], now: float) -> float | None:
    """From `now` (seconds since the epoch) until the run must stop, or None: the earlier of what is configured."""
    ends = []
    if settings.stop_after_minutes is not None:
        ends.append(job_start(environ, now) + 60 * settings.stop_after_minutes)
    if settings.stop_before_end_minutes is not None and environ.get("SLURM_JOB_END_TIME", "").isdigit():
        end = float(environ["SLURM_JOB_END_TIME"])
        length = max(end - job_start(environ, now), 0.0)
        ends.append(end - min(60 * settings.stop_before_end_minutes, _LEAD_SHARE * length))
    return min(ends) - now if ends else None


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """For stages that `pivotrl run` starts: they count from its start."""
    return {**environ, _STARTED: environ.get(_STARTED, str(time.time()))}


@contextmanager
def heeding() -> Iterator[None]:
    """Turn signals into `Stopped` within the block. Outside the main thread (of a test) this does nothing."""
    global _why, _first, _holds, _by_deadline, _peer_ended
    _why, _first, _holds, _by_deadline, _peer_ended = None, None, 0, False, False
    main = threading.current_thread() is threading.main_thread()
    previous = {n: signal.signal(n, _on_signal) for n in SIGNALS} if main else {}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def watching(settings: Checkpoint) -> Iterator[None]:
    """Heed signals and the deadline while a stage runs."""
    global _deadline
    seconds, _deadline, timer = seconds_until_deadline(settings, os.environ, time.time()), None, None
    with heeding():
        if seconds is not None:
            _deadline = time.monotonic() + seconds
            timer = threading.Timer(max(seconds, 0.0), _on_deadline)
            timer.daemon = True
            timer.start()
        try:
            yield
        finally:
            _deadline = None
            if timer is not None:
                timer.cancel()


def _on_deadline() -> None:
    global _by_deadline
    _by_deadline = True
    os.kill(os.getpid(), SIGNALS[-1])


def _on_signal(number: int, frame: Any) -> None:
    global _why, _first, _by_deadline
    name, now = signal.Signals(number).name, time.monotonic()
    if _by_deadline:  # the launcher's own signal, which may come a little later, is then the first
        _by_deadline, name = False, "the deadline"
    elif _first is None:
        _first = now
    elif now - _first > _DEBOUNCE_SECONDS and not _of_a_launcher(number):
        os.write(2, f"pivotrl: a second signal ({name}): ending at once\n".encode())
        os._exit(128 + number)
    if _why is None:
        _why = name
        if not _holds:
            raise Stopped(name)


def _of_a_launcher(number: int) -> bool:
    """Whether srun or torchrun sends it, once, because another process has stopped already: ours is still saving."""
    global _peer_ended
    try:  # the note is there, and no empty file that the launcher made
        noted = os.path.getsize(os.environ[STOP_FILE]) > 0
    except (KeyError, OSError):
        noted = False
    if number != signal.SIGTERM or _peer_ended or not noted:
        return False
    _peer_ended = True
    return True


def leave_on_warning() -> None:
    """Until `heeding`, while a program of a launch is loaded: SIGUSR1 ends it at once, as stopped.

    SIGTERM ends it, too, without a note: srun sends it to the others when one process has failed.
    """

    def leave(number: int, frame: Any) -> None:
        leave_note(signal.Signals(number).name)
        os._exit(EXIT_STOPPED)

    signal.signal(signal.SIGUSR1, leave)


def leave_failure(code: int) -> None:
    """Tell the launcher with which code the first process failed, before it stops the others, which then say 75."""
    path = os.environ.get(STOP_FILE)
    if path:
        with suppress(FileExistsError), open(path + ".failed", "x", encoding="utf-8") as file:
            file.write(f"{code}\n")


def leave_note(why: str) -> None:
    """Tell the launcher, in the file that it named, that this launch was stopped (and why) and not broken."""
    path = os.environ.get(STOP_FILE)
    if path:
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"{why}\n")


def kept() -> None:
    """Tell the launcher that something new outlives this process: a saved step, rollouts of a profile, a whole stage.

    A job whose starts keep nothing, time after time, is not queued again.
    """
    global _kept
    path = os.environ.get(STOP_FILE)
    if path and not _kept:
        _kept = True
        with suppress(OSError):  # a full disk, say; then nothing is known to be kept
            open(path + ".kept", "w", encoding="utf-8").close()
