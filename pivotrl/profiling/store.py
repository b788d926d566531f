"""The append-only rollout file of a profile, with an index of turn ids in memory and nothing else.

Rollouts come in groups: consecutive rows of one turn, written together. Only whole groups count.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from pivotrl.errors import UserError
from pivotrl.io import keeps_books
from pivotrl.rollouts import Rollout
from pivotrl.stopping import kept

_VISIBLE_SECONDS = 120.0
GroupSize = Callable[[str, int], int]  # (turn id, rollouts it has) -> rollouts of its next group

# The head of a row as `Rollout.to_json` writes it; a row in another key order is parsed whole.
_HEAD = re.compile(rb'\{"turn_id": "([^"\\]+)", "index": (\d+), ')


class RolloutStore:
    """Resumable: what a killed writer left unfinished at the end of the file is cut off on open, and done again.

    Of several processes with the same rollouts the first writes; the others index what they are given and read it from
    the same file, where it lies at the same place. Memory is that of the turn ids and the places of their groups: it
    does not grow with rollouts or tokens.
    """

    def __init__(self, path: Path, group_size: int | GroupSize):
        """`group_size`: K for profiles of one group a turn, else a function that tells the size of a turn's next group.

        Raises UserError for a file that is broken elsewhere than at its end: no killed writer leaves that.
        """
        self.path = path
        self._size: GroupSize = group_size if callable(group_size) else lambda turn_id, done: group_size
        self._groups: dict[str, tuple[int, ...]] = {}  # turn id -> (byte offset, rows) of each group, flat
        path.parent.mkdir(parents=True, exist_ok=True)
        self._end = self._recover()
        self._file = path.open("ab") if keeps_books() else None
        if self._file is not None and self._file.tell() != self._end:
            self._file.truncate(self._end)
        self._reader: BinaryIO | None = None

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
        return list(map(Rollout.from_json, self.rows(turn_id)))

    def rows(self, turn_id: str) -> list[dict[str, Any]]:
        """The same as the rows that they were written as, which is faster."""
        return [json.loads(line.decode()) for line in self._lines(turn_id)]

    def _lines(self, turn_id: str) -> Iterator[bytes]:
        flat = self._groups[turn_id]
        for offset, rows in zip(flat[::2], flat[1::2], strict=True):
            reader = self._open_for(offset)
            for _ in range(rows):
                yield reader.readline()

    def _open_for(self, offset: int) -> BinaryIO:
        """The file at `offset`. Rows of another process may be seen some seconds late (network file systems)."""
        give_up = time.monotonic() + _VISIBLE_SECONDS
        while True:
            if self._reader is None:
                self._reader = self.path.open("rb")
            if self._file is not None or os.fstat(self._reader.fileno()).st_size >= self._end:
                self._reader.seek(offset)
                return self._reader
            if time.monotonic() > give_up:
                raise UserError(
                    f"{self.path}: rollouts of the first process are not seen here after {_VISIBLE_SECONDS:.0f} s; "
                    "run_dir must be on a file system that all nodes share"
                )
            self._reader.close()
            self._reader = None
            time.sleep(0.2)

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
        if self._file is not None:
            self._file.write(b"".join(blocks))
            self._file.flush()
            os.fsync(self._file.fileno())
            kept()

    def close(self) -> None:
        for file in (self._file, self._reader):
            if file is not None:
                file.close()
        self._reader = None

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
