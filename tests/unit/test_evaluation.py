from __future__ import annotations

from itertools import combinations

import pytest

from pivotrl.environments.base import Outcome, Task
from pivotrl.environments.rollout import EpisodeResult
from pivotrl.evaluation.in_domain import Validity, episode_summary
from pivotrl.evaluation.stage import differences
from pivotrl.evaluation.statistics import bootstrap, interval, paired_difference, pass_at_k, wilson
from pivotrl.trajectories.schema import Action, ToolCall


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


def test_pass_at_k_is_the_share_of_subsets_with_a_success():
    outcomes = [1, 0, 0, 1, 0, 0]
    for k in (1, 2, 4, 6):
        subsets = list(combinations(outcomes, k))
        assert pass_at_k(6, 2, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))
    for wrong in ((4, 2, 5), (4, 5, 2), (4, 2, 0)):
        with pytest.raises(ValueError):
            pass_at_k(*wrong)


def test_pass_at_k_leaves_out_tasks_with_too_few_judged_trials():
    results = [episode("a", True, 0), episode("a", False, 1), episode("b", False, 0), episode("b", None, 1)]
    assert episode_summary(results)["pass_at"] == {"1": 0.25, "2": 1.0}


def test_validity_of_tool_calls():
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    validity = Validity()
    for action in (
        Action(tool_calls=(ToolCall("f", {"n": 1}), ToolCall("f", {"n": "1"}), ToolCall("g", {"n": 1}))),
        Action(text="hello"),
        Action(problems=("unclosed",)),
    ):
        validity.add(action, tools)
    expected = {"turns": 3, "malformed": 1, "calls": 3, "valid_calls": 1, "share": 0.25}
    assert validity.to_json() == expected
    assert Validity().to_json()["share"] is None
