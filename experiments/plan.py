"""What the study is made of: for every seed one piece of work that its arms share, then one for each arm."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.arms import Arm
from experiments.record import make_record, matched_kl, record_path, start_policy
from pivotrl.errors import UserError
from pivotrl.io import read_json, write_json

SHARED_STAGES = ("turns", "warmup", "profile")
Start = Callable[[Sequence[str]], int]  # overrides of `pivotrl run` -> exit code


def run_pivotrl(overrides: Sequence[str]) -> int:
    return subprocess.run([sys.executable, "-m", "pivotrl.cli", "run", *overrides], check=False).returncode


@dataclass(frozen=True)
class Work:
    """What one `pivotrl run`, or one job of a cluster, does: an arm of a seed, or what the arms of a seed share."""

    name: str  # the arm's, or "shared"
    seed: int
    folder: Path  # absolute
    stages: tuple[str, ...]
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Study:
    experiment: str
    root: Path
    records: Path
    split: str
    overrides: tuple[str, ...] = ()
    start: Start = run_pivotrl

    def folder(self, seed: int, name: str) -> Path:
        return (self.root / self.experiment / f"seed{seed}" / name).absolute()

    def shared_work(self, seed: int) -> Work:
        return self._work(seed, "shared", SHARED_STAGES, ())

    def arm_work(self, seed: int, arm: Arm) -> Work:
        """The arm's own stages and its evaluation. Raises UserError where an arm that it matches is not evaluated."""
        overrides = [*arm.overrides, f"evaluate.policies=[{arm.policy}]", f"evaluate.split={self.split}"]
        if arm.matches is not None:
            overrides.append(f"sft.max_kl={matched_kl(self.folder(seed, arm.matches)):.6g}")
        return self._work(seed, arm.name, (*arm.stages, "evaluate"), overrides)

    def _work(self, seed: int, name: str, stages: tuple[str, ...], overrides: Sequence[str]) -> Work:
        folder = self.folder(seed, name)
        words = (f"experiment={self.experiment}", f"run_dir={folder}", f"seed={seed}", *self.overrides, *overrides)
        return Work(name, seed, folder, stages, words)

    def link(self, seed: int, arm: Arm) -> None:
        """Give the arm's folder what its seed shares."""
        folder = self.folder(seed, arm.name)
        folder.mkdir(parents=True, exist_ok=True)
        for stage in SHARED_STAGES:
            if stage != "profile" or not arm.own_profile:
                _link(folder / stage, Path("..") / "shared" / stage)

    def run(self, work: Work) -> None:
        """Do what is not done yet. Raises UserError where a stage fails."""
        code = self.start([*work.overrides, f"run.stages=[{','.join(work.stages)}]"])
        if code:
            raise UserError(
                f"{work.folder}: `pivotrl run` ended with exit {code}; the same command continues from there"
            )

    def require_start(self, seed: int) -> None:
        """Raises UserError where a record of this seed is of another pi_0, before the arms have cost their hours."""
        shared = self.folder(seed, "shared")
        ours = start_policy(read_json(shared / "profile" / "summary.json"))
        for path in sorted(self.records.glob("*.json")):
            record = read_json(path)
            if (record.get("experiment"), record.get("seed")) != (self.experiment, seed):
                continue
            if record["start_policy"] != ours:
                raise UserError(
                    f"{path} starts from another policy ({record['start_policy']}) than {shared} "
                    f"({ours}), so that seed {seed} could not be compared. One seed gives the same pi_0 only with the "
                    "same settings, libraries and kind of processor: take another seed, or another folder (--records)"
                )

    def record(self, seed: int, arm: Arm) -> Path:
        """Write the record of an arm that has run to its end; returns its place."""
        path = record_path(self.records, self.experiment, arm.name, seed, self.split)
        folder, shared = self.folder(seed, arm.name), self.folder(seed, "shared")
        write_json(path, make_record(self.experiment, arm, seed, folder, shared))
        return path


def _link(link: Path, target: Path) -> None:
    if not link.is_symlink() and not link.exists():
        link.symlink_to(target)
