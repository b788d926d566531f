"""The study as jobs: what each call submits, after which jobs, what it leaves alone and what it records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from experiments import cluster
from experiments.arms import chosen
from experiments.cluster import submit_study
from experiments.plan import SHARED_STAGES, Study
from experiments.study import main
from launch import preflight
from launch.follow import State
from launch.jobs import Job, stages_of
from pivotrl import stage_state
from pivotrl.config import Config
from pivotrl.configuration import load_config
from pivotrl.errors import UserError
from pivotrl.io import read_json, write_json
from tests.unit.test_study import FakePivotrl

ARMS = chosen(["base", "adv", "sft_kl"])


class Slurm:
    """Stands in for sbatch and scontrol. `run` does a job's work, as a node would."""

    def __init__(self) -> None:
        self.jobs: dict[str, tuple[str, list[str]]] = {}  # id -> (script's name, jobs before it)
        self.scripts: dict[str, str] = {}
        self.states: dict[str, State] = {}
        self.checked: list[list[str]] = []
        self.problems: list[str] = []

    def submit(self, path: Path, script: str, after: Sequence[str]) -> str:
        job_id = str(100 + len(self.jobs))
        self.jobs[job_id] = (path.name, list(after))
        self.scripts[job_id] = script
        self.states[job_id] = State("PENDING", reason="Resources")
        assert "#SBATCH --nodes=1" in script
        return job_id

    def ask(self, job_id: str) -> State | None:
        return self.states.get(job_id)

    def check(self, cfg: Config, jobs: Sequence[Job], overrides: Sequence[str] = ()) -> list[str]:
        self.checked.append(stages_of(jobs))
        return self.problems

    def run(self, study: Study, job_id: str, code: int = 0) -> None:
        """End a job, with the work of its arm done where `code` is 0."""
        self.states[job_id] = State("FAILED", code) if code else State("COMPLETED")
        name, _, seed = self.jobs[job_id][0].removesuffix(".sbatch").rpartition("-seed")
        if code:
            return
        arms = {arm.name: arm for arm in ARMS}
        work = study.arm_work(int(seed), arms[name]) if name in arms else study.shared_work(int(seed))
        cfg = load_config([*work.overrides, f"run.stages=[{','.join(work.stages)}]"])
        for stage in work.stages:
            directory = Path(cfg.run_dir) / stage
            stage_state.begin(cfg, directory, stage_state.record_of(cfg, stage, Path(cfg.run_dir)))
            FakePivotrl()([*work.overrides, f"run.stages=[{stage}]"])


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Slurm:
    slurm = Slurm()
    monkeypatch.setattr(cluster, "submit", slurm.submit)
    monkeypatch.setattr(preflight, "problems", slurm.check)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    return slurm


@pytest.fixture
def study(tmp_path: Path) -> Study:
    return Study("study_outfitters", tmp_path / "runs", tmp_path / "records", "test")


def test_arms_wait_for_what_they_share_and_for_the_arm_that_they_match(
    slurm: Slurm, study: Study, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit_study(study, ARMS, [0, 1], ask=slurm.ask) == []
    assert list(slurm.jobs.values()) == [
        ("shared-seed0.sbatch", []),
        ("base-seed0.sbatch", ["100"]),
        ("adv-seed0.sbatch", ["100"]),
        ("shared-seed1.sbatch", []),
        ("base-seed1.sbatch", ["103"]),
        ("adv-seed1.sbatch", ["103"]),
    ]
    assert "sft_kl: waits for adv" in capsys.readouterr().out
    assert slurm.checked[:2] == [[*SHARED_STAGES, "evaluate"], [*SHARED_STAGES, "select", "train", "evaluate"]]

    assert submit_study(study, ARMS, [0, 1], ask=slurm.ask) == []  # all of them wait: nothing is sent twice
    assert len(slurm.jobs) == 6
    assert "adv: job 102: PENDING (Resources)" in capsys.readouterr().out

    for job_id in ("100", "102"):
        slurm.run(study, job_id)
    slurm.run(study, "101", code=1)
    written = submit_study(study, ARMS, [0], ask=slurm.ask)
    assert [path.name for path in written] == ["study_outfitters-adv-seed0.json"]
    assert read_json(written[0])["arm"] == "adv"
    assert list(slurm.jobs.values())[6:] == [("base-seed0.sbatch", []), ("sft_kl-seed0.sbatch", [])]
    assert "sft.max_kl=0.03" in slurm.scripts["107"]
    said = capsys.readouterr().out
    assert "shared: done" in said
    assert "base: job 101: FAILED, code 1: crashed" in said
    assert "job 106, evaluate" in said


def test_nothing_is_queued_while_preflight_has_something_to_say(slurm: Slurm, study: Study) -> None:
    slurm.problems = ["no such partition"]
    with pytest.raises(UserError, match="one problem before anything is queued:\n  - no such partition"):
        submit_study(study, ARMS, [0, 1], ask=slurm.ask)
    assert slurm.jobs == {}


def test_a_dry_run_sends_nothing(slurm: Slurm, study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    submit_study(study, ARMS, [0], dry_run=True, ask=slurm.ask)
    assert slurm.jobs == {}
    said = capsys.readouterr().out
    assert "shared: would submit turns, warmup, profile" in said
    assert "adv: would submit select, train, evaluate" in said


def test_what_is_shared_is_made_again_where_its_job_failed(slurm: Slurm, study: Study) -> None:
    submit_study(study, ARMS[:1], [0], ask=slurm.ask)
    slurm.states["100"], slurm.states["101"] = State("FAILED", 2), State("CANCELLED")
    submit_study(study, ARMS[:1], [0], ask=slurm.ask)
    assert list(slurm.jobs.values())[2:] == [("shared-seed0.sbatch", []), ("base-seed0.sbatch", ["102"])]


def test_without_slurm_the_next_step_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert main(["--slurm", "--root", str(tmp_path)]) == 2
    assert "go to a login node, or leave --slurm out" in capsys.readouterr().err


def test_records_of_another_start_stop_the_study_before_more_jobs(slurm: Slurm, study: Study) -> None:
    base = chosen(["base"])
    submit_study(study, base, [0], ask=slurm.ask)
    slurm.run(study, "100")
    write_json(study.records / "theirs.json", {"experiment": study.experiment, "seed": 0, "start_policy": "other"})
    with pytest.raises(UserError, match=r"theirs\.json starts from another policy"):
        submit_study(study, chosen(["base", "sft"]), [0], ask=slurm.ask)
    assert len(slurm.jobs) == 2
