"""`pivotrl run`: every stage in its own process, so that the memory of engine and trainer is given back between them.

It may be killed at any instant, and stops well on SIGTERM and SIGUSR1 (`pivotrl.stopping`). What a stage finished is
kept (`pivotrl.stage_state`), what is stale is set aside and made again, and the stage that was interrupted continues
from what it had committed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pivotrl import stage_state
from pivotrl.config import Config
from pivotrl.configuration import save_resolved, validate
from pivotrl.io import write_json
from pivotrl.locks import hold
from pivotrl.stages import STAGES
from pivotrl.stopping import EXIT_STOPPED, Stopped, child_environment, heeding
from pivotrl.tracking.progress import duration
from pivotrl.watchdog import EXIT_STALLED

COMMAND: tuple[str, ...] = (sys.executable, "-m", "pivotrl.cli")
_PR_SET_PDEATHSIG = 1
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def run(cfg: Config, overrides: Sequence[str]) -> int:
    """Run `cfg.run.stages`; `COMMAND` + stage + overrides starts one of them. Returns the exit code."""
    validate(cfg, "run")
    run_dir = Path(cfg.run_dir)
    environment = child_environment(os.environ)
    with heeding(), hold(run_dir / ".locks" / "run"):
        save_resolved(cfg, run_dir)
        ledger = _Ledger(run_dir / "pipeline.json")
        started = time.monotonic()
        for number, stage in enumerate(cfg.run.stages, 1):
            title = f"[{number}/{len(cfg.run.stages)}] {stage}"
            if not _must_run(cfg, run_dir, stage, title):
                continue
            begun = time.monotonic()
            code, peak_gib = _child([*COMMAND, stage, *overrides], environment, cfg.checkpoint.grace_seconds)
            seconds = time.monotonic() - begun
            ledger.add(stage, seconds, peak_gib, code)
            if code:
                then = "Mend what it says above" if code == 2 else "The same command continues from here"
                _say(f"{title}: {_ending(code)} after {duration(seconds)}. {then}.")
                return code if code > 0 else 128 - code
            total = duration(time.monotonic() - started)
            _say(f"{title}: {duration(seconds)}, peak memory {peak_gib:.1f} GiB; total {total}")
        _finish(run_dir, time.monotonic() - started)
    return 0


def _must_run(cfg: Config, run_dir: Path, stage: str, title: str) -> bool:
    """Decide, and say why; a stale folder is set aside."""
    place = STAGES[stage].folder
    directory = run_dir / place
    why = stage_state.why_stale(cfg, directory, stage_state.record_of(cfg, stage, run_dir))
    if why:
        aside = stage_state.set_aside(run_dir, place)
        shown = "; ".join(why[:6]) + (f"; and {len(why) - 6} more" if len(why) > 6 else "")
        _say(f"{title}: runs again, because {shown}. Its old folder is now {aside}")
        return True
    if stage_state.is_done(directory):
        _say(f"{title}: done before, skipped")
        return False
    resumed = stage_state.read_record(directory) is not None
    _say(f"{title}: " + ("continues what was interrupted" if resumed else "starts"))
    return True


def _before_stage() -> None:
    """In the child: ask Linux for SIGTERM when the pipeline ends, even by `kill -9`; hear SIGINT, which a shell makes
    its background jobs ignore, for it is passed on."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _child(command: list[str], environment: Mapping[str, str], grace_seconds: float) -> tuple[int, float]:
    """Run `command` to its end; returns its exit code (negative: signal) and its peak resident memory in GiB."""
    sys.stdout.flush()
    process = subprocess.Popen(command, start_new_session=True, preexec_fn=_before_stage, env=dict(environment))
    with _signals_end(process, grace_seconds):
        # wait4 rather than Popen.wait: it tells the memory of this very child and of those it waited for.
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # workers that a crashed engine left behind
    return process.returncode, usage.ru_maxrss / 2**20


@contextlib.contextmanager
def _signals_end(process: subprocess.Popen[bytes], grace_seconds: float) -> Iterator[None]:
    """Pass a signal on to the stage, wait for it to save, and end as interrupted (SIGINT) or stopped (others)."""

    def forward(number: int, frame: Any) -> None:
        raise _Signal(number)

    previous = {n: signal.signal(n, forward) for n in _FORWARDED}
    try:
        yield
    except _Signal as stop:
        _say(f"stopping (signal {stop.number}); a second one stops at once")
        with contextlib.suppress(ProcessLookupError, _Signal):
            os.kill(process.pid, stop.number)  # not the group: workers that it needs for saving live on
            _wait_briefly(process, grace_seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.poll()
        if stop.number == signal.SIGINT:
            raise KeyboardInterrupt from None
        if code not in (EXIT_STOPPED, 0):
            _say(f"the stage did not save (it {_ending(code if code is not None else -signal.SIGKILL)})")
        raise Stopped(signal.Signals(stop.number).name) from None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class _Signal(Exception):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _wait_briefly(process: subprocess.Popen[bytes], grace_seconds: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace_seconds)


def _ending(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed (signal 9; by the system if memory ran out)"
    if code < 0:
        return f"was ended by signal {-code}"
    if code == EXIT_STALLED:
        return f"made no progress (exit code {code})"
    words = {130: "was interrupted", EXIT_STOPPED: "saved and stopped"}
    return words.get(code, f"failed (exit code {code})")


class _Ledger:
    """Seconds and memory of each stage, over all its attempts: pipeline.json, for the cost table of the report."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.stages: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["stages"]
        except (OSError, ValueError, KeyError):
            self.stages = {}

    def add(self, stage: str, seconds: float, peak_gib: float, code: int) -> None:
        row = self.stages.setdefault(stage, {"seconds": 0.0, "peak_rss_gib": 0.0, "attempts": 0})
        row["seconds"] = round(row["seconds"] + seconds, 3)
        row["peak_rss_gib"] = round(max(row["peak_rss_gib"], peak_gib), 3)
        row["attempts"] += 1
        row["exit_code"] = code
        write_json(self.path, {"stages": self.stages})


def _finish(run_dir: Path, seconds: float) -> None:
    from pivotrl.tracking.results import text_table

    evaluation = run_dir / "evaluate" / stage_state.SUMMARY
    if evaluation.is_file():
        print("\n" + text_table(json.loads(evaluation.read_text(encoding="utf-8"))))
    report = run_dir / "report" / "report.html"
    print(f"\nDone in {duration(seconds)}. " + (f"Report: {report}" if report.is_file() else f"Results: {run_dir}"))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
