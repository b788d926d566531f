"""One writer at a time: an advisory lock on a file, released by the system however its holder ends."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pivotrl.errors import UserError


@contextmanager
def hold(path: Path, wait_seconds: float = 15.0) -> Iterator[None]:
    """Hold the lock `path`; waits a little for a holder that is just ending, then raises `UserError` with its pid."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        deadline = time.monotonic() + wait_seconds
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    file.seek(0)
                    pid = file.read().strip() or "unknown"
                    raise UserError(
                        f"{path.parent.parent}: {path.name} is run by process {pid}; wait for it, or end it"
                    ) from None
                time.sleep(0.1)
        file.seek(0)
        file.truncate()
        file.write(str(os.getpid()))
        file.flush()
        yield
