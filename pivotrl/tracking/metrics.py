"""Metrics of a stage: metrics.jsonl always; Weights & Biases and TensorBoard when wanted (imported only then)."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from pivotrl.config import Tracking
from pivotrl.io import keeps_books, read_jsonl, write_jsonl
from pivotrl.tracking.sinks import WANDB_ID, Background, Entry, Table, TensorboardSink, WandbSink

__all__ = ["METRICS", "WANDB_ID", "Table", "Tracker"]

METRICS = "metrics.jsonl"


class Tracker:
    """Writes one row a step. A missing or failing wandb never ends a run: it warns once and stays off.

    `directory` is the stage's folder. `start_step` drops rows of steps >= it: work that a killed run logged but never
    committed, and that is about to be done again. `enabled=False` (by default: any rank but the first) makes every call
    a no-op: one writer a run.
    Raises UserError where TensorBoard is wanted and not installed.
    """

    def __init__(
        self,
        directory: Path,
        tracking: Tracking,
        run_name: str,
        config: Mapping[str, Any] | None = None,
        start_step: int | None = None,
        enabled: bool | None = None,
    ) -> None:
        self.path = directory / METRICS
        self._file = None
        self._sinks: list[Background] = []
        if not (keeps_books() if enabled is None else enabled):
            return
        directory.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(self.path)
        if start_step is not None and self.path.is_file():
            write_jsonl(self.path, [row for row in read_jsonl(self.path) if row["step"] < start_step])
        self._file = self.path.open("a", encoding="utf-8")
        if tracking.tensorboard:
            self._sinks.append(Background(TensorboardSink(directory, start_step), _warn))
        if tracking.wandb != "disabled":
            self._sinks.append(Background(WandbSink(directory, tracking, run_name, config or {}), _warn))

    def log(self, step: int, values: Mapping[str, Any], tables: Mapping[str, Table] | None = None) -> None:
        """Append `{"step": step, **values}`. NaN and infinities become text: JSON has none, and they must show.

        `tables` go to wandb alone: rollouts are in files of their own.
        """
        if self._file is None:
            return
        row = {key: _plain(value) for key, value in values.items()}
        self._file.write(json.dumps({"step": int(step), **row}, ensure_ascii=False) + "\n")
        self._file.flush()
        for sink in self._sinks:
            sink.put(Entry(int(step), row, tables or {}))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        for sink in self._sinks:
            sink.close()
        self._sinks = []

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _warn(sink: str, what: str, error: Exception) -> None:
    text = (str(error).strip().splitlines() or [""])[0][:200]
    print(
        f"{sink} is off: it could not {what} ({type(error).__name__}: {text}); {METRICS} goes on"
        + (" (tracking=disabled silences this)" if sink == "wandb" else ""),
        file=sys.stderr,
        flush=True,
    )


def _plain(value: Any) -> Any:
    """A JSON value; one-element tensors and arrays become numbers."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _drop_torn_line(path: Path) -> None:
    """Cut what a killed writer left of a last line."""
    if not path.is_file():
        return
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)
