"""Several processes on one machine: the node check over gloo, and launch/local.sh."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pivotrl.ports import free_port

ROOT = Path(__file__).parents[2]


def node_check(folder: Path, ranks: list[int], world: int, seconds: int, **extra: str) -> list[tuple[int, str]]:
    """(exit code, output) of the processes `ranks` of a job of `world`, one a node; the others never start."""
    env = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "PIVOTRL_HOSTS": ",".join(f"node{i}" for i in range(world)),
        "PIVOTRL_CHECK_SECONDS": str(seconds),
        "PIVOTRL_CHECK_DIR": str(folder),
        "SLURM_NTASKS": str(world),
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "launch.node_check"],
            cwd=ROOT,
            env={**env, "SLURM_PROCID": str(rank), **(extra if rank else {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ranks
    ]
    out = [p.communicate(timeout=seconds + 60)[0] for p in processes]
    return [(p.returncode, text) for p, text in zip(processes, out, strict=True)]


@pytest.mark.parallel
def test_well_nodes_pass(tmp_path: Path) -> None:
    done = node_check(tmp_path, [0, 1], 2, 90)
    assert [code for code, _ in done] == [0, 0], done
    assert "2 nodes, 2 processes are well" in done[0][1]
    assert list((tmp_path / ".node_check").iterdir()) == []


@pytest.mark.parallel
def test_a_silent_node_is_named_within_the_limit(tmp_path: Path) -> None:
    done = node_check(tmp_path, [0, 2], 3, 40)
    assert [code for code, _ in done] == [4, 4], done
    assert "node node1 (process 1) did not answer within 40 s" in done[0][1]


@pytest.mark.parallel
def test_a_node_that_cannot_reach_the_first(tmp_path: Path) -> None:
    code, text = node_check(tmp_path, [1], 2, 20)[0]
    assert code == 4
    assert "(process 1)" in text
    assert "connecting to 127.0.0.1" in text


@pytest.mark.parallel
def test_local_processes_share_a_stage(tmp_path: Path) -> None:
    command = [ROOT / "launch" / "local.sh", "2", "turns", "experiment=smoke", "trajectories.tasks=6"]
    env = {**os.environ, "PIVOTRL_PYTHON": sys.executable}
    done = subprocess.run(
        [*command, f"run_dir={tmp_path}/run"], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("turns: done in") == 1
    again = subprocess.run(
        [*command, f"run_dir={tmp_path}/run"], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert again.stdout.count("done before, skipped") == 1
