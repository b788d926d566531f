from __future__ import annotations

import json
from pathlib import Path

import pytest

from pivotrl.environments.base import Outcome, Task
from pivotrl.environments.rollout import EpisodeResult
from pivotrl.errors import UserError
from pivotrl.evaluation.in_domain import episode_summary
from pivotrl.evaluation.out_of_domain import MultipleChoice, evaluate_choices, read_choices
from pivotrl.evaluation.stage import differences
from pivotrl.evaluation.statistics import bootstrap, interval, paired_difference, wilson


def test_wilson():
    assert wilson(24, 48) == pytest.approx((0.364, 0.636), abs=1e-3)
    low, high = wilson(0, 7)
    assert low == 0.0
    assert 0.3 < high < 0.4  # none of seven does not mean none
    assert wilson(0, 0) == (0.0, 1.0)


def test_interval_of_shares_and_of_means():
    assert interval([0.0] * 7) == wilson(0, 7)
    assert interval([0.5, 0.25, 1.0] * 10) == bootstrap([0.5, 0.25, 1.0] * 10)


def test_paired_difference_is_of_the_same_tasks():
    found = paired_difference([1, 1, 1, 0], [0, 0, 0, 0])
    assert found["difference"] == 0.75
    low, high = found["ci"]  # type: ignore[misc]
    assert 0.0 <= low < 0.75 < high <= 1.0
    assert paired_difference([1, 0], [1, 0])["ci"] == [0.0, 0.0]
    with pytest.raises(ValueError):
        paired_difference([1], [1, 0])


def test_differences_are_to_base_over_shared_tasks():
    policies = {"base": {"greedy": {"per_task": {"a": 0, "b": 1}}}, "sft": {"greedy": {"per_task": {"a": 1, "c": 1}}}}
    assert differences(policies)["sft - base"]["greedy"]["difference"] == 1.0


def episode(task: str, success: bool | None, trial: int = 0) -> EpisodeResult:
    outcome = None if success is None else Outcome(success, "ok" if success else "wrong_state")
    return EpisodeResult(Task(task, "f"), trial, outcome, "broke" if outcome is None else None, 3)


def test_a_broken_episode_is_no_failure():
    found = episode_summary([episode("a", True), episode("b", False), episode("c", None)])
    assert (found["success"], found["n"], found["errors"]) == (0.5, 2, 1)
    assert found["reasons"] == {"ok": 1, "wrong_state": 1}
    assert episode_summary([episode("a", None)])["success"] is None


def test_trials_of_a_task_are_averaged_before_the_interval():
    results = [episode("a", True, 0), episode("a", False, 1), episode("b", True, 0), episode("b", True, 1)]
    found = episode_summary(results)
    assert found["per_task"] == {"a": 0.5, "b": 1.0}
    assert (found["success"], found["trials"]) == (0.75, 2)


class Letters:
    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def score(self, prompts, continuations) -> list[list[float]]:
        return [[-1.0 if chr(i) == "x" else -2.0 for i in ids] for ids in continuations]


def test_choices_are_compared_per_character():
    rows = [MultipleChoice("c", ("xxxxxxxx", "ab"), 0), MultipleChoice("c", ("ab", "xxxxxxxx"), 0)]
    found = evaluate_choices(rows, Letters(), Letters(), "letters")  # type: ignore[arg-type]
    assert (found["accuracy"], found["n"], found["per_task"]) == (0.5, 2, {"0": 1.0, "1": 0.0})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nope", r":2: not a multiple-choice row"),
        ('{"ctx": "a", "endings": ["b"]}', r":2: .*label"),
        ('{"ctx": "a", "endings": ["b"], "label": 3}', r":2: label 3 is not an index"),
    ],
)
def test_bad_choices_name_file_and_line(tmp_path: Path, line: str, message: str):
    path = tmp_path / "choices.jsonl"
    path.write_text(json.dumps({"ctx": "a", "endings": ["b", "c"], "label": 1}) + "\n" + line + "\n")
    assert len(read_choices(path, 1)) == 1
    with pytest.raises(UserError, match=message):
        read_choices(path, 9)
    with pytest.raises(UserError, match="does not exist"):
        read_choices(tmp_path / "none", 1)
