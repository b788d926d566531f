"""Turns <-> two files side by side, in which every message of a trajectory stands once:

turns.jsonl      a row a turn: what `Turn` holds but messages and tools; `state`: how many messages of its trajectory
                 come before it; `state_bytes`: their length as JSON, with the tools
messages.jsonl   a row a trajectory: {"trajectory_id", "messages", "tools"}, in the order of the turns

The states of a trajectory repeat each other, so rows that held them would grow with the square of its length. A row of
turns.jsonl that holds `messages` and `tools` itself (written by hand) is read as it stands.
"""

from __future__ import annotations

import json
import marshal
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from pivotrl.errors import UserError
from pivotrl.io import read_jsonl
from pivotrl.trajectories.schema import JsonDict, Turn

MESSAGES = "messages.jsonl"
_HEAD = ("id", "trajectory_id", "task_id", "depth", "domain", "split")
_encode = json.JSONEncoder(ensure_ascii=False).encode  # one encoder: `json.dumps` builds a new one for every call


class TurnWriter:
    """Writes both files. Turns of one trajectory come one after the other, each state beginning with the one before.

    Memory: the messages of one trajectory. Use as a context manager; the files are whole when it has closed.
    """

    def __init__(self, turns: Path, messages: Path) -> None:
        self._turns: IO[bytes] = turns.open("wb")
        self._messages: IO[bytes] = messages.open("wb")
        self._trajectory: str | None = None
        self._known: list[JsonDict] = []  # messages of the trajectory at hand
        self._texts: list[bytes] = []
        self._bytes = 0  # of all texts
        self._tools: tuple[list[JsonDict], bytes] = ([], b"[]")

    def __enter__(self) -> TurnWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self._end_trajectory()
        self._turns.close()
        self._messages.close()

    def write(self, turn: Turn) -> None:
        """Raises `ValueError` for a state that does not begin with the one before it."""
        if turn.trajectory_id != self._trajectory:
            self._end_trajectory()
            self._trajectory, self._known, self._texts, self._bytes = turn.trajectory_id, [], [], 0
        state = turn.messages
        if state[: len(self._known)] != self._known:
            raise ValueError(f"{turn.id}: its state does not begin with that of the turn before it")
        for message in state[len(self._known) :]:
            self._texts.append(_dumps(message))
            self._bytes += len(self._texts[-1])
        self._known = state
        if self._tools[0] is not turn.tools:
            self._tools = (turn.tools, _dumps(turn.tools))
        row = {key: getattr(turn, key) for key in _HEAD}
        row |= {"state": len(state), "state_bytes": self._bytes + len(self._tools[1])}
        row |= {"demonstration": turn.demonstration.to_json(), "source": turn.source, "flags": turn.flags}
        self._turns.write(_dumps(row) + b"\n")

    def _end_trajectory(self) -> None:
        if self._trajectory is None:
            return
        head = b'{"trajectory_id": ' + _dumps(self._trajectory)
        texts = b", ".join(self._texts)
        self._messages.write(head + b', "messages": [' + texts + b'], "tools": ' + self._tools[1] + b"}\n")


def _dumps(value: Any) -> bytes:
    return _encode(value).encode("utf-8")


def turns_in(path: Path, split: str | None = None, ids: Collection[str] | None = None) -> Iterator[Turn]:
    """Turns of a turns.jsonl, or those of one split or of some ids.

    States of a trajectory share their messages, and equal tools are one list. Raises `UserError` for a turn whose
    messages are not in the file beside.
    """
    rows = read_jsonl(path)
    wanted = (row for row in rows if split in (None, row["split"]) and (ids is None or row["id"] in ids))
    return map(Turn.from_json, with_states(path, wanted))


def with_states(path: Path, rows: Iterable[JsonDict]) -> Iterator[JsonDict]:
    """Rows of the turns.jsonl at `path`, in its order, as `Turn.to_json` writes them. Raises like `turns_in`."""
    states = _States(path)
    for row in rows:
        if "messages" in row:
            yield row
            continue
        messages, tools = states.of(row)
        head = {key: value for key, value in row.items() if key not in ("state", "state_bytes")}
        yield {**head, "messages": messages[: row["state"]], "tools": tools}


class _States:
    """The messages of the trajectories, one at a time, by one pass over messages.jsonl in the order of the turns."""

    def __init__(self, turns: Path) -> None:
        self._turns, self._path = turns, turns.with_name(MESSAGES)
        self._lines = self._open()
        self._last: tuple[str | None, list[JsonDict], list[JsonDict]] = (None, [], [])
        self._tools: dict[bytes, list[JsonDict]] = {}

    def of(self, row: JsonDict) -> tuple[list[JsonDict], list[JsonDict]]:
        """(messages, tools) of the row's trajectory."""
        if row["trajectory_id"] != self._last[0]:
            found = self._find(row)
            tools = self._tools.setdefault(marshal.dumps(found["tools"], 2), found["tools"])
            self._last = (row["trajectory_id"], found["messages"], tools)
        if len(self._last[1]) < row["state"]:
            raise self._error(row, f"trajectory {row['trajectory_id']!r} has {len(self._last[1])} messages")
        return self._last[1], self._last[2]

    def _open(self) -> Iterator[bytes]:
        if self._path.is_file():
            with self._path.open("rb") as file:
                yield from file

    def _find(self, row: JsonDict) -> Any:
        start = b'{"trajectory_id": ' + _dumps(row["trajectory_id"]) + b","
        for attempt in ("onward", "from the start"):  # rows in another order are found, though slowly
            if attempt == "from the start":
                self._lines = self._open()
            for line in self._lines:
                if line.startswith(start):
                    return json.loads(line)
        raise self._error(row, f"trajectory {row['trajectory_id']!r} is not there")

    def _error(self, row: JsonDict, what: str) -> UserError:
        return UserError(
            f"{self._path}: {what}, though {self._turns} has turn {row['id']!r} with {row['state']} messages before "
            "it; the two files are of two runs: run `pivotrl turns` again"
        )
