"""Environments behind a server (`environment.options.url`): their tasks are rows of JSONL files, one file a split."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

from pivotrl.environments.base import NoExpert, Task
from pivotrl.environments.procedural import SPLITS
from pivotrl.errors import UserError
from pivotrl.trajectories.schema import JsonDict, Trajectory


class RowTasks:
    """Tasks `name`-split-row (from 0). `problem(row)` says what is wrong with a row, None for a good one.

    `options`: url, train and test at least. Raises UserError for a url that is no address, where no file is given, one
    is missing or empty, and for a bad row, by file and line.
    """

    waits = True  # for the server

    def __init__(self, name: str, options: Mapping[str, Any], problem: Callable[[JsonDict], str | None]) -> None:
        self.name, url = name, str(options["url"])
        if not url.startswith(("http://", "https://")):
            raise UserError(f"environment.options.url is {url!r}; give the address of the {name} server, http://...")
        self._rows = {split: _read(options[split], split, problem) for split in SPLITS if options[split]}
        if not self._rows:
            raise UserError(f"environment.options: {name} needs train and test, JSONL files of tasks")
        self.version = hashlib.sha256(json.dumps(self._rows, sort_keys=True).encode()).hexdigest()[:12]

    def tasks(self, split: str, count: int, seed: int = 0) -> list[Task]:
        """At most `count` rows of the split's file, in an order drawn by `seed`."""
        if split not in self._rows:
            raise UserError(f"environment {self.name}: environment.options.{split} names no file of tasks")
        order = list(range(len(self._rows[split])))
        Random(f"{self.name}/{split}/{seed}").shuffle(order)
        return [self.task(f"{self.name}-{split}-{i}") for i in order[:count]]

    def task(self, task_id: str) -> Task:
        """Raises UserError for an id that names no row."""
        name, _, rest = task_id.partition("-")
        split, _, row = rest.partition("-")
        if name != self.name or not row.isdecimal() or int(row) >= len(self._rows.get(split, ())):
            raise UserError(f'"{task_id}" is no task of environment {self.name} (they read {self.name}-test-0)')
        return Task(task_id, self.name, self._rows[split][int(row)])

    def expert(self, task: Task, run: int = 0) -> Trajectory:
        raise NoExpert(f"{task.id}: servers of {self.name} have no expert; give trajectories.path")


def _read(path: Any, split: str, problem: Callable[[JsonDict], str | None]) -> list[JsonDict]:
    if not Path(str(path)).is_file():
        raise UserError(f"environment.options.{split}: there is no file {path}")
    rows = list(_rows(Path(str(path)), problem))
    if not rows:
        raise UserError(f"environment.options.{split}: {path} has no row")
    return rows


def _rows(path: Path, problem: Callable[[JsonDict], str | None]) -> Iterator[JsonDict]:
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}:{number}: no JSON ({error})") from error
        found = problem(row) if isinstance(row, dict) else "no JSON object"
        if found:
            raise UserError(f"{path}:{number}: {found}")
        yield row
