"""`python -m experiments.study`: arms x seeds, resumable. What is done is skipped, what was interrupted goes on.

<root>/<experiment>/seed<k>/shared/   trajectories, warm-up (pi_0) and profile, made once a seed
<root>/<experiment>/seed<k>/<arm>/    links to those, the arm's own stages, and its evaluation
<records>/<experiment>-<arm>-seed<k>.json   what tables and figures are made of (experiments/record.py)
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.arms import Arm, chosen
from experiments.record import make_record, matched_kl, record_path
from pivotrl.errors import UserError
from pivotrl.io import write_json
from pivotrl.tracking.progress import duration

SHARED_STAGES = ("turns", "warmup", "profile")
Start = Callable[[Sequence[str]], int]  # overrides of `pivotrl run` -> exit code


def run_pivotrl(overrides: Sequence[str]) -> int:
    return subprocess.run([sys.executable, "-m", "pivotrl.cli", "run", *overrides], check=False).returncode


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

    def shared(self, seed: int) -> Path:
        """Make, or complete, what the arms of a seed share. Raises UserError where a stage fails."""
        folder = self.folder(seed, "shared")
        self._run(folder, seed, SHARED_STAGES, ())
        return folder

    def arm(self, seed: int, arm: Arm) -> Path:
        """Run an arm to its end and write its record; returns the record's place."""
        folder, shared = self.folder(seed, arm.name), self.folder(seed, "shared")
        folder.mkdir(parents=True, exist_ok=True)
        for stage in SHARED_STAGES:
            if stage != "profile" or not arm.own_profile:
                _link(folder / stage, Path("..") / "shared" / stage)
        overrides = [*arm.overrides, f"evaluate.policies=[{arm.policy}]", f"evaluate.split={self.split}"]
        if arm.matches is not None:
            overrides.append(f"sft.max_kl={matched_kl(self.folder(seed, arm.matches)):.6g}")
        self._run(folder, seed, (*arm.stages, "evaluate"), overrides)
        path = record_path(self.records, self.experiment, arm.name, seed, self.split)
        write_json(path, make_record(self.experiment, arm, seed, folder, shared))
        return path

    def _run(self, folder: Path, seed: int, stages: Sequence[str], overrides: Sequence[str]) -> None:
        words = [f"experiment={self.experiment}", f"run_dir={folder}", f"seed={seed}", *self.overrides, *overrides]
        code = self.start([*words, f"run.stages=[{','.join(stages)}]"])
        if code:
            raise UserError(f"{folder}: `pivotrl run` ended with exit {code}; the same command continues from there")


def _link(link: Path, target: Path) -> None:
    if not link.is_symlink() and not link.exists():
        link.symlink_to(target)


def run_study(study: Study, arms: Sequence[Arm], seeds: Sequence[int], hours: float | None = None) -> list[Path]:
    """All arms of one seed before the next, so that what is there after any time is complete for some seeds.

    No new arm is begun after `hours`. Returns the records written.
    """
    started = time.monotonic()
    written: list[Path] = []
    for seed in seeds:
        study.shared(seed)
        for arm in arms:
            if hours is not None and time.monotonic() - started > hours * 3600:
                print(
                    f"study: {hours:g} h are over; the same command goes on with {arm.name} of seed {seed}", flush=True
                )
                return written
            begun = time.monotonic()
            written.append(study.arm(seed, arm))
            print(f"study: seed {seed}, {arm.name}: {duration(time.monotonic() - begun)} -> {written[-1]}", flush=True)
    return written


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m experiments.study", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--experiment", default="study_outfitters", help="a file of conf/experiment")
    parser.add_argument("--arms", default="main", help="names, or main, sweeps; separated by commas")
    parser.add_argument("--seeds", default="0,1,2", help="separated by commas")
    parser.add_argument("--root", type=Path, default=Path("runs/study"))
    parser.add_argument("--records", type=Path, default=Path("docs/results"))
    parser.add_argument("--split", choices=("test", "validation"), default="test", help="choices: on validation alone")
    parser.add_argument("--hours", type=float, help="begin no new arm after this time")
    parser.add_argument("overrides", nargs="*", help="further key=value for every run, e.g. evaluate.ood_path=DIR")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    try:
        study = Study(args.experiment, args.root, args.records, args.split, tuple(args.overrides))
        run_study(study, chosen(args.arms.split(",")), [int(seed) for seed in args.seeds.split(",")], args.hours)
    except UserError as error:
        print(f"study: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
