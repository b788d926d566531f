"""A progress bar with the time that remains; a line every ten seconds where there is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TextIO

from pivotrl.io import keeps_books
from pivotrl.watchdog import beat

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID


class Progress(Protocol):
    def advance(self, n: int = 1, note: str = "") -> None:
        """`n` more are done; `note` is a short text beside the bar."""
        ...


@contextmanager
def progress(
    total: int, label: str, done: int = 0, unit: str = "it", file: TextIO | None = None, enabled: bool | None = None
) -> Iterator[Progress]:
    """`with progress(400, "profile", unit="turn") as bar: bar.advance(8, note="mean 0.31")`.

    `done` is what an earlier run had finished: it counts for the bar, not for the speed. Writes to stderr.
    `enabled`: by default in the first of several processes.
    """
    out = file or sys.stderr
    if not (keeps_books() if enabled is None else enabled):
        yield _Silent()
    elif out.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with RichProgress(*columns, console=Console(file=out)) as bar:
            yield _Bar(bar, bar.add_task(label, total=total, completed=done, note=""))
    else:
        lines = Lines(total, label, done, unit, out)
        try:
            yield lines
        finally:
            lines.finish()


class _Silent:
    def advance(self, n: int = 1, note: str = "") -> None:
        beat()


class _Bar:
    def __init__(self, bar: RichProgress, task: TaskID) -> None:
        self._bar, self._task = bar, task

    def advance(self, n: int = 1, note: str = "") -> None:
        beat()
        if note:
            self._bar.update(self._task, note=note)
        self._bar.advance(self._task, n)


class Lines:
    """For logs: `profile: 120/400 turn (30 %), 2.1 turn/s, 2 min 13 s left, mean 0.31`."""

    def __init__(
        self,
        total: int,
        label: str,
        done: int = 0,
        unit: str = "it",
        file: TextIO | None = None,
        every_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total, self.label, self.done, self.unit = total, label, done, unit
        self._initial, self._file, self._every, self._clock = done, file or sys.stderr, every_seconds, clock
        self._start = self._last = clock()
        self._note, self._told = "", -1

    def advance(self, n: int = 1, note: str = "") -> None:
        beat()
        self.done += n
        self._note = note or self._note
        if self._clock() - self._last >= self._every:
            self._tell()

    def finish(self) -> None:
        """A last line, unless it would repeat one."""
        if self._told != self.done:
            self._tell()

    def _tell(self) -> None:
        self._last, self._told = self._clock(), self.done
        elapsed, made = self._last - self._start, self.done - self._initial
        text = f"{self.label}: {self.done}/{self.total} {self.unit}"
        if self.total:
            text += f" ({100 * self.done // self.total} %)"
        if made and elapsed > 0:
            text += f", {made / elapsed:.3g} {self.unit}/s"
            if self.done < self.total:
                text += f", {duration((self.total - self.done) * elapsed / made)} left"
        print(text + (f", {self._note}" if self._note else ""), file=self._file, flush=True)


def duration(seconds: float) -> str:
    """`8.3 s`, `2 min 05 s`, `3 h 07 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
