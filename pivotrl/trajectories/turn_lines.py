"""Turns -> lines of turns.jsonl, byte for byte what `json.dumps(turn.to_json())` gives, each message encoded once.

The states of a trajectory repeat each other; encoding them anew for every turn would take most of the stage.
"""

from __future__ import annotations

import json
from typing import Any

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
