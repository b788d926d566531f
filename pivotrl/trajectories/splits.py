"""Splits by task: warm-up (SFT before profiling), train (pivots) and validation never share a task."""

from __future__ import annotations

import hashlib

from pivotrl.errors import UserError
from pivotrl.trajectories.duplicates import DigestSet
from pivotrl.trajectories.schema import Trajectory

SPLITS = ("warmup", "train", "validation")


class TaskSplits:
    """The split of each of a set of tasks, which are first added. Memory: at most 32 bytes a task.

    Tasks are ranked by a hash of (seed, task), so the order of the input does not matter, and the counts are the
    rounded fractions of the tasks (at least 1 for a fraction above 0, while `train` keeps one).
    """

    def __init__(self, seed: int, warmup_fraction: float, validation_fraction: float) -> None:
        """Raises `UserError` for fractions outside [0, 1) or that leave nothing to train on."""
        for name, value in (("warmup_fraction", warmup_fraction), ("validation_fraction", validation_fraction)):
            if not 0 <= value < 1:
                raise UserError(f"trajectories.{name}={value}: must be in [0, 1).")
        if warmup_fraction + validation_fraction >= 1:
            raise UserError(
                f"trajectories.warmup_fraction={warmup_fraction} and validation_fraction={validation_fraction} leave "
                "no task to train on. Their sum must be below 1."
            )
        self._seed, self._fractions = seed, (validation_fraction, warmup_fraction)
        self._ranks = DigestSet()
        self._limits: tuple[int, int] | None = None  # the last rank of validation, and of warm-up after it

    def __len__(self) -> int:
        return len(self._ranks)

    def add(self, task: str) -> None:
        self._ranks.add_number(_rank(self._seed, task))
        self._limits = None

    def of(self, task: str) -> str:
        """The split of a task that was added, once all are."""
        if self._limits is None:
            self._limits = self._find_limits()
        rank = _rank(self._seed, task)
        return "validation" if rank <= self._limits[0] else "warmup" if rank <= self._limits[1] else "train"

    def _find_limits(self) -> tuple[int, int]:
        room = max(len(self) - 1, 0)
        validation = min(_count(self._fractions[0], len(self)), room)
        held = validation + min(_count(self._fractions[1], len(self)), room - validation)
        last, both = (self._ranks.smallest(count) if count else 0 for count in (validation, held))
        return last, both


def _count(fraction: float, total: int) -> int:
    return max(round(fraction * total), 1) if fraction > 0 else 0


def _rank(seed: int, task: str) -> int:
    """From 1 to 2^64 - 1. Tasks of equal rank count as one (a chance of 3e-8 among a million)."""
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{task}".encode(), digest_size=16).digest()[:8], "big") or 1


class SplitLedger:
    """Which split every trajectory is in that comes in several rows. A second one is a leak, and an error.

    Tasks cannot leak: the split is a function of the task. Rows of one trajectory (`meta.trajectory_id`, one row a
    turn) can, where they name different tasks.
    """

    def __init__(self) -> None:
        self._sides = {side: DigestSet() for side in SPLITS}

    def add(self, trajectory: Trajectory, split: str) -> None:
        """Raises `UserError` when rows of the same trajectory are in another split already."""
        name = trajectory.meta.get("trajectory_id")
        if not isinstance(name, str) or name == trajectory.id:
            return
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        for side, names in self._sides.items():
            if side != split and digest in names:
                raise UserError(
                    f"{trajectory.source}: trajectory {name[:80]!r} is in the splits {side} and {split}: its rows name "
                    "different tasks. Give all rows of a trajectory one task_id."
                )
        self._sides[split].add(digest)
