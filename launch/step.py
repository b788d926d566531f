"""One process of one stage inside a job: `python -m launch.step STAGE [overrides]`, started by srun or torchrun.

A stage whose result is up to date is skipped, as `pivotrl run` does; a stage of one process runs in the first alone.
"""

from __future__ import annotations

import os
import sys

from pivotrl import stopping

if __name__ == "__main__":
    stopping.leave_on_warning()  # before what takes long to import

from pivotrl import cli, stage_state
from pivotrl.configuration import load_config
from pivotrl.errors import UserError
from pivotrl.io import keeps_books
from pivotrl.stages import STAGES


def rank_from_slurm() -> None:
    """Give this process torch's variables from srun's, where torchrun has not set them."""
    if "RANK" in os.environ or "SLURM_PROCID" not in os.environ:
        return
    env = os.environ
    env["RANK"], env["LOCAL_RANK"] = env["SLURM_PROCID"], env["SLURM_LOCALID"]
    env["WORLD_SIZE"] = env.get("SLURM_STEP_NUM_TASKS") or env["SLURM_NTASKS"]
    if env["WORLD_SIZE"] == "1":  # alone: the stages then ask for no peers
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            del env[name]


def main() -> int:
    stage, overrides = sys.argv[1], sys.argv[2:]
    if stage not in STAGES:
        print(f"launch.step: no stage {stage!r}", file=sys.stderr)
        return 2
    rank_from_slurm()
    first = keeps_books()
    if not first and not STAGES[stage].parallel:
        return 0
    try:
        done = stage_state.up_to_date(load_config(overrides), stage)
    except UserError as error:
        print(f"pivotrl {stage}: {error}", file=sys.stderr)
        stopping.leave_failure(2)
        return 2
    if done:
        if first:
            print(f"{stage}: done before, skipped", flush=True)
        return 0
    code = cli.main([stage, *overrides])
    if code == 0:
        stopping.kept()
    elif code != stopping.EXIT_STOPPED:
        stopping.leave_failure(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
