"""The append-only rollout file of a profile: all K rows of a turn are one write, and only whole turns count."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from pivotrl.rollouts import Rollout, read_rollouts


class RolloutStore:
    """Resumable: rows of a turn that was not fully written (kill -9) are dropped on open and the turn is done again."""

    def __init__(self, path: Path, rollouts_per_turn: int):
        self.path = path
        self.rollouts_per_turn = rollouts_per_turn
        path.parent.mkdir(parents=True, exist_ok=True)
        self.groups = self._recover()
        self._file = path.open("a", encoding="utf-8")

    def _recover(self) -> dict[str, list[Rollout]]:
        groups: dict[str, list[Rollout]] = {}
        if not self.path.exists():
            return groups
        for rollout in read_rollouts(self.path):
            groups.setdefault(rollout.turn_id, []).append(rollout)
        whole = {
            turn_id: rows
            for turn_id, rows in groups.items()
            if [r.index for r in rows] == list(range(self.rollouts_per_turn))
        }
        temporary = self.path.with_name(self.path.name + ".tmp")
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(self._lines(row for rows in whole.values() for row in rows))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)
        return whole

    @staticmethod
    def _lines(rollouts: Iterable[Rollout]) -> list[str]:
        return [json.dumps(r.to_json(), ensure_ascii=False) + "\n" for r in rollouts]

    def append(self, groups: Sequence[Sequence[Rollout]]) -> None:
        for group in groups:
            self._file.write("".join(self._lines(group)))
            self.groups[group[0].turn_id] = list(group)
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
