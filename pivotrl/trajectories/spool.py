"""What was read, kept for a second look: an unnamed file on disk, so that the input is read once and may be a pipe."""

from __future__ import annotations

import marshal
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from types import TracebackType
from typing import Any

from pivotrl.trajectories.reader import Skip
from pivotrl.trajectories.schema import Defect, JsonDict, Trajectory

_LENGTH = struct.Struct("<Q")
_VERSION = 2  # of marshal: equal bytes mean equal values (later versions add references to what came before)


class Spool:
    """Trajectories and skips, first written, then read back as they were, in order. Memory: one of them.

    A list of tools that equals the one before it comes back as the same object, which later steps encode once. Only the
    process that wrote the file reads it, so marshal (several times faster than JSON) is safe. Use as a context manager.
    """

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (closed by __exit__)
        self._tools = b""  # of the last trajectory, encoded

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def add(self, item: Trajectory | Skip) -> None:
        if isinstance(item, Skip):
            self._write(astuple(item))
            return
        tools = marshal.dumps(item.tools, _VERSION)
        same, self._tools = tools == self._tools, tools
        head = (item.id, item.domain, item.messages, None if same else item.tools)
        defect = None if item.defect is None else astuple(item.defect)
        self._write((*head, item.task_id, item.meta, item.source, defect))

    def _write(self, row: tuple[Any, ...]) -> None:
        data = marshal.dumps(row, _VERSION)
        self._file.write(_LENGTH.pack(len(data)))
        self._file.write(data)

    def __iter__(self) -> Iterator[Trajectory | Skip]:
        self._file.seek(0)
        tools: list[JsonDict] = []
        while head := self._file.read(_LENGTH.size):
            row = marshal.loads(self._file.read(_LENGTH.unpack(head)[0]))
            if len(row) == 5:
                yield Skip(*row)
                continue
            tools = tools if row[3] is None else row[3]
            defect = None if row[7] is None else Defect(*row[7])
            yield Trajectory(row[0], row[1], row[2], tools, row[4], row[5], row[6], defect)
