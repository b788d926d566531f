"""Following jobs: what SLURM's words mean, whole lines of growing logs, how a chain ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch import follow
from launch.follow import Log, State, parse_sacct, parse_scontrol

SHOWN = """JobId=7 JobName=pivotrl-train
   JobState={state} Reason={reason} Dependency=(null)
   Requeue=1 Restarts={restarts} BatchFlag=1 Reboot=0 ExitCode={code}
   ReqNodeList=(null) ExcNodeList=(null)
   NodeList=node[1-2]
"""


def shown(state: str, code: str = "0:0", reason: str = "None", restarts: int = 0) -> State:
    found = parse_scontrol(SHOWN.format(state=state, code=code, reason=reason, restarts=restarts))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("state", "ended", "text"),
    [
        (shown("PENDING", reason="Dependency"), False, "train: PENDING (Dependency)"),
        (shown("RUNNING"), False, "train: RUNNING on node[1-2]"),
        (shown("RUNNING", restarts=1), False, "train: RUNNING on node[1-2], start 2"),
        (shown("COMPLETING"), False, "train: COMPLETING"),
        (shown("REQUEUED"), False, "train: REQUEUED"),
        (shown("COMPLETED"), True, "train: COMPLETED"),
        (shown("FAILED", "4:0"), True, "train: FAILED, code 4: a bad node: the log names it"),
        (shown("FAILED", "75:0"), True, "train: FAILED, code 75: saved and stopped"),
        (shown("CANCELLED", "0:15"), True, "train: CANCELLED, code 143"),
        (shown("TIMEOUT", "0:9"), True, "train: TIMEOUT, code 137"),
    ],
)
def test_states(state: State, ended: bool, text: str) -> None:
    assert state.ended == ended
    assert state.told("train").startswith(text)


def test_accounting_takes_over() -> None:
    assert parse_scontrol("slurm_load_jobs error: Invalid job id specified") is None
    assert parse_sacct("CANCELLED by 1000|0:15\n") == State("CANCELLED", 143)
    assert parse_sacct("FAILED|2:0\n") == State("FAILED", 2)
    assert parse_sacct("") is None


def test_lines_come_whole(tmp_path: Path) -> None:
    log = Log(tmp_path / "x.log")
    assert log.lines() == []
    with log.path.open("wb") as file:
        file.write("train: 1/3\nhalf é".encode()[:-1])
        file.flush()
        assert log.lines() == ["train: 1/3"]
        file.write("é".encode()[-1:] + b" line\nend")
        file.flush()
        assert log.lines() == ["half é line"]
        assert log.lines() == []
    assert log.lines(last=True) == ["end"]


def test_a_chain_is_followed_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "1.log"
    course = {
        "1": [shown("PENDING"), shown("RUNNING"), shown("RUNNING", restarts=1), shown("COMPLETED")],
        "2": [
            shown("PENDING", reason="Dependency"),
            None,
            shown("PENDING", reason="Dependency"),
            shown("FAILED", "2:0"),
        ],
    }
    writes = ["", "profile: 1/2 turn\n", "profile: 2/2 turn\n"]

    def wait(seconds: float) -> None:
        with log.open("a") as file:
            file.write(writes.pop(0))

    asked = {job: iter(states) for job, states in course.items()}
    jobs = {"profile": "1", "train": "2"}
    ends = follow.follow(jobs, {"profile": log, "train": tmp_path / "2.log"}, lambda job: next(asked[job]), wait)
    assert capsys.readouterr().out.splitlines() == [
        "-- profile: PENDING",
        "-- train: PENDING (Dependency)",
        "-- profile: RUNNING on node[1-2]",
        "profile | profile: 1/2 turn",
        "-- profile: RUNNING on node[1-2], start 2",
        "profile | profile: 2/2 turn",
        "-- profile: COMPLETED",
        "-- train: FAILED, code 2: bad configuration or input, full disk, or no access: the log says which",
    ]
    assert follow.outcome(ends) == 2
    assert follow.outcome({"a": State("COMPLETED"), "b": State("CANCELLED")}) == 1
    assert follow.outcome({"a": State("COMPLETED")}) == 0


def test_a_job_that_slurm_forgot(tmp_path: Path) -> None:
    ends = follow.follow({"a": "1"}, {"a": tmp_path / "x"}, lambda job: None, lambda seconds: None)
    assert ends["a"].name == "UNKNOWN"
    assert follow.outcome(ends) == 1
