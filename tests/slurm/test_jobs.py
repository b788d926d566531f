"""Scripts and launcher on a real SLURM: what it accepts, a job over two nodes, a chain, a node that never joins."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import pytest

from tests.slurm.conftest import ROOT, Slurm

SCRIPTS = sorted(p.name for p in (ROOT / "slurm").glob("*.sh") if p.name not in ("common.sh", "pipeline.sh"))
CPU = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=0")
LIGHT = ("experiment=smoke", "trajectories.tasks=6", "cluster.check_seconds=90")


@pytest.mark.parametrize("name", SCRIPTS)
def test_slurm_accepts_each_script(slurm: Slurm, name: str) -> None:
    arguments = ["turns"] if name == "stage.sh" else []
    done = slurm.call("sbatch", "--test-only", "--nodes=2", f"slurm/{name}", *arguments)
    assert done.returncode == 0, done.stderr
    assert "using 16 processors" in done.stderr or "to start at" in done.stderr
    refused = slurm.call("sbatch", "--test-only", "--nodes=3", f"slurm/{name}", *arguments)
    assert refused.returncode != 0  # two nodes are there: the answer above means something


@pytest.mark.parametrize("cluster", ["local_cpu", "h100", "h200", "b200"])
def test_slurm_accepts_what_launch_renders(slurm: Slurm, cluster: str) -> None:
    code = (
        "import sys; from pathlib import Path; from launch import checks, jobs;"
        "from pivotrl.configuration import load_config; o = sys.argv[1:]; c = load_config(o);"
        "print(*checks.scheduler(c, jobs.jobs_for('pipeline'), o), sep='\\n')"
    )
    ask = (sys.executable, "-c", code, f"cluster={cluster}", "cluster.qos=normal")
    assert slurm.call(*ask, "cluster.nodes=2").stdout.strip() == ""
    said = slurm.call(*ask, "cluster.nodes=2", "cluster.partition=huge").stdout
    assert "sbatch refuses the job profile" in said
    assert "invalid partition" in said


def test_a_stage_on_two_nodes(slurm: Slurm) -> None:
    log, run = slurm.folder / "turns.log", slurm.folder / "run"
    command = (*CPU, f"--output={log}", "slurm/stage.sh", "turns", *LIGHT, f"run_dir={run}")
    code = slurm.job(*command, WANDB_API_KEY="k-allowed", OTHER_SECRET="k-hidden")
    text = log.read_text()
    assert code == 0, text
    assert "2 processes on node1,node2" in text
    assert "node check: 2 nodes, 2 processes are well" in text
    assert text.count("turns: done in") == 1  # one process keeps the books
    assert json.loads((run / "turns" / "summary.json").read_text())["turns"]["kept"] > 0
    assert "k-allowed" not in text
    assert slurm.job(*command) == 0
    assert log.read_text().count("turns: done before, skipped") == 1


def test_only_allowed_variables_reach_a_job(slurm: Slurm) -> None:
    python, seen = slurm.folder / "python-env", slurm.folder / "seen"
    python.write_text(f"#!/bin/bash\nenv > {seen}\necho 'python=true run_dir=/ gpus_per_node=0 check_seconds=5'\n")
    python.chmod(0o755)
    command = (*CPU, f"--output={slurm.folder}/env.log", "slurm/stage.sh", "turns")
    slurm.job(*command, PIVOTRL_PYTHON=str(python), WANDB_API_KEY="k-allowed", OTHER_SECRET="k-hidden")
    assert "WANDB_API_KEY=k-allowed" in seen.read_text()
    assert "k-hidden" not in seen.read_text()


def test_launch_submits(slurm: Slurm) -> None:
    run = slurm.folder / "launched"
    launch = (sys.executable, "-m", "pivotrl.cli", "launch", "turns", *LIGHT, "cluster.nodes=2", f"run_dir={run}")
    done = slurm.call(*launch)
    assert done.returncode == 0, done.stdout + done.stderr
    job = re.search(r"turns: job (\d+)", done.stdout)
    assert job
    assert slurm.wait(job[1]) == 0, _logs(run)
    assert (run / "turns" / "summary.json").is_file()
    assert "node check: 2 nodes" in _logs(run)
    refused = slurm.call(*launch, "cluster.nodes=3")
    assert refused.returncode == 2
    assert "sbatch refuses the job turns" in refused.stderr


def test_pipeline_chains(slurm: Slurm) -> None:
    overrides = (*LIGHT, f"run_dir={slurm.folder}/chain")
    dry = slurm.call("slurm/pipeline.sh", "--dry-run", "--nodes=2", *overrides)
    assert dry.returncode == 0, dry.stderr
    assert "--dependency=afterok:<profile_pivot>" in dry.stderr
    assert "--dependency=afterok:<train_pivot>:<sft>" in dry.stderr
    assert slurm.call("squeue", "-h").stdout == ""
    sent = slurm.call("slurm/pipeline.sh", "--hold", "--nodes=1", f"--output={slurm.folder}/%x.log", *overrides)
    assert sent.returncode == 0, sent.stderr
    ids = re.findall(r"(profile|train|sft|evaluate) (\d+)", sent.stdout)
    job = dict(ids)
    waiting = dict(line.split(" ") for line in slurm.call("squeue", "-h", "-o", "%i %E").stdout.splitlines())
    slurm.call("scancel", *job.values())
    assert waiting[job["train"]] == waiting[job["sft"]] == f"afterok:{job['profile']}(unfulfilled)"
    assert set(re.findall(r"afterok:(\d+)", waiting[job["evaluate"]])) == {job["train"], job["sft"]}


def test_a_job_whose_stage_fails_ends_with_its_code(slurm: Slurm) -> None:
    log = slurm.folder / "bad.log"
    assert slurm.job(*CPU, f"--output={log}", "slurm/stage.sh", "turns", "seeed=1") == 2
    assert "did you mean 'seed'" in log.read_text()


def test_a_node_that_never_joins_is_named(slurm: Slurm) -> None:
    """Its processes start and never say anything, as with a dead network or file system."""
    python, log = slurm.folder / "python", slurm.folder / "silent.log"
    python.write_text(f'#!/bin/bash\n[ "$(hostname)" = node2 ] && exec sleep 300\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    overrides = (*LIGHT, f"cluster.python={python}", "cluster.check_seconds=25", f"run_dir={slurm.folder}/silent")
    started = time.monotonic()
    code = slurm.job(*CPU, f"--output={log}", "slurm/stage.sh", "turns", *overrides)
    text = log.read_text()
    assert code == 4, text
    assert "node node2 (process 1) did not answer within 25 s" in text
    assert time.monotonic() - started < 25 + 40
    assert not Path(slurm.folder, "silent", "turns").exists()


def _logs(run: Path) -> str:
    return "\n".join(p.read_text() for p in (run / "slurm").glob("*.log"))
