"""The machine behind an episode: commands run in the sandbox, each from the state that the last one left.

What a command does is kept by (state, command): a replay of the same commands starts no process, so scoring K actions
of one state costs one run each.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

from pivotrl.trajectories.schema import JsonDict
from pivotrl.verifiers import sandbox

State = dict[str, sandbox.Entry]  # path below the working directory -> entry

# Loops that compute end by CPU time, whatever else the host does; the wall clock is for commands that wait.
LIMITS = sandbox.Limits(seconds=10.0, cpu_seconds=2, memory_mb=256, file_mb=4, disk_mb=16)
CACHED_RUNS = 4096
OUTPUT_LIMIT = 600  # characters of a result that the agent sees
_ERROR_LIMIT = 160


class SandboxBroken(RuntimeError):
    """The sandbox did not run a command. An error of the machine, never of the agent."""


@dataclass(frozen=True)
class Run:
    result: JsonDict  # as the agent sees it
    state: State


def initial_state(files: dict[str, str]) -> State:
    """The state of a task's files, parent directories included."""
    state: State = {}
    for name, content in files.items():
        parts = name.rstrip("/").split("/")
        for depth in range(1, len(parts)):
            state["/".join(parts[:depth])] = ("5", 0o755, b"")
        if name.endswith("/"):
            state[name.rstrip("/")] = ("5", 0o755, b"")
        else:
            state[name] = ("file", 0o644, content.encode())
    return state


def state_hash(state: State) -> str:
    hasher = hashlib.sha256()
    for name, (kind, mode, content) in sorted(state.items()):
        for part in (name.encode("utf-8", "surrogateescape"), f"{kind} {mode:o}".encode(), content):
            hasher.update(f"{len(part)}:".encode() + part)
    return hasher.hexdigest()


class Machine:
    """Runs commands, and remembers what they did. Raises SandboxBroken where the sandbox fails."""

    def __init__(self) -> None:
        self._done: OrderedDict[tuple[str, str], Run] = OrderedDict()

    def run(self, state: State, command: str) -> Run:
        key = (state_hash(state), command)
        if key not in self._done:
            self._done[key] = self._run(state, command)
            if len(self._done) > CACHED_RUNS:
                self._done.popitem(last=False)
        self._done.move_to_end(key)
        return self._done[key]

    @staticmethod
    def _run(state: State, command: str) -> Run:
        if "\0" in command:
            return Run({"error": "the command holds a NUL character"}, state)
        effect = sandbox.run(command, state, LIMITS)
        if effect.timed_out:  # once more: the host may have been at fault
            effect = sandbox.run(command, state, LIMITS)
        if effect.timed_out:
            return Run({"error": f"timed out after {LIMITS.seconds:g} s; nothing was changed"}, state)
        if not effect.files:  # even an empty working directory is an entry
            raise SandboxBroken(
                f"exit {effect.exit_code}: {effect.stderr.decode('utf-8', 'replace')[:300]} (command {command[:200]!r})"
            )
        return Run(_result(effect), sandbox.work_entries(effect))


def _result(effect: sandbox.Effect) -> JsonDict:
    result: JsonDict = {"out": _shown(effect.stdout, OUTPUT_LIMIT)}
    if effect.exit_code:
        result["exit"] = effect.exit_code
    if effect.stderr:
        result["error"] = _shown(effect.stderr, _ERROR_LIMIT)
    return result


def _shown(output: bytes, limit: int) -> str:
    text = output.decode("utf-8", "replace").rstrip("\n")
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
