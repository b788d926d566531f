"""The append-only rollout file of a profile, with an index of turn ids in memory and nothing else.

Rollouts come in groups: consecutive rows of one turn, written together. Only whole groups count.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pivotrl.errors import UserError
from pivotrl.rollouts import Rollout

GroupSize = Callable[[str, int], int]  # (turn id, rollouts it has) -> rollouts of its next group

# The head of a row as `Rollout.to_json` writes it; a row in another key order is parsed whole.
_HEAD = re.compile(rb'\{"turn_id": "([^"\\]+)", "index": (\d+), ')


class RolloutStore:
    """Resumable: what a killed writer left unfinished at the end of the file is cut off on open, and done again.

    Memory is that of the turn ids and the places of their groups: it does not grow with rollouts or tokens.
    """

    def __init__(self, path: Path, group_size: int | GroupSize):
        """`group_size`: K for profiles of one group a turn, else a function that tells the size of a turn's next group.

        Raises UserError for a file that is broken elsewhere than at its end: no killed writer leaves that.
        """
        self.path = path
        self._size: GroupSize = group_size if callable(group_size) else lambda turn_id, done: group_size
        self._groups: dict[str, tuple[int, ...]] = {}  # turn id -> (byte offset, rows) of each group, flat
        path.parent.mkdir(parents=True, exist_ok=True)
        end = self._recover()
        self._file = path.open("ab")
        if self._file.tell() != end:
            self._file.truncate(end)
        self._end = end
        self._reader = self.path.open("rb")

    def __len__(self) -> int:
        """Turns that have at least one group."""
        return len(self._groups)

    def __contains__(self, turn_id: str) -> bool:
        return turn_id in self._groups

    def __iter__(self) -> Iterator[str]:
        """Turn ids, in the order of their first group."""
        return iter(self._groups)

    def count(self, turn_id: str) -> int:
        """Rollouts of a turn."""
        return sum(self._groups.get(turn_id, ())[1::2])

    def rollouts(self, turn_id: str) -> list[Rollout]:
        """All rollouts of a turn, by index, read from the file. Raises KeyError for a turn without any."""
        return [Rollout.from_json(json.loads(line)) for line in self._lines(turn_id)]

    def _lines(self, turn_id: str) -> Iterator[bytes]:
        flat = self._groups[turn_id]
        for offset, rows in zip(flat[::2], flat[1::2], strict=True):
            self._reader.seek(offset)
            for _ in range(rows):
                yield self._reader.readline()

    def append(self, groups: Sequence[Sequence[Rollout]]) -> None:
        """Write the next group of some turns; on return they are on disk. Raises ValueError for a group out of turn."""
        blocks = []
        for group in groups:
            turn_id, done = group[0].turn_id, self.count(group[0].turn_id)
            wanted = list(range(done, done + self._size(turn_id, done)))
            if [r.index for r in group] != wanted or any(r.turn_id != turn_id for r in group):
                raise ValueError(f"rollouts {[(r.turn_id, r.index) for r in group]}: {turn_id} needs {wanted}")
            block = "".join(json.dumps(r.to_json(), ensure_ascii=False) + "\n" for r in group).encode()
            self._add(turn_id, self._end, len(group))
            self._end += len(block)
            blocks.append(block)
        self._file.write(b"".join(blocks))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        self._reader.close()

    def _add(self, turn_id: str, offset: int, rows: int) -> None:
        self._groups[turn_id] = (*self._groups.get(turn_id, ()), offset, rows)

    def _recover(self) -> int:
        """Index the whole groups; returns where they end."""
        if not self.path.exists():
            return 0
        end = offset = rows = number = 0
        current, done = "", 0  # turn of the group that is being read, and what it had before
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                row = _head(line)
                if row is None:
                    break
                turn_id, index = row
                if rows == 0:
                    current, done = turn_id, self.count(turn_id)
                if turn_id != current or index != done + rows:
                    raise self._broken(number, f"rollout {index} of {turn_id} where {done + rows} of {current} follows")
                rows += 1
                offset += len(line)
                if rows == self._size(current, done):
                    self._add(current, end, rows)
                    end, rows = offset, 0
            if file.readline():
                raise self._broken(number, "no rollout, and the file goes on after it")
        return end

    def _broken(self, line: int, what: str) -> UserError:
        return UserError(
            f"{self.path}:{line}: {what}. An interrupted profile is broken only at its end: the file was changed by "
            "something else, or two profiles wrote to it. Move it away to profile again, or cut it before this line."
        )


def _head(line: bytes) -> tuple[str, int] | None:
    """(turn id, index) of a row; None for a torn one."""
    if not line.endswith(b"\n"):
        return None
    if (found := _HEAD.match(line)) and line.endswith(b"}\n"):
        return found[1].decode(), int(found[2])
    try:
        row = json.loads(line)
        return str(row["turn_id"]), int(row["index"])
    except (ValueError, KeyError, TypeError):
        return None
