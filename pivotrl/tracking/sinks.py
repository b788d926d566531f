"""Where metrics go beside metrics.jsonl: Weights & Biases, TensorBoard. None of them may stop or slow a run.

Each sink works in a thread of its own, so that a network that is dead or slow costs the run nothing but that sink.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pivotrl.config import Tracking
from pivotrl.errors import UserError

WANDB_ID = "wandb_id"
_WANDB_NEXT = "wandb_next_step"
_INIT_SECONDS = 30
_FINISH_SECONDS = 60  # for what is not uploaded yet; an offline copy of it stays in the folder
_WAITING = 1000  # rows; beyond it they are dropped, with one warning


@dataclass(frozen=True)
class Table:
    """Rows for a person, beside the numbers of a step."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Entry:
    """What is logged at a step: JSON values, and tables by name."""

    step: int
    values: Mapping[str, Any]
    tables: Mapping[str, Table] = field(default_factory=dict)


class Sink(Protocol):
    """A place for metrics. `open` may take long and may fail; nothing is written before it."""

    name: str

    def open(self) -> None: ...

    def write(self, entry: Entry) -> None: ...

    def close(self) -> None: ...


class Background:
    """Runs a sink in a daemon thread. Its first failure is told once and ends it; the run never notices."""

    def __init__(self, sink: Sink, warn: Callable[[str, str, Exception], None]) -> None:
        self._sink, self._warn = sink, warn
        self._queue: queue.Queue[Entry | None] = queue.Queue(_WAITING)
        self._dropped = False
        self._thread = threading.Thread(target=self._work, name=f"pivotrl-{sink.name}", daemon=True)
        self._thread.start()

    def put(self, entry: Entry) -> None:
        try:
            self._queue.put_nowait(entry)
        except queue.Full:
            if not self._dropped and self._thread.is_alive():
                self._dropped = True
                self._warn(self._sink.name, "keep up", TimeoutError("rows are dropped"))

    def close(self, seconds: float = _INIT_SECONDS + _FINISH_SECONDS) -> None:
        """Write what waits, for so long at most."""
        with suppress(queue.Full):
            self._queue.put(None, timeout=1.0)
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._warn(self._sink.name, "finish", TimeoutError(f"no end after {seconds:.0f} s"))

    def _work(self) -> None:
        doing = "start"
        try:
            self._sink.open()
            doing = "log"
            while (entry := self._queue.get()) is not None:
                self._sink.write(entry)
            doing = "finish"
            self._sink.close()
        except Exception as error:
            self._warn(self._sink.name, doing, error)


class WandbSink:
    """One run a stage folder. Its id outlives restarts, and its steps only grow: a resumed run, which does again what
    was not committed, sends nothing twice. Where the server does not answer, the run is kept offline for `wandb sync`.
    """

    name = "wandb"

    def __init__(self, directory: Path, tracking: Tracking, run_name: str, config: Mapping[str, Any]) -> None:
        self._directory, self._tracking, self._run_name, self._config = directory, tracking, run_name, config
        id_file = directory / WANDB_ID
        if not id_file.is_file():
            id_file.write_text(uuid.uuid4().hex[:16], encoding="utf-8")
        self._id = id_file.read_text(encoding="utf-8").strip()
        self._next = _read_number(directory / _WANDB_NEXT)
        self._run: Any = None
        self._wandb: Any = None

    def open(self) -> None:
        mode = self._tracking.wandb
        if mode == "auto":
            mode = "online" if os.environ.get("WANDB_API_KEY") else "offline"
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._wandb = wandb
        try:
            self._run = self._init(mode)
        except Exception as error:
            if mode != "online":
                raise
            self._run = self._init("offline")
            text = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            runs = self._directory / "wandb" / "offline-run-*"
            print(
                f"wandb: no connection ({text}); the run is kept offline, send it later: wandb sync {runs}",
                file=sys.stderr,
                flush=True,
            )
        # The server may know more steps than this machine does: a run that was moved, a file that was lost.
        known = getattr(self._run, "step", 0)
        self._next = max(self._next, known if isinstance(known, int) else 0)
        self._run.define_metric("*", step_metric="step")

    def _init(self, mode: str) -> Any:
        stage, run = self._run_name, self._directory.parent.name
        return self._wandb.init(
            project=self._tracking.project,
            name=self._tracking.name or f"{run}-{stage}",
            group=run,
            job_type=stage,
            id=self._id,
            resume="allow",
            mode=mode,
            dir=str(self._directory),
            config=dict(self._config),
            settings=self._wandb.Settings(
                silent=True,
                console="off",  # the job's log holds it; two writers of stdout are one too many
                init_timeout=_INIT_SECONDS,
                finish_timeout=_FINISH_SECONDS,
                disable_git=True,  # remotes may hold credentials
                disable_code=True,
            ),
        )

    def write(self, entry: Entry) -> None:
        if entry.step < self._next:
            return
        table = self._wandb.Table
        tables = {k: table(list(t.columns), [list(row) for row in t.rows]) for k, t in entry.tables.items()}
        self._run.log({"step": entry.step, **entry.values, **tables}, step=entry.step)
        self._next = entry.step + 1
        (self._directory / _WANDB_NEXT).write_text(f"{self._next}\n", encoding="utf-8")

    def close(self) -> None:
        self._run.finish()


class TensorboardSink:
    """Event files of the scalars, in <stage>/tensorboard. A resumed run hides the steps that it does again."""

    name = "tensorboard"

    def __init__(self, directory: Path, start_step: int | None) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise UserError(
                "tracking.tensorboard=true needs the package tensorboardX, which is not installed: "
                "pip install 'pivotrl[tensorboard]', or set tracking.tensorboard=false"
            ) from error
        self._make = lambda: SummaryWriter(
            str(directory / "tensorboard"), purge_step=start_step, flush_secs=30, filename_suffix=f".{time.time_ns()}"
        )
        self._writer: Any = None

    def open(self) -> None:
        self._writer = self._make()

    def write(self, entry: Entry) -> None:
        for key, value in entry.values.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(key, value, entry.step)

    def close(self) -> None:
        self._writer.close()


def _read_number(path: Path) -> int:
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there, or torn by a kill
        return 0
