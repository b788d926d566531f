"""One run in several formats: the same turns, whichever file they were read from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pivotrl.trajectories.reader import read_trajectories
from pivotrl.trajectories.schema import Trajectory, Turn
from pivotrl.trajectories.turns import split_turns

Said = tuple[str, list[tuple[str, dict[str, Any]]]]


def turns_of(path: Path) -> list[list[Turn]]:
    """Turns of each trajectory of a file."""
    found = []
    for item in read_trajectories(str(path)):
        assert isinstance(item, Trajectory), item
        found.append([turn for turn in split_turns(item, "train") if isinstance(turn, Turn)])
    return found


def said(turn: Turn) -> Said:
    action = turn.demonstration
    return action.text.strip(), [(call.name, call.arguments) for call in action.tool_calls]


def seen(turn: Turn) -> list[tuple[str, str, int]]:
    """What is told to the model: roles, texts and numbers of calls of the state."""
    return [(m["role"], m.get("content", "").strip(), len(m.get("tool_calls", ()))) for m in turn.messages]


@pytest.mark.parametrize(
    ("one", "other", "rows"),
    [
        ("conversational/gym_workplace_chat.jsonl", "conversational/gym_workplace_responses.jsonl", [(0, 0), (1, 1)]),
        ("swe/mini_swe_chat.jsonl", "swe/mini_swe_responses.jsonl", [(0, 0)]),
        ("tau_bench/airline_sft.jsonl", "tau_bench/raw_upstream_shape_2.json", [(44, 0), (17, 1)]),
        ("tau2/gym_rollouts_chat.jsonl", "tau2/gym_rollouts_responses.jsonl", [(0, 0), (1, 1), (2, 2)]),
        ("terminal/terminus2_chat.jsonl", "terminal/terminus2_responses.jsonl", [(1, 0)]),
        ("terminal/terminus2_chat.jsonl", "terminal/terminus2_0.atif.json", [(0, 0)]),
        ("terminal/terminus2_chat.jsonl", "terminal/terminus2_1.atif.json", [(1, 0)]),
        ("formats/qwen3_think_in_content.jsonl", "formats/qwen3_rendered_text.jsonl", [(0, 0)]),
    ],
)
def test_two_formats_of_a_run(shared_data: Path, one: str, other: str, rows: list[tuple[int, int]]) -> None:
    """The chat rows of Terminus-2 are cut short where a result has no call; its ATIF file goes on."""
    first, second = turns_of(shared_data / one), turns_of(shared_data / other)
    for i, j in rows:
        theirs = second[j][: len(first[i])] if other.endswith("atif.json") else second[j]
        assert [said(t) for t in first[i]] == [said(t) for t in theirs] and len(first[i]) > 1
        assert [seen(t) for t in first[i]] == [seen(t) for t in theirs]


def test_a_tau2_run_as_the_benchmark_stores_it(shared_data: Path) -> None:
    """It lacks the policy, and so the agent's greeting has no state before it."""
    (own,) = turns_of(shared_data / "tau2/simulation_run_example.json")
    chat = turns_of(shared_data / "tau2/gym_rollouts_chat.jsonl")[0]
    assert [said(t) for t in own] == [said(t) for t in chat] and len(own) == 5
    assert [seen(t) for t in own] == [seen(t)[1:] for t in chat]


def test_pivot_rows_are_the_turns_of_their_trajectory(shared_data: Path) -> None:
    (whole,) = turns_of(shared_data / "formats/openai_chat_tools.jsonl")
    rows = [turn for turns in turns_of(shared_data / "formats/nemo_gym_pivot_rows.jsonl") for turn in turns]
    assert len(rows) == 4
    assert [(said(t), seen(t), t.depth) for t in rows] == [(said(t), seen(t), t.depth) for t in whole]
