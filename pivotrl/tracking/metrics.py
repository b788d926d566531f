"""Metrics of a stage: metrics.jsonl always, Weights & Biases when wanted (wandb is imported only then)."""

from __future__ import annotations

import json
import math
import os
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from pivotrl.config import Tracking
from pivotrl.io import read_jsonl, write_jsonl

METRICS = "metrics.jsonl"
WANDB_ID = "wandb_id"


class Tracker:
    """Writes one row a step. A missing or failing wandb never ends a run: it warns once and stays off.

    `directory` is the stage's folder. `start_step` drops rows of steps >= it: work that a killed run logged but never
    committed, and that is about to be done again. `enabled=False` (ranks other than 0) makes every call a no-op.
    """

    def __init__(
        self,
        directory: Path,
        tracking: Tracking,
        run_name: str,
        config: Mapping[str, Any] | None = None,
        start_step: int | None = None,
        enabled: bool = True,
    ) -> None:
        self.path = directory / METRICS
        self._file = None
        self._wandb: Any = None
        if not enabled:
            return
        directory.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(self.path)
        if start_step is not None and self.path.is_file():
            write_jsonl(self.path, [row for row in read_jsonl(self.path) if row["step"] < start_step])
        self._file = self.path.open("a", encoding="utf-8")
        self._wandb = self._start_wandb(directory, tracking, run_name, config or {})

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Append `{"step": step, **values}`. NaN and infinities become text: JSON has none, and they must show."""
        if self._file is None:
            return
        row = {"step": int(step), **{key: _plain(value) for key, value in values.items()}}
        self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._file.flush()
        if self._wandb is not None:
            self._guard(lambda: self._wandb.log(row), "log")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._wandb is not None:
            self._guard(lambda: self._wandb.finish(), "finish")
            self._wandb = None

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _start_wandb(self, directory: Path, tracking: Tracking, run_name: str, config: Mapping[str, Any]) -> Any:
        mode = tracking.wandb
        if mode == "auto":
            mode = "online" if os.environ.get("WANDB_API_KEY") else "offline"
        if mode == "disabled":
            return None
        # The id outlives a restart, so that a resumed run goes on with the same curves.
        id_file = directory / WANDB_ID
        if not id_file.is_file():
            id_file.write_text(uuid.uuid4().hex[:16], encoding="utf-8")
        try:
            os.environ.setdefault("WANDB_SILENT", "true")
            import wandb

            run = wandb.init(
                project=tracking.project,
                name=tracking.name or run_name,
                id=id_file.read_text(encoding="utf-8").strip(),
                resume="allow",
                mode=mode,  # type: ignore[arg-type]
                dir=str(directory),
                config=dict(config),
                settings=wandb.Settings(silent=True, init_timeout=30),
            )
            # Our own step: wandb's must never go back, but a resumed run repeats what was not committed.
            run.define_metric("*", step_metric="step")
        except Exception as error:
            _warn("start", error)
            return None
        return run

    def _guard(self, action: Any, what: str) -> None:
        try:
            action()
        except Exception as error:
            _warn(what, error)
            self._wandb = None


def _warn(what: str, error: Exception) -> None:
    text = (str(error).strip().splitlines() or [""])[0][:200]
    print(
        f"wandb is off: it could not {what} ({type(error).__name__}: {text}); {METRICS} goes on "
        "(tracking=disabled silences this)",
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
