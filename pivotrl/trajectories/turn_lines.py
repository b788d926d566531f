"""Turns <-> lines of turns.jsonl, byte for byte what `json.dumps(turn.to_json())` gives.

The states of a trajectory repeat each other: each message is encoded once, and held once when lines are read back.
"""

from __future__ import annotations

import json
import marshal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pivotrl.io import read_jsonl
from pivotrl.trajectories.schema import JsonDict, Turn

_encode = json.JSONEncoder(ensure_ascii=False).encode  # one encoder: `json.dumps` builds a new one for every call


class TurnLines:
    def __init__(self) -> None:
        self._trajectory: str | None = None
        self._messages: list[tuple[JsonDict, bytes]] = []  # of the trajectory at hand, with their text
        self._tools: tuple[list[JsonDict], bytes] = ([], b"[]")

    def line(self, turn: Turn) -> bytes:
        """One line, newline included."""
        if turn.trajectory_id != self._trajectory:
            self._trajectory, self._messages = turn.trajectory_id, []
        known = self._messages
        for i, message in enumerate(turn.messages):
            if i >= len(known):
                known.append((message, _dumps(message)))
            elif known[i][0] is not message:
                known[i] = (message, _dumps(message))
        if self._tools[0] is not turn.tools:
            self._tools = (turn.tools, _dumps(turn.tools))
        head = {key: getattr(turn, key) for key in ("id", "trajectory_id", "task_id", "depth", "domain", "split")}
        tail = {"demonstration": turn.demonstration.to_json(), "source": turn.source, "flags": turn.flags}
        return b"".join(
            (
                _dumps(head)[:-1],
                b', "messages": [',
                b", ".join(text for _, text in known[: len(turn.messages)]),
                b'], "tools": ',
                self._tools[1],
                b", ",
                _dumps(tail)[1:],
                b"\n",
            )
        )


def _dumps(value: Any) -> bytes:
    return _encode(value).encode("utf-8")


def turns_in(path: Path, split: str | None = None) -> Iterator[Turn]:
    """Turns of a file, or of one split in it. Those of a trajectory share their messages, and equal tools are one list:
    memory follows the length of the trajectories, not its square."""
    last: Turn | None = None
    known: dict[bytes, list[JsonDict]] = {}
    for row in read_jsonl(path):
        if split is not None and row["split"] != split:
            continue
        row["tools"] = known.setdefault(marshal.dumps(row["tools"], 2), row["tools"])
        if last is not None and last.trajectory_id == row["trajectory_id"]:
            shared = min(len(last.messages), len(row["messages"]))
            for i in range(shared):
                if last.messages[i] == row["messages"][i]:
                    row["messages"][i] = last.messages[i]
        last = Turn.from_json(row)
        yield last
