"""A throw-away SLURM cluster on loopback: two emulated nodes with fake GPUs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

BOX = Path(__file__).parent / "box"
ROOT = Path(__file__).parents[2]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "unshare")


@dataclass(frozen=True)
class Slurm:
    env: dict[str, str]
    folder: Path

    def call(self, *command: str, cwd: Path = ROOT, **extra: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=cwd, env={**self.env, **extra}, capture_output=True, text=True, timeout=240, check=False
        )

    def job(self, *arguments: str, **extra: str) -> int:
        """Submit, wait for the end, and give the job's exit code. (`sbatch --wait` looks every 10 s only.)"""
        sent = self.call("sbatch", "--parsable", *arguments, **extra)
        assert sent.returncode == 0, sent.stderr
        return self.wait(sent.stdout.strip())

    def wait(self, job: str, seconds: float = 240) -> int:
        """The exit code of a job once it has ended."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            shown = self.call("scontrol", "show", "job", job).stdout
            state = re.search(r"JobState=(\w+)", shown)
            if state and state[1] not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED"):
                code = re.search(r"ExitCode=(\d+):(\d+)", shown)
                assert code
                return int(code[1]) or int(code[2])
            time.sleep(0.3)
        self.call("scancel", job)  # those that wait for it go with it, and the next test finds free nodes
        raise AssertionError(f"job {job} did not end in {seconds} s")


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    missing = [p for p in PROGRAMS if shutil.which(p) is None and not Path("/usr/sbin", p).exists()]
    if missing or os.geteuid() != 0:
        why = f"{', '.join(missing)} missing" if missing else "needs root"
        pytest.skip(f"no SLURM: {why} (apt-get install --no-install-recommends slurm-wlm munge)")
    folder = Path(f"/tmp/pivotrl-slurm-{os.getpid()}")  # short: unix sockets live in it
    env = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH"))},
        "SLURMBOX_DIR": str(folder),
        "SLURMBOX_PORT": str(17000 + os.getpid() % 3900 * 4),  # below those that the system hands out itself
        "SLURMBOX_CPUS": "128",
        "SLURMBOX_TIMEOUT": "75",  # what runs beside it may take the processors
        "SLURMBOX_KILLWAIT": "20",
        "SLURMBOX_PARTITIONS": "main urgent",
        "SLURMBOX_EXTRA_CONF": "PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE",
        "SLURM_CONF": str(folder / "slurm.conf"),
        "PIVOTRL_PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
        "PATH": os.environ["PATH"] + ":/usr/sbin",
    }
    started = subprocess.run([BOX / "up.sh"], env=env, capture_output=True, text=True, timeout=150, check=False)
    if started.returncode == 2:
        pytest.skip(f"no SLURM: {started.stderr.strip()}")
    try:
        assert started.returncode == 0, started.stdout + started.stderr
        yield Slurm(env, tmp_path_factory.mktemp("jobs"))
    finally:
        subprocess.run([BOX / "down.sh"], env={**env, "SLURMBOX_PURGE": "1"}, timeout=150, check=False)
