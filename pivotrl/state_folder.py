"""`<run_dir>/<stage>/state/`: the checkpoints to resume from. Only names and files; no torch.

A checkpoint is written as `step-00000012.tmp` and committed by renaming it to `step-00000012`: what has that name is
whole. Their order is their steps', never a time: clocks jump.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pivotrl.errors import UserError

STATE = "state.json"
_NAME = re.compile(r"step-(\d{8})")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NO_ACCESS = (errno.EACCES, errno.EPERM, errno.EROFS)
UNWRITABLE = (*_NO_ROOM, *_NO_ACCESS)


class StateFolder:
    """The checkpoints of one stage, each named by the number of steps that it has behind it."""

    def __init__(self, stage_dir: Path) -> None:
        self.root = stage_dir / "state"

    def committed(self) -> list[int]:
        """Steps of the committed checkpoints, in rising order."""
        try:
            names = [_NAME.fullmatch(p.name) for p in self.root.iterdir() if (p / STATE).is_file()]
        except OSError:
            return []
        return sorted(int(m[1]) for m in names if m)

    def path(self, step: int) -> Path:
        return self.root / f"step-{step:08d}"

    def temporary(self, step: int) -> Path:
        return self.root / f"step-{step:08d}.tmp"

    def begin(self, step: int) -> Path:
        """An empty folder to write the checkpoint of `step` into. Raises OSError."""
        folder = self.temporary(step)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def commit(self, step: int) -> Path:
        """Give a written checkpoint its name, on the disk and not only in memory. Raises OSError."""
        temporary, path = self.temporary(step), self.path(step)
        _sync(temporary)
        if path.exists():
            self.remove(path)
        temporary.rename(path)
        _sync(self.root)
        return path

    def remove(self, path: Path) -> None:
        """Delete a checkpoint: it loses its name first, so that a kill leaves none that is half there."""
        doomed = path.with_name(path.name + ".old")
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def set_aside(self, step: int) -> Path:
        """Rename a damaged checkpoint, so that it is not found again."""
        path = self.path(step)
        number = 1
        while (target := path.with_name(f"{path.name}.damaged-{number}")).exists():
            number += 1
        path.rename(target)
        return target

    def clean(self) -> list[str]:
        """Delete what a kill has left half-written or half-deleted; returns the names of the half-written."""
        found = []
        for path in sorted(self.root.glob("step-*.tmp")) + sorted(self.root.glob("step-*.old")):
            shutil.rmtree(path, ignore_errors=True)
            if path.suffix == ".tmp":
                found.append(path.name)
        return found

    def read(self, step: int) -> dict[str, Any]:
        """state.json of a checkpoint. Raises UserError when it is damaged."""
        path = self.path(step) / STATE
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(state, dict) or state.get("format") != 1 or not isinstance(state.get("files"), dict):
                raise ValueError("it has another form")
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: cannot be read ({error})") from error
        return state


def kept(
    steps: Sequence[int], scores: Mapping[int, float], last: int, every: int | None, best: int, finished: bool = False
) -> set[int]:
    """Which checkpoints stay: the `last` newest (none of them once the stage has `finished`), every multiple of
    `every`, and the `best` of highest score (of equals, the newer).
    """
    ordered = sorted(steps)
    keep = set() if finished else set(ordered[-last:])
    if every:
        keep |= {s for s in ordered if s % every == 0}
    ranked = sorted((s for s in ordered if s in scores), key=lambda s: (scores[s], s), reverse=True)
    return keep | set(ranked[:best])


def remedy(error: OSError, folder: Path) -> str:
    """What a failed write to `folder` means, and what to do."""
    reason = error.strerror or str(error)
    if error.errno in _NO_ROOM:
        where = next((p for p in (folder, *folder.parents) if p.exists()), Path("/"))
        free = shutil.disk_usage(where).free
        return (
            f"{folder}: {reason} ({free / 2**30:.2f} GiB are free); delete files, or lower checkpoint.keep_last, "
            "keep_best and raise keep_every"
        )
    if error.errno in _NO_ACCESS:
        return f"{folder}: {reason}; give this user access to it, or choose another run_dir=..."
    return f"{folder}: {reason}"


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
