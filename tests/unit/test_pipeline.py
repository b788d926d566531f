"""`pivotrl run` with fake stages: continue, skip, run again and say why, survive any kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FAKE = Path(__file__).parent / "fake_pipeline.py"
STAGES = ["turns", "warmup", "profile", "select", "train", "sft", "evaluate", "report"]
SHORT = "run.stages=[turns,profile,select]"


class Runner:
    def __init__(self, folder: Path) -> None:
        self.folder, self.run_dir = folder, folder / "run"
        (folder / "data.jsonl").write_text("{}\n")

    def command(self, *overrides: str, stage: str = "run") -> list[str]:
        given = ["trajectories.path=data.jsonl", "run_dir=run", *overrides]
        return [sys.executable, str(FAKE), stage, *given]

    def env(self, **fakes: str) -> dict[str, str]:
        root = str(Path(__file__).parents[2])
        return {**os.environ, "PYTHONPATH": root, **{f"FAKE_{k.upper()}": v for k, v in fakes.items()}}

    def run(self, *overrides: str, stage: str = "run", **fakes: str) -> subprocess.CompletedProcess[str]:
        command = self.command(*overrides, stage=stage)
        return subprocess.run(
            command, cwd=self.folder, env=self.env(**fakes), capture_output=True, text=True, timeout=60, check=False
        )

    def start(self, *overrides: str, **fakes: str) -> subprocess.Popen[str]:
        """As a background job of a shell script, which ignores SIGINT."""
        command = ["bash", "-c", 'trap "" INT; exec "$@"', "bash", *self.command(*overrides)]
        return subprocess.Popen(command, cwd=self.folder, env=self.env(**fakes), stderr=subprocess.PIPE, text=True)

    def calls(self) -> list[str]:
        """What ran since the last look."""
        log = self.run_dir / "calls.log"
        lines = log.read_text().split("\n")[:-1] if log.exists() else []
        log.unlink(missing_ok=True)
        return lines

    def wait_for(self, stage: str) -> int:
        """Wait until the stage is at work; its process id."""
        part = self.run_dir / stage / "part.txt"
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if part.exists() and part.read_text():
                return int(part.read_text())
            time.sleep(0.02)
        raise AssertionError(f"{stage} did not start")


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    made = Runner(tmp_path)
    yield made
    for part in made.run_dir.glob("*/part.txt"):  # a fake that a failing test left hanging
        try:
            pid = int(part.read_text())
            if str(FAKE) in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGKILL)
        except (OSError, ValueError):
            continue


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_all_stages_run_once_and_are_skipped_the_second_time(runner: Runner) -> None:
    first = runner.run()
    assert first.returncode == 0, first.stderr
    assert runner.calls() == [f"{s} fresh" for s in STAGES]
    ledger = read(runner.run_dir / "pipeline.json")["stages"]
    assert list(ledger) == STAGES
    assert all(row["peak_rss_gib"] > 0.005 and row["seconds"] > 0 and row["attempts"] == 1 for row in ledger.values())
    second = runner.run()
    assert second.returncode == 0
    assert runner.calls() == []
    assert second.stderr.count("done before, skipped") == len(STAGES)
    assert read(runner.run_dir / "pipeline.json")["stages"] == ledger


def test_a_changed_key_runs_its_stage_and_what_depends_on_it_and_says_why(runner: Runner) -> None:
    stages = "run.stages=[turns,profile,select,train,sft]"
    runner.run(stages)
    runner.calls()
    again = runner.run(stages, "select.lambda_diff=0.7")
    assert again.returncode == 0, again.stderr
    # The fakes' summaries are all alike: what changed is known by the configuration. SFT does not read the pivots.
    assert runner.calls() == ["select fresh", "train fresh"]
    assert "select.lambda_diff: 0.6 -> 0.7" in again.stderr
    assert "train: runs again, because the result of select changed" in again.stderr
    assert (runner.run_dir / "superseded" / "select-1" / "summary.json").is_file()
    assert "superseded/select-1" in again.stderr


def test_a_changed_result_upstream_runs_everything_after_it(runner: Runner) -> None:
    runner.run(SHORT)
    runner.calls()
    again = runner.run(SHORT, "trajectories.tasks=7")
    assert runner.calls() == ["turns fresh", "profile fresh", "select fresh"]
    assert "the result of turns changed" in again.stderr


def test_changed_input_file_runs_again(runner: Runner) -> None:
    runner.run(SHORT)
    runner.calls()
    (runner.folder / "data.jsonl").write_text("{}\n{}\n")
    again = runner.run(SHORT)
    assert runner.calls()[0] == "turns fresh"
    assert "the files of trajectories.path changed" in again.stderr


def test_benign_changes_run_nothing(runner: Runner) -> None:
    runner.run(SHORT)
    runner.calls()
    runner.run(SHORT, "tracking.name=other", "generation.max_sequences=3")
    assert runner.calls() == []


def test_after_an_upgrade_the_user_says_whether_results_are_kept(runner: Runner) -> None:
    assert runner.run(SHORT, version="0.0.9", select="kill").returncode == 137
    runner.calls()
    keep, again = "run.accept_upgrade=true", "run.accept_upgrade=false"
    asked = runner.run(SHORT)
    assert asked.returncode == 2
    assert "pivotrl: 0.0.9 -> " in asked.stderr
    assert keep in asked.stderr
    assert again in asked.stderr
    assert runner.calls() == []
    assert runner.run(SHORT, keep).returncode == 0
    assert runner.calls() == ["select continued"]
    alone = runner.run(SHORT, stage="profile")  # a finished stage by its own command
    assert (alone.returncode, runner.calls()) == (2, []), alone.stderr
    assert not (runner.run_dir / "superseded").exists()
    assert runner.run(SHORT, keep, "select.lambda_diff=0.7").returncode == 0
    assert runner.calls() == ["select fresh"]  # what else changes counts as ever
    assert runner.run(SHORT, again).returncode == 0
    assert runner.calls() == ["turns fresh", "profile fresh", "select fresh"]
    assert runner.run(SHORT).returncode == 0
    assert runner.calls() == []


@pytest.mark.parametrize("stage", ["turns", "profile", "select"])
def test_killed_stage_continues_where_it_was(runner: Runner, stage: str) -> None:
    broken = runner.run(SHORT, **{stage: "kill"})
    assert broken.returncode == 137
    assert "killed (signal 9" in broken.stderr
    runner.calls()
    assert runner.run(SHORT).returncode == 0
    order = ["turns", "profile", "select"]
    assert runner.calls() == [f"{stage} continued", *(f"{s} fresh" for s in order[order.index(stage) + 1 :])]
    assert read(runner.run_dir / "pipeline.json")["stages"][stage]["attempts"] == 2


def test_kill_9_of_the_pipeline_ends_the_stage_and_the_next_run_continues(runner: Runner) -> None:
    process = runner.start(SHORT, profile="hang")
    stage = runner.wait_for("profile")
    process.kill()
    process.communicate()
    assert gone(stage)
    runner.calls()
    assert runner.run(SHORT).returncode == 0
    assert runner.calls() == ["profile continued", "select fresh"]


def test_kill_9_in_a_half_done_bookkeeping_step_is_survived(runner: Runner) -> None:
    runner.run(SHORT)
    runner.calls()
    folder = runner.run_dir / "select"
    for name in ("summary.json", "stage.json"):  # killed between the folder and its record
        (folder / name).unlink()
    (folder / "part.txt").unlink()
    (folder / "stage.json.tmp").write_text('{"half')
    assert runner.run(SHORT).returncode == 0
    assert runner.calls() == ["select fresh"]
    assert (folder / "summary.json").is_file()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_interruption_reaches_the_stage_and_exits_130_or_75(runner: Runner, number: signal.Signals) -> None:
    process = runner.start(SHORT, turns="hang")
    stage = runner.wait_for("turns")
    process.send_signal(number)
    _, text = process.communicate(timeout=120)
    assert process.returncode == (130 if number is signal.SIGINT else 75)
    assert ("interrupted" if number is signal.SIGINT else f"stopped ({number.name})") in text
    assert "the same command continues" in text
    assert "Traceback" not in text
    assert gone(stage)
    runner.calls()
    assert runner.run(SHORT).returncode == 0
    assert runner.calls()[0] == "turns continued"


def test_crash_leaves_a_traceback_file_and_one_line(runner: Runner) -> None:
    broken = runner.run(SHORT, profile="crash")
    assert broken.returncode == 1
    assert "Traceback (most" not in broken.stderr
    assert f"RuntimeError: the engine broke. Traceback: {runner.run_dir / 'crash.log'}" in broken.stderr
    assert "engine broke" in (runner.run_dir / "crash.log").read_text()


def test_user_error_exits_2_without_traceback(runner: Runner) -> None:
    broken = runner.run(SHORT, turns="user")
    assert broken.returncode == 2
    assert "pivotrl turns: the file is bad" in broken.stderr
    assert "Traceback" not in broken.stderr
    assert not (runner.run_dir / "crash.log").exists()


def test_two_pipelines_in_one_folder_are_refused(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    from pivotrl.errors import UserError
    from pivotrl.locks import hold

    with hold(runner.run_dir / ".locks" / "run"), pytest.raises(UserError, match=str(os.getpid())):  # noqa: SIM117
        with hold(runner.run_dir / ".locks" / "run", wait_seconds=0.1):
            pass


def test_single_stage_interrupted_then_changed_is_refused_with_the_difference(runner: Runner) -> None:
    runner.run(SHORT, profile="kill")
    refused = runner.run("profile.rollouts_per_turn=16", "seed=0", stage="profile")
    assert refused.returncode == 2
    assert "profile.rollouts_per_turn: 8 -> 16" in refused.stderr
    runner.calls()
    assert runner.run(stage="profile").returncode == 0
    assert runner.calls() == ["profile continued"]


def test_single_stage_finished_then_changed_moves_the_old_result_aside(runner: Runner) -> None:
    runner.run(SHORT)
    again = runner.run("select.lambda_diff=0.5", stage="select")
    assert again.returncode == 0
    assert "select.lambda_diff: 0.6 -> 0.5" in again.stderr
    assert (runner.run_dir / "superseded" / "select-1").is_dir()


def test_failed_attempt_that_made_nothing_binds_nobody(runner: Runner) -> None:
    runner.run(stage="turns", turns="user")
    (runner.run_dir / "turns" / "part.txt").unlink()
    assert runner.run("seed=9", stage="turns").returncode == 0


def test_conflicts_stop_the_pipeline_before_any_stage(runner: Runner) -> None:
    broken = runner.run("algorithm.group_size=1", "select.lambda_diff=2")
    assert broken.returncode == 2
    assert "2 conflicts" in broken.stderr
    assert runner.calls() == []
