"""`python -m experiments.study`: arms x seeds, resumable. What is done is skipped, what was interrupted goes on.

<root>/<experiment>/seed<k>/shared/   trajectories, warm-up (pi_0) and profile, made once a seed
<root>/<experiment>/seed<k>/<arm>/    links to those, the arm's own stages, and its evaluation
<records>/<experiment>-<arm>-seed<k>.json   what tables and figures are made of (experiments/record.py)
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from experiments.arms import Arm, chosen
from experiments.cluster import submit_study
from experiments.plan import Study
from pivotrl.configuration import search_folder
from pivotrl.errors import UserError
from pivotrl.tracking.progress import duration


def run_study(study: Study, arms: Sequence[Arm], seeds: Sequence[int], hours: float | None = None) -> list[Path]:
    """All arms of one seed before the next, so that what is there after any time is complete for some seeds.

    No new arm is begun after `hours`. Returns the records written.
    """
    started = time.monotonic()
    written: list[Path] = []
    for seed in seeds:
        study.run(study.shared_work(seed))
        study.require_start(seed)
        for arm in arms:
            if hours is not None and time.monotonic() - started > hours * 3600:
                print(
                    f"study: {hours:g} h are over; the same command goes on with {arm.name} of seed {seed}", flush=True
                )
                return written
            begun = time.monotonic()
            study.link(seed, arm)
            study.run(study.arm_work(seed, arm))
            written.append(study.record(seed, arm))
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
    parser.add_argument("--slurm", action="store_true", help="one job an arm; again: records, and what failed or waits")
    parser.add_argument("--dry-run", action="store_true", help="with --slurm: check, and tell what would be submitted")
    parser.add_argument("--config-dir", type=Path, help="a folder of your own groups (experiment/, cluster/, ...)")
    parser.add_argument("overrides", nargs="*", help="further key=value for every run, e.g. evaluate.ood_path=DIR")
    return parser.parse_intermixed_args(arguments)  # overrides before and after options


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    searched = [search_folder(args.config_dir)] if args.config_dir else []
    try:
        study = Study(args.experiment, args.root, args.records, args.split, (*searched, *args.overrides))
        arms, seeds = chosen(args.arms.split(",")), [int(seed) for seed in args.seeds.split(",")]
        if args.slurm:
            submit_study(study, arms, seeds, args.dry_run)
        else:
            run_study(study, arms, seeds, args.hours)
    except UserError as error:
        print(f"study: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
