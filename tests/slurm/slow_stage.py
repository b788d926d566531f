"""A stage that takes its time: it counts steps into a file, goes on from there, and stops well when told. Not a test.

`python slow_stage.py STAGE run_dir=FOLDER`, in the place of launch.step, under srun or torchrun. A file
FOLDER/kill-RANK makes that rank kill itself in its fifth step, once; FOLDER/wait-RANK makes it wait there until it is
told to stop, once; FOLDER/short is a deadline that comes before the first step, time after time. To save
(FOLDER/saved-RANK) takes some seconds.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from pivotrl.config import Checkpoint
from pivotrl.stopping import EXIT_STOPPED, Stopped, held, kept, leave_note, requested, watching

STEPS = 20


def main() -> int:
    folder = Path(next(word for word in sys.argv if word.startswith("run_dir=")).removeprefix("run_dir="))
    names = ("RANK", "WORLD_SIZE") if "RANK" in os.environ else ("SLURM_PROCID", "SLURM_NTASKS")
    rank, world = (os.environ[name] for name in names)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with watching(Checkpoint()), held():
            try:
                count(folder, rank, int(world))
            except Stopped:
                time.sleep(2.5 if rank != "0" else 4)  # srun tells the first to end while it saves
                (folder / f"saved-{rank}").touch()
                raise
    except Stopped as stopped:
        leave_note(stopped.why)
        return EXIT_STOPPED
    return 0


def count(folder: Path, rank: str, world: int) -> None:
    """The steps that are still to be done."""
    log, kill, wait = (folder / f"{what}-{rank}" for what in ("steps", "kill", "wait"))
    done = len(log.read_text().splitlines()) if log.exists() else 0
    if (folder / "short").exists():
        raise Stopped("the deadline")
    for step in range(done, STEPS):
        if step == 5 and kill.exists():
            while len(list(folder.glob("steps-*"))) < world:
                time.sleep(0.1)
            kill.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.2)
        while step == 5 and wait.exists() and not requested():
            time.sleep(0.1)
        with log.open("a") as file:
            file.write(f"{step}\n")
        kept()
        if why := requested():
            wait.unlink(missing_ok=True)
            raise Stopped(why)


if __name__ == "__main__":
    sys.exit(main())
