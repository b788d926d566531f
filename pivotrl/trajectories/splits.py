"""Splits by task: warm-up (SFT before profiling), train (pivots) and validation never share a task."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from pivotrl.errors import UserError
from pivotrl.trajectories.schema import Trajectory

SPLITS = ("warmup", "train", "validation")


def split_tasks(
    task_ids: Iterable[str], seed: int, warmup_fraction: float, validation_fraction: float
) -> dict[str, str]:
    """task id -> split. Tasks are ranked by a hash of (seed, task), so the order of the input does not matter, and the
    counts are the rounded fractions of the tasks (at least 1 for a fraction above 0, while `train` keeps one).

    Raises `UserError` for fractions outside [0, 1) or that leave nothing to train on.
    """
    for name, value in (("warmup_fraction", warmup_fraction), ("validation_fraction", validation_fraction)):
        if not 0 <= value < 1:
            raise UserError(f"trajectories.{name}={value}: must be in [0, 1).")
    if warmup_fraction + validation_fraction >= 1:
        raise UserError(
            f"trajectories.warmup_fraction={warmup_fraction} and validation_fraction={validation_fraction} leave no "
            "task to train on. Their sum must be below 1."
        )
    ranked = sorted(set(task_ids), key=lambda task: (_rank(seed, task), task))
    room = max(len(ranked) - 1, 0)
    validation = min(_count(validation_fraction, len(ranked)), room)
    warmup = min(_count(warmup_fraction, len(ranked)), room - validation)
    names = ["validation"] * validation + ["warmup"] * warmup
    names += ["train"] * (len(ranked) - len(names))
    return dict(zip(ranked, names, strict=True))


def _count(fraction: float, total: int) -> int:
    return max(round(fraction * total), 1) if fraction > 0 else 0


def _rank(seed: int, task: str) -> bytes:
    return hashlib.blake2b(f"{seed}\0{task}".encode(), digest_size=16).digest()


class SplitLedger:
    """Which split every trajectory is in that comes in several rows. A second one is a leak, and an error.

    Tasks cannot leak: the split is a function of the task. Rows of one trajectory (`meta.trajectory_id`, one row a
    turn) can, where they name different tasks.
    """

    def __init__(self) -> None:
        self._sides: dict[str, str] = {}

    def add(self, trajectory: Trajectory, split: str) -> None:
        """Raises `UserError` when rows of the same trajectory are in another split already."""
        name = trajectory.meta.get("trajectory_id")
        if not isinstance(name, str) or name == trajectory.id:
            return
        side = self._sides.setdefault(name, split)
        if side != split:
            raise UserError(
                f"{trajectory.source}: trajectory {name[:80]!r} is in the splits {side} and {split}: its rows name "
                "different tasks. Give all rows of a trajectory one task_id."
            )
