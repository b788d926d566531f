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
        return self.add_number(int.from_bytes(digest, "little"))

    def __contains__(self, digest: bytes) -> bool:
        slots, mask = self._slots, len(self._slots) - 1
        value = int.from_bytes(digest, "little") or 1
        place = value & mask
        while slots[place] not in (0, value):
            place = (place + 1) & mask
        return slots[place] == value

    def smallest(self, count: int) -> int:
        """The `count`-th smallest number, from 1; without a sorted copy of all."""
        sizes = [0] * 4096
        for value in self._slots:
            if value:
                sizes[value >> 52] += 1
        bucket = 0
        while count > sizes[bucket]:
            count -= sizes[bucket]
            bucket += 1
        return sorted(value for value in self._slots if value and value >> 52 == bucket)[count - 1]

    def add_number(self, value: int) -> bool:
        """Whether a number below 2^64 is new (0 counts as 1: it marks a free slot)."""
        value = value or 1
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
    `thinking`: whether that of earlier turns counts.
    """

    def __init__(self, thinking: bool = True) -> None:
        self._thinking = thinking
        self._trajectory: str | None = None
        self._tools: tuple[list[JsonDict] | None, hashlib.blake2b] = (None, hashlib.blake2b())  # with their hash
        self._done = 0  # messages that the running hash holds
        self._hash = hashlib.blake2b()

    def of(self, turn: Turn) -> bytes:
        """8 bytes. Turns of one trajectory must come in order."""
        known = turn.tools is self._tools[0]
        if not known:
            self._tools = (turn.tools, hashlib.blake2b(_encode(turn.tools).encode(), digest_size=8))
        if not known or turn.trajectory_id != self._trajectory or len(turn.messages) < self._done:
            self._trajectory, self._done, self._hash = turn.trajectory_id, 0, self._tools[1].copy()
        for message in turn.messages[self._done :]:
            self._hash.update(_bytes(message, self._thinking))
        self._done = len(turn.messages)
        whole = self._hash.copy()
        action = turn.demonstration
        whole.update(_joined(action.text, _calls([(call.name, call.arguments) for call in action.tool_calls])))
        return whole.digest()


def _bytes(message: JsonDict, with_thinking: bool) -> bytes:
    calls = _calls([(call["name"], call["arguments"]) for call in message.get("tool_calls", ())])
    text, thinking = message.get("content", ""), message.get("thinking", "") if with_thinking else ""
    return _joined(message["role"], message.get("name", ""), text, thinking, calls)


def _calls(calls: list[tuple[str, JsonDict]]) -> str:
    return _encode(calls) if calls else ""


def _joined(*parts: str) -> bytes:
    """Lengths, then parts: no two lists of parts give the same bytes."""
    return "\0".join((*(str(len(part)) for part in parts), *parts)).encode("utf-8", "surrogatepass")
