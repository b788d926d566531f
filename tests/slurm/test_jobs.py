"""Scripts and launcher on a real SLURM: what it accepts, jobs over two nodes, a chain, nodes and jobs that die."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pivotrl.io import read_jsonl
from pivotrl.models.builtin import resolve_model
from tests.slurm.conftest import ROOT, Slurm
from tests.slurm.slow_stage import STEPS
from tests.tiny_models import save_tiny

NOT_STAGES = ("common.sh", "convert.sh", "pipeline.sh")
SCRIPTS = sorted(p.name for p in (ROOT / "slurm").glob("*.sh") if p.name not in NOT_STAGES)
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


def test_slurm_accepts_a_conversion(slurm: Slurm) -> None:
    assert slurm.call("sbatch", "--test-only", "slurm/convert.sh").returncode == 0
    assert slurm.call("sbatch", "--test-only", "--cpus-per-task=1000", "slurm/convert.sh").returncode != 0


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
    assert not any(b"k-allowed" in path.read_bytes() for path in run.rglob("*") if path.is_file())
    assert slurm.job(*command) == 0
    assert log.read_text().count("turns: done before, skipped") == 1


def test_only_allowed_variables_reach_a_job(slurm: Slurm) -> None:
    python, seen = slurm.folder / "python-env", slurm.folder / "seen"
    python.write_text(
        f"#!/bin/bash\nenv > {seen}\necho 'python=true run_dir={seen}-run gpus_per_node=0'"
        " check_seconds=60 max_fruitless_starts=1\n"
    )
    python.chmod(0o755)
    command = (*CPU, f"--output={slurm.folder}/env.log", "slurm/stage.sh", "turns")
    slurm.job(*command, PIVOTRL_PYTHON=str(python), WANDB_API_KEY="k-allowed", OTHER_SECRET="k-hidden")
    assert "WANDB_API_KEY=k-allowed" in seen.read_text()
    assert "k-hidden" not in seen.read_text()


def test_launch_submits(slurm: Slurm) -> None:
    run = slurm.folder / "launched"
    launch = (sys.executable, "-m", "pivotrl.cli", "launch", "turns", *LIGHT, "cluster.nodes=2", f"run_dir={run}")
    done = slurm.call(*launch, "--follow")
    assert done.returncode == 0, done.stdout + done.stderr + _logs(run)
    assert re.search(r"^turns: job \d+", done.stdout, re.MULTILINE)
    assert "-- turns: COMPLETED" in done.stdout
    assert "turns | turns: done in" in done.stdout
    assert (run / "turns" / "summary.json").is_file()
    assert "node check: 2 nodes" in _logs(run)
    refused = slurm.call(*launch, "cluster.nodes=3")
    assert refused.returncode == 2
    assert "sbatch refuses the job turns" in refused.stderr


@pytest.fixture(scope="module")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random mixture of experts with SmolLM2's tokenizer: every stage is real, only the model is small."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tiny_moe")
    save_tiny("qwen3_moe", folder, vocab_size=49152, head_dim=32, max_position_embeddings=8192, initializer_range=0.02)
    AutoTokenizer.from_pretrained(str(resolve_model("builtin:smollm2-135m"))).save_pretrained(str(folder))
    return folder


def test_pipeline_runs_to_its_end_on_two_nodes(slurm: Slurm, tiny_moe: Path) -> None:
    """Profile, train, SFT and evaluate, in jobs of two processes; what each leaves is whole and written once."""
    run = slurm.folder / "chain"
    overrides = (
        *LIGHT,
        "model=tiny_moe",
        f"model.path={tiny_moe}",
        "domain.verifier.name=tests.parity_verifier:Parity",
        "precision=fp32",
        "warmup.steps=0",
        "select.set=mixed",
        "profile.rollouts_per_turn=4",
        "algorithm.optimizer.learning_rate=1e-3",
        "generation.kv_cache_gib=0.25",
        "evaluate.trials=0",
        "checkpoint.keep_every=1",
        f"run_dir={run}",
    )
    dry = slurm.call("slurm/pipeline.sh", "--dry-run", "--nodes=2", *overrides)
    assert dry.returncode == 0, dry.stderr
    assert "--dependency=afterok:<profile_pivot>" in dry.stderr
    assert "--dependency=afterok:<train_pivot>:<sft>" in dry.stderr
    assert slurm.call("squeue", "-h").stdout == ""
    flags = ("--exclusive", f"--output={slurm.folder}/%x.log")  # one job at a time: the machine is small
    sent = slurm.call("slurm/pipeline.sh", *flags, *CPU, *overrides)
    assert sent.returncode == 0, sent.stderr
    job = dict(re.findall(r"(profile|train|sft|evaluate) (\d+)", sent.stdout))
    waiting = dict(line.split(" ") for line in slurm.call("squeue", "-h", "-o", "%i %E").stdout.splitlines())
    assert waiting[job["train"]] == waiting[job["sft"]] == f"afterok:{job['profile']}(unfulfilled)"
    assert set(re.findall(r"afterok:(\d+)", waiting[job["evaluate"]])) == {job["train"], job["sft"]}
    for name in ("profile", "train", "sft", "evaluate"):
        assert slurm.wait(job[name], 400) == 0, (slurm.folder / f"pivotrl-{name}.log").read_text()
    log = (slurm.folder / "pivotrl-train.log").read_text()
    assert log.count("train: done in") == 1
    assert "profile: done before, skipped" in log
    profiled = json.loads((run / "profile" / "summary.json").read_text())["rollouts"]
    rows = {name: list(read_jsonl(run / name)) for name in ("profile/rollouts.jsonl", "train/rollouts.jsonl")}
    assert len(rows["profile/rollouts.jsonl"]) == profiled > 0
    assert len(rows["train/rollouts.jsonl"]) == 2 * 2 * 2  # steps x pivots x group
    assert [row["step"] for row in read_jsonl(run / "train" / "metrics.jsonl")] == [0, 1]
    assert [p.name for p in sorted((run / "train" / "state").iterdir())] == ["step-00000001", "step-00000002"]
    for place in ("train/checkpoint", "sft/checkpoint"):
        assert (run / place / "model.safetensors").stat().st_size > 1000
    policies = json.loads((run / "evaluate" / "summary.json").read_text())["policies"]
    assert set(policies) == {"base", "sft", "pivotrl"}
    assert (run / "report" / "report.html").is_file()


def test_a_study_goes_on_with_each_call(slurm: Slurm, tiny_moe: Path) -> None:
    """What is shared, then two arms, as jobs of two processes; the last call finds all done and records the arms."""
    command = (
        *(sys.executable, "-m", "experiments.study", "--slurm", "--experiment", "study_outfitters"),
        *("--arms", "base,e2e", "--seeds", "0"),
        *("--root", str(slurm.folder / "study"), "--records", str(slurm.folder / "records")),
        *("model=tiny_moe", f"model.path={tiny_moe}", "precision=fp32", "model.context_length=1536", "warmup.steps=0"),
        *("trajectories.tasks=12", "sampling.max_new_tokens=8", "profile.max_turns=2", "profile.rollouts_per_turn=2"),
        *("environment.max_turns=2", "evaluate.tasks=2", "evaluate.trials=0", "evaluate.drift=0", "watch.every=0"),
        *("end_to_end.steps=1", "end_to_end.tasks_per_step=2", "end_to_end.group_size=3"),
        *("generation.kv_cache_gib=0.25", "cluster.nodes=2", "cluster.exclusive=true", "cluster.check_seconds=90"),
    )
    first = slurm.call(*command)
    assert first.returncode == 0, first.stderr
    jobs = dict(re.findall(r"(\w+): job (\d+)", first.stdout))
    assert f"base: job {jobs['base']} after {jobs['shared']}, evaluate" in first.stdout
    seed = slurm.folder / "study" / "study_outfitters" / "seed0"
    for name, job in jobs.items():
        assert slurm.wait(job, 400) == 0, _logs(seed / name)
    episodes = list(read_jsonl(seed / "e2e" / "e2e" / "episodes.jsonl"))
    assert [row["trial"] for row in episodes] == [0, 1, 2, 0, 1, 2]  # each played by one of the two processes
    last = slurm.call(*command)
    assert last.returncode == 0, last.stderr
    assert re.search(r"shared: done\n  base: done -> .*\n  e2e: done -> .*\nEvery arm is recorded", last.stdout)
    record = json.loads((slurm.folder / "records" / "study_outfitters-e2e-seed0.json").read_text())
    assert record["training"]["rollouts"] == sum(row["turns"] for row in episodes)
    assert record["profile"]["rollouts"] == 4


def slow(slurm: Slurm, run: Path) -> tuple[str, ...]:
    """The end of an sbatch command whose stage only counts (slow_stage.py); node checks have tests of their own."""
    python, stage = slurm.folder / "python-slow", ROOT / "tests" / "slurm" / "slow_stage.py"
    python.write_text(
        f'#!/bin/bash\ncase "$2" in launch.node_check) exit 0 ;; esac\nshift 2\nexec {sys.executable} {stage} "$@"\n'
    )
    python.chmod(0o755)
    return "slurm/stage.sh", "train", "experiment=smoke", f"cluster.python={python}", f"run_dir={run}"


def steps(run: Path) -> list[list[int]]:
    return [[int(line) for line in (run / f"steps-{rank}").read_text().split()] for rank in range(2)]


def saved(run: Path) -> bool:
    """Whether both processes had the time to save."""
    return all((run / f"saved-{rank}").exists() for rank in range(2))


def waiting(slurm: Slurm, name: str) -> tuple[Path, Path]:
    """Run directory and log of a job whose two processes wait in their fifth step until they are told to stop."""
    run = slurm.folder / name
    run.mkdir()
    for rank in range(2):
        (run / f"wait-{rank}").touch()
    return run, slurm.folder / f"{name}.log"


def submit(slurm: Slurm, run: Path, log: Path, *flags: str) -> str:
    """A waiting job, once both processes wait."""
    job = slurm.call("sbatch", "--parsable", *CPU, *flags, f"--output={log}", *slow(slurm, run)).stdout.strip()
    _until(lambda: all((run / f"steps-{rank}").exists() for rank in range(2)) and steps(run) == [list(range(5))] * 2)
    return job


def test_a_warning_before_the_limit_saves_requeues_and_goes_on(slurm: Slurm) -> None:
    run, log = waiting(slurm, "warned")
    # SLURM looks every 30 s, so that the warning comes in the second half of the first minute.
    code = slurm.job(*CPU, "--time=2", "--signal=USR1@60", f"--output={log}", *slow(slurm, run))
    text = log.read_text()
    assert code == 0, text
    assert "train saved and stopped (SIGUSR1)" in text
    assert "(start 2)" in text
    assert steps(run) == [list(range(STEPS))] * 2


@pytest.mark.parametrize("command", ["scancel --batch --signal=USR1", "scontrol requeue"])
def test_told_to_stop_it_saves_queues_again_and_goes_on(slurm: Slurm, command: str) -> None:
    """By a signal to the script alone (as `sbatch --signal=B:USR1@600` sends it), and by an administrator."""
    run, log = waiting(slurm, command.split()[0])
    job = submit(slurm, run, log)
    slurm.call(*command.split(), job)
    assert slurm.wait(job) == 0, log.read_text()
    assert "(start 2)" in log.read_text()
    assert saved(run)
    assert steps(run) == [list(range(STEPS))] * 2
    assert list((run / ".jobs").iterdir()) == []


def test_a_preempted_job_saves_within_its_grace_time_and_goes_on(slurm: Slurm) -> None:
    for change in ("main GraceTime=60", "urgent PriorityTier=10"):
        assert slurm.call("scontrol", "update", *f"PartitionName={change}".split()).returncode == 0
    run, log = waiting(slurm, "preempted")
    job = submit(slurm, run, log, "--exclusive")
    assert slurm.job("--partition=urgent", "--nodes=2", "--output=/dev/null", "--wrap=true") == 0
    assert slurm.wait(job) == 0, log.read_text()
    assert "train saved and stopped (SIGTERM)" in log.read_text()
    assert "(start 2)" in log.read_text()
    assert saved(run)
    assert steps(run) == [list(range(STEPS))] * 2


def test_a_job_that_never_gets_anywhere_is_not_queued_for_ever(slurm: Slurm) -> None:
    run, log = slurm.folder / "short", slurm.folder / "short.log"
    run.mkdir()
    (run / "short").touch()
    assert slurm.job(*CPU, f"--output={log}", *slow(slurm, run), "cluster.max_fruitless_starts=2") == 3
    text = log.read_text()
    assert re.findall(r"\(start (\d)\)", text) == ["1", "2"]
    assert "2 starts in a row kept nothing (no step saved, no stage done): it is not queued again" in text


def test_scancel_saves_and_does_not_requeue(slurm: Slurm) -> None:
    run, log = waiting(slurm, "cancelled")
    job = submit(slurm, run, log)
    slurm.call("scancel", job)
    slurm.wait(job)
    assert "JobState=CANCELLED" in slurm.call("scontrol", "show", "job", job).stdout
    assert saved(run)
    assert steps(run) == [list(range(6))] * 2
    assert slurm.job(*CPU, f"--output={log}", *slow(slurm, run)) == 0, log.read_text()
    assert steps(run) == [list(range(STEPS))] * 2


def test_a_killed_rank_ends_the_job_at_once_and_the_next_goes_on(slurm: Slurm) -> None:
    run, log = waiting(slurm, "killed")
    (run / "kill-1").touch()
    command = (*CPU, f"--output={log}", *slow(slurm, run))
    assert slurm.job(*command) in (137, 143), log.read_text()
    assert "task 1: Killed" in log.read_text()
    assert len(steps(run)[1]) == 5
    assert len(steps(run)[0]) <= 6  # the other was not left to wait for ever
    for rank in range(2):
        (run / f"wait-{rank}").unlink(missing_ok=True)
    assert slurm.job(*command) == 0, log.read_text()
    assert steps(run) == [list(range(STEPS))] * 2


def test_a_job_whose_stage_fails_ends_with_its_code(slurm: Slurm) -> None:
    log = slurm.folder / "bad.log"
    assert slurm.job(*CPU, f"--output={log}", "slurm/stage.sh", "turns", "seeed=1") == 2
    assert "did you mean 'seed'" in log.read_text()


def test_a_node_that_never_joins_is_named(slurm: Slurm) -> None:
    """Its processes start and never say anything, as with a dead network or file system."""
    python, log = slurm.folder / "python", slurm.folder / "silent.log"
    python.write_text(f'#!/bin/bash\n[ "$(hostname)" = node2 ] && exec sleep 300\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    overrides = (*LIGHT, f"cluster.python={python}", "cluster.check_seconds=40", f"run_dir={slurm.folder}/silent")
    code = slurm.job(*CPU, f"--output={log}", "slurm/stage.sh", "turns", *overrides)
    text = log.read_text()
    assert code == 4, text
    assert "node node2 (process 1) did not answer within 40 s" in text
    assert not Path(slurm.folder, "silent", "turns").exists()


def _until(true: Callable[[], bool], seconds: float = 150) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.2)


def _logs(run: Path) -> str:
    return "\n".join(p.read_text() for p in (run / "slurm").glob("*.log"))
