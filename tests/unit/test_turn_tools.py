"""`pivotrl show` and `pivotrl export-gym`, and the round trip of pivot rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pivotrl import config
from pivotrl.cli import main
from pivotrl.errors import UserError
from pivotrl.io import read_jsonl, write_jsonl
from pivotrl.trajectories.gym_rows import gym_row
from pivotrl.trajectories.reader import read_trajectories
from pivotrl.trajectories.schema import Trajectory, Turn
from pivotrl.trajectories.turns import split_turns
from pivotrl.turns_stage import run_turns


def all_turns(path: Path) -> list[Turn]:
    items = [i for i in read_trajectories(str(path)) if isinstance(i, Trajectory)]
    return [t for i in items for t in split_turns(i, "train") if isinstance(t, Turn)]


@pytest.mark.parametrize(
    "name",
    ["tau_bench/airline_sft_compact.jsonl", "search/webdancer_chat.jsonl", "swe/mini_swe_chat.jsonl",
     "terminal/terminus2_textjson_chat.jsonl", "tau2/gym_rollouts_chat.jsonl"],
)  # fmt: skip
def test_pivot_rows_read_back(shared_data: Path, tmp_path: Path, name: str) -> None:
    turns = all_turns(shared_data / name)
    file = tmp_path / "rows.jsonl"
    write_jsonl(file, (gym_row(turn, [1.0, 0.0, None, 0.5], "mine") for turn in turns))
    again = all_turns(file)
    assert len(again) == len(turns) > 10
    for old, new in zip(turns, again, strict=True):
        assert (new.messages, new.tools) == (old.messages, old.tools)
        assert new.demonstration.tool_calls == old.demonstration.tool_calls
        assert old.demonstration.tool_calls or new.demonstration.text == old.demonstration.text
        assert (new.task_id, new.depth, new.domain) == (old.task_id, old.depth, old.domain)


def test_rows_of_one_source_trajectory_stay_together(tmp_path: Path) -> None:
    """The terminal set names the trajectory in its metadata, and no task."""
    answer = '{"analysis": "", "plan": "", "commands": []}'
    rows = [
        {
            "responses_create_params": {"input": [{"role": "user", "content": f"u{turn} of {run}"}]},
            "expected_answer": answer,
            "metadata": {"harness": "terminus_2", "source_trajectory_uid": run, "pivot_agent_turn_index": turn},
        }
        for run in "abcdefghij"
        for turn in range(6)
    ]
    file = tmp_path / "rows.jsonl"
    write_jsonl(file, rows)
    run_turns(config.Config(trajectories=config.Trajectories(path=str(file))), tmp_path)
    kept = list(read_jsonl(tmp_path / "turns/turns.jsonl"))
    assert len(kept) == 60 and {row["trajectory_id"] for row in kept} >= {"a@0", "j@5"}
    assert len({(row["task_id"], row["split"]) for row in kept}) == 10


def test_terminus_rows_need_an_agent(shared_data: Path) -> None:
    turn = all_turns(shared_data / "terminal/terminus2_textjson_chat.jsonl")[0]
    with pytest.raises(UserError, match="--agent"):
        gym_row(turn)
    row = gym_row(turn, agent="mine")
    assert row["expected_answer"] == turn.demonstration.text and row["metadata"]["harness"] == "terminus_2"
    assert "expected_action" not in row and "pass_rate" not in row


def test_a_row_to_the_letter(shared_data: Path) -> None:
    turn = next(t for t in all_turns(shared_data / "tau_bench/airline_sft_compact.jsonl") if t.depth == 2)
    row = gym_row(turn, [1.0, 0.0, 0.0, None])
    params = row["responses_create_params"]
    assert set(params) == {"input", "tools", "parallel_tool_calls", "tool_choice"}  # metadata absent, not null
    assert {item["type"] for item in params["input"]} <= {"message", "function_call", "function_call_output"}
    assert set(params["tools"][0]) == {"type", "name", "description", "parameters", "strict"}
    assert (row["pass_rate"], row["pass_rate_total"], row["pass_rate_passed"]) == (pytest.approx(1 / 3), 3, 1)
    assert row["agent_ref"]["type"] == "responses_api_agents"
    expected = row["expected_action"]
    assert expected["type"] in ("message", "function_call")
    if expected["type"] == "function_call":
        json.loads(expected["arguments"])


@pytest.fixture
def finished(shared_data: Path, tmp_path: Path) -> Path:
    cfg = config.Config(trajectories=config.Trajectories(path=str(shared_data / "tau_bench/airline_sft_compact.jsonl")))
    run_turns(cfg, tmp_path)
    return tmp_path


def test_export(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = finished / "out.jsonl"
    assert main(["export-gym", f"run_dir={finished}", f"--output={output}"]) == 2
    assert "pivotrl select" in capsys.readouterr().err
    ids = [row["id"] for row in read_jsonl(finished / "turns/turns.jsonl")][:5]
    write_jsonl(finished / "select/pivots.jsonl", ({"turn_id": i, "rewards": [1.0, 0.0]} for i in ids))
    assert main(["export-gym", f"run_dir={finished}", f"--output={output}", "--agent", "mine"]) == 0
    rows = list(read_jsonl(output))
    assert [row["metadata"]["turn_id"] for row in rows] == ids
    assert {row["agent_ref"]["name"] for row in rows} == {"mine"} and {row["pass_rate"] for row in rows} == {0.5}
    write_jsonl(finished / "select/pivots.jsonl", [{"turn_id": "nowhere#0", "rewards": [1.0]}])
    assert main(["export-gym", f"run_dir={finished}", f"--output={output}"]) == 2
    assert "nowhere#0" in capsys.readouterr().err and not output.exists()


def test_show(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = next(r for r in read_jsonl(finished / "turns/turns.jsonl") if r["demonstration"]["tool_calls"])
    assert main(["show", row["id"], f"run_dir={finished}"]) == 0
    shown = capsys.readouterr().out
    for part in (row["id"], row["demonstration"]["tool_calls"][0]["name"], "--- user", "flags", row["source"]):
        assert part in shown
    assert main(["show", row["trajectory_id"] + "#99", f"run_dir={finished}"]) == 2
    assert row["trajectory_id"] + "#0" in capsys.readouterr().err
    assert main(["show", f"run_dir={finished}"]) == 2
