"""`pivotrl launch JOB --follow`: the states and logs of submitted jobs until they have ended, and how each one did."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

POLL_SECONDS = 2.0
_TOOL_SECONDS = 30
_MISSES = 5  # polls in a row that find a job nowhere, before it counts as lost
_ALIVE = (
    "PENDING",
    "CONFIGURING",
    "RUNNING",
    "COMPLETING",
    "SUSPENDED",
    "RESIZING",
    "SIGNALING",
    "STAGE_OUT",
    "STOPPED",
)
_REQUEUED = ("REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")
_MEANINGS = {
    1: "crashed: see <run_dir>/crash*.log",
    2: "bad configuration or input, full disk, or no access: the log says which",
    3: "no progress: the log says of what, or stacks are in <run_dir>/stacks/",
    4: "a bad node: the log names it; submit again with --exclude=NODE",
    75: "saved and stopped: the same command continues",
    130: "interrupted",
    137: "killed: out of memory, or ended with the others (the first error of the log is the cause)",
    143: "ended with the others: the first error of the log is the cause",
}


@dataclass(frozen=True)
class State:
    """What SLURM says of a job."""

    name: str  # RUNNING, COMPLETED, ...; UNKNOWN where SLURM has forgotten the job
    code: int = 0  # of the script, or 128 + the signal that ended it
    reason: str = ""
    nodes: str = ""
    restarts: int = 0

    @property
    def ended(self) -> bool:
        return self.name not in (*_ALIVE, *_REQUEUED)

    def told(self, job: str) -> str:
        """One line for a person."""
        text = f"{job}: {self.name}"
        if self.name == "PENDING" and self.reason not in ("", "None"):
            text += f" ({self.reason})"
        if self.name == "RUNNING" and self.nodes not in ("", "(null)"):
            text += f" on {self.nodes}"
        if self.restarts and not self.ended:
            text += f", start {self.restarts + 1}"
        if self.ended and self.name != "COMPLETED":
            text += f", code {self.code}" + (f": {_MEANINGS[self.code]}" if self.code in _MEANINGS else "")
        return text


def parse_scontrol(text: str) -> State | None:
    """The state in what `scontrol show job ID` prints; None where it has none."""
    fields = dict(re.findall(r"(\w+)=(\S*)", text))
    if "JobState" not in fields:
        return None
    code, _, number = fields.get("ExitCode", "0:0").partition(":")
    exit_code = int(code) or (128 + int(number) if int(number or 0) else 0)
    restarts = int(fields.get("Restarts", "0"))
    return State(fields["JobState"], exit_code, fields.get("Reason", ""), fields.get("NodeList", ""), restarts)


def parse_sacct(text: str) -> State | None:
    """The state in the first line of `sacct -n -X -P -o State,ExitCode`."""
    words = (text.strip().splitlines() or [""])[0].split("|")
    if len(words) != 2 or not words[0]:
        return None
    code, _, number = words[1].partition(":")
    return State(words[0].split()[0].rstrip("+"), int(code or 0) or (128 + int(number) if int(number or 0) else 0))


def ask_slurm(job_id: str) -> State | None:
    """The state of a job: by the controller while it remembers the job, then by the accounting."""
    asks: tuple[tuple[list[str], Callable[[str], State | None]], ...] = (
        (["scontrol", "show", "job", job_id], parse_scontrol),
        (["sacct", "-n", "-X", "-P", "-o", "State,ExitCode", "-j", job_id], parse_sacct),
    )
    for command, parse in asks:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0 and (state := parse(done.stdout)) is not None:
            return state
    return None


class Log:
    """The whole lines that a growing file has gained since the last look."""

    def __init__(self, path: Path) -> None:
        self.path, self._at, self._rest = path, 0, b""

    def lines(self, last: bool = False) -> list[str]:
        """`last`: the writer has ended, so that what follows the last line break is a line, too."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._at)
                new = file.read()
        except OSError:  # not there yet
            return []
        self._at += len(new)
        *whole, self._rest = (self._rest + new).split(b"\n")
        if last and self._rest:
            whole, self._rest = [*whole, self._rest], b""
        return [line.decode(errors="replace").rstrip("\r") for line in whole]


def follow(
    jobs: Mapping[str, str],
    logs: Mapping[str, Path],
    ask: Callable[[str], State | None] = ask_slurm,
    wait: Callable[[float], None] = time.sleep,
) -> dict[str, State]:
    """Print states and logs of `jobs` (name: id) until all have ended; returns how each one ended."""
    tails = {name: Log(path) for name, path in logs.items()}
    known: dict[str, State] = {}
    misses = dict.fromkeys(jobs, 0)
    while True:
        for name, job_id in jobs.items():
            if name in known and known[name].ended:
                continue
            state = ask(job_id)
            if state is None:
                misses[name] += 1
                if misses[name] < _MISSES:
                    continue
                state = State("UNKNOWN", 1)
            misses[name] = 0
            _print(name, tails[name].lines(last=state.ended))
            if name not in known or state.told(name) != known[name].told(name):
                print(f"-- {state.told(name)}", flush=True)
            known[name] = state
        if len(known) == len(jobs) and all(s.ended for s in known.values()):
            return known
        wait(POLL_SECONDS)


def outcome(ends: Mapping[str, State]) -> int:
    """The exit code of the whole: 0 when every job has completed, else that of the first one that has not."""
    return next((s.code or 1 for s in ends.values() if s.name != "COMPLETED"), 0)


def _print(name: str, lines: Iterable[str]) -> None:
    for line in lines:
        print(f"{name} | {line}", flush=True)
