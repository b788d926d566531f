"""Turns that were seen before: the same state and action, in whatever trajectory."""

from __future__ import annotations

import hashlib
import json
from array import array

from pivotrl.trajectories.schema import JsonDict, Turn

_encode = json.JSONEncoder(sort_keys=True).encode


class DigestSet:
    """A set of 64-bit digests in at most 32 bytes each (open addressing), for tens of millions of turns.

    Two different turns among n share a digest with probability n^2 / 2^65: 3e-8 for a million.
    """

    def __init__(self) -> None:
        self._slots = array("Q", bytes(8 * 1024))
        self._used = 0

    def __len__(self) -> int:
        return self._used

    def add(self, digest: bytes) -> bool:
        """Whether the 8-byte digest is new."""
        value = int.from_bytes(digest, "little") or 1  # 0 marks a free slot
        if not self._insert(value):
            return False
        self._used += 1
        if self._used * 2 > len(self._slots):
            old = self._slots
            self._slots = array("Q", bytes(16 * len(old)))
            for item in old:
                if item:
                    self._insert(item)
        return True

    def _insert(self, value: int) -> bool:
        slots, mask = self._slots, len(self._slots) - 1
        place = value & mask
        while held := slots[place]:
            if held == value:
                return False
            place = (place + 1) & mask
        slots[place] = value
        return True


class TurnDigests:
    """Digests of (tools, state, action); those of one trajectory cost its length once, not once a turn.

    Ids of calls do not count, nor does the thinking of the action: templates and verifiers pass over both.
    """

    def __init__(self) -> None:
        self._trajectory: str | None = None
        self._tools: list[JsonDict] | None = None
        self._done = 0  # messages that the running hash holds
        self._hash = hashlib.blake2b()

    def of(self, turn: Turn) -> bytes:
        """8 bytes. Turns of one trajectory must come in order."""
        if turn.trajectory_id != self._trajectory or turn.tools is not self._tools or len(turn.messages) < self._done:
            self._trajectory, self._tools, self._done = turn.trajectory_id, turn.tools, 0
            self._hash = hashlib.blake2b(_encode(turn.tools).encode(), digest_size=8)
        for message in turn.messages[self._done :]:
            self._hash.update(_bytes(message))
        self._done = len(turn.messages)
        whole = self._hash.copy()
        action = turn.demonstration
        calls = [[call.name, call.arguments] for call in action.tool_calls]
        whole.update(_encode([action.text, calls]).encode())
        return whole.digest()


def _bytes(message: JsonDict) -> bytes:
    calls = [[call["name"], call["arguments"]] for call in message.get("tool_calls", ())]
    parts = [message["role"], message.get("content"), message.get("thinking"), message.get("name"), calls]
    return _encode(parts).encode()
