"""Pass rates of NeMo-Gym pivot rows as a profile: out and in again, its own fingerprint, what cannot be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pivotrl.config import Config
from pivotrl.errors import UserError
from pivotrl.io import read_json, read_jsonl, write_jsonl
from pivotrl.profiling.fingerprint import require_same
from pivotrl.profiling.recorded import RateError, profile_from_rows, rewards_of
from pivotrl.profiling.select import run_select
from pivotrl.profiling.stage import run_profile
from pivotrl.trajectories.gym_rows import gym_row
from pivotrl.trajectories.schema import Action, ToolCall, Turn
from pivotrl.turn_tools import export_gym
from pivotrl.turns_stage import run_turns
from pivotrl.validation import conflicts

TOOLS = [{"type": "function", "function": {"name": "get", "description": "", "parameters": {"type": "object"}}}]
REWARDS: list[list[float | None]] = [[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, None], [0, 1, 0, 0, 1, 0]]


def gym_rows() -> list[dict[str, Any]]:
    rows = []
    for i, rewards in enumerate(REWARDS * 4):
        state = [{"role": "user", "content": f"order {i}"}]
        action = Action(tool_calls=(ToolCall("get", {"order": i}),))
        turn = Turn(f"t{i}#0", f"t{i}", f"task{i}", 0, "retail", "train", state, TOOLS, action)
        rows.append(gym_row(turn, rewards))
    rows[0] |= {"pivot_tags": ["P1"], "num_unique_actions": 3}
    return rows


def config(tmp_path: Path, rows: list[dict[str, Any]]) -> Config:
    write_jsonl(tmp_path / "rows.jsonl", rows)
    cfg = Config(run_dir=str(tmp_path))
    cfg.trajectories.path = str(tmp_path / "rows.jsonl")
    cfg.trajectories.warmup_fraction = cfg.trajectories.validation_fraction = 0.0
    cfg.profile.from_rows = True
    run_turns(cfg, tmp_path)
    return cfg


def test_rows_become_a_profile_that_can_be_selected_and_exported_again(tmp_path: Path) -> None:
    rows = gym_rows()
    cfg = config(tmp_path, rows)
    summary = run_profile(cfg, tmp_path)  # through the stage: no engine, no model
    assert (summary["turns"], summary["rollouts"], summary["recorded_rollouts"]) == (20, 0, 4 * (4 + 4 + 4 + 3 + 6))
    assert summary["uninformative_share"] == pytest.approx(2 / 5)
    found = {r["trajectory_id"]: r for r in read_jsonl(tmp_path / "profile" / "turns.jsonl")}
    assert found["t3@0"]["mean"] == pytest.approx(2 / 3)  # the unscorable rollout is in no pass rate
    assert (found["t4@0"]["right"], found["t4@0"]["wrong"], found["t4@0"]["n"]) == (2, 4, 6)
    assert (found["t0@0"]["tags"], found["t0@0"]["unique_actions"]) == (["last", "P1"], 3)
    kept = run_select(cfg, tmp_path)
    assert kept["kept"] == 8  # 1 of 4 and 2 of 6; 2 of 3 is not below 0.6
    export_gym(tmp_path, tmp_path / "out.jsonl")
    rates = {r["trajectory_id"]: r["pass_rate"] for r in rows}
    again = list(read_jsonl(tmp_path / "out.jsonl"))
    assert len(again) == 8
    assert all(r["pass_rate"] == rates[r["trajectory_id"].partition("@")[0]] for r in again)


def test_its_fingerprint_is_its_own_and_training_must_be_allowed(tmp_path: Path) -> None:
    record = run_profile(config(tmp_path, gym_rows()), tmp_path)["fingerprint"]
    assert record == read_json(tmp_path / "profile" / "summary.json")["fingerprint"]
    assert record["weights"] == "not told (pass rates recorded in rows.jsonl)"
    assert record["verifier"]["name"] == "single_step_tool_use_with_argument_comparison_agent"
    present = {**record, "weights": "abc", "template": "def"}
    with pytest.raises(UserError, match=r"weights: profile not told \(pass rates recorded in rows.jsonl\), now abc"):
        require_same(record, present, allow_foreign=False)
    assert len(require_same(record, present, allow_foreign=True)) == 2


def test_rows_without_rates_are_audited(tmp_path: Path) -> None:
    rows = gym_rows()
    for key in ("pass_rate", "pass_rate_total", "pass_rate_passed"):
        del rows[1][key]
    rows[2]["pass_rate_passed"] = 9
    summary = run_profile(config(tmp_path, rows), tmp_path)
    assert summary["skipped"] == {"no_pass_rate": 1, "bad_pass_rate": 1}
    assert {r["source"].rpartition(":")[2] for r in read_jsonl(tmp_path / "profile" / "skipped.jsonl")} == {"2", "3"}


def test_no_rate_at_all_and_no_source_are_errors(tmp_path: Path) -> None:
    rows = [{k: v for k, v in row.items() if not k.startswith("pass_rate")} for row in gym_rows()]
    cfg = config(tmp_path, rows)
    with pytest.raises(UserError, match=r"none of 20 turns .*'no_pass_rate': 20"):
        profile_from_rows(cfg, tmp_path)
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(UserError, match="not there any more"):
        profile_from_rows(cfg, tmp_path)


@pytest.mark.parametrize(
    ("row", "rewards"),
    [
        ({"pass_rate_total": 4, "pass_rate_passed": 1, "pass_rate": 0.25}, [1, 0, 0, 0]),
        ({"pass_rate_total": 16, "pass_rate": 0.59}, [1] * 9 + [0] * 7),  # rounded when it was written
        ({"qwen_235b_info": {"rewards": [0.0, 1.0], "reward_mean": 0.5}, "pass_rate": 0.5}, [0, 1]),
        ({"pass_rate_total": 2, "pass_rate_passed": 2, "rewards": [0, 0]}, [1, 1]),
    ],
)
def test_shapes_of_rates(row: dict[str, Any], rewards: list[float]) -> None:
    assert rewards_of(row) == rewards


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "no_pass_rate"),
        ({"pass_rate": 0.5}, "no_pass_rate_total"),
        ({"pass_rate_total": 0, "pass_rate": 0.0}, "no_pass_rate_total"),
        ({"pass_rate_total": 4}, "bad_pass_rate"),
        ({"pass_rate_total": 4, "pass_rate": 2.0}, "bad_pass_rate"),
        ({"pass_rate_total": 4, "pass_rate_passed": True}, "bad_pass_rate"),
        ({"pass_rate_total": 4, "pass_rate_passed": 1, "pass_rate": 0.5}, "partial_rewards"),
        ({"rewards": [0, 2]}, "bad_rewards"),
        ({"rewards": [0, None]}, "bad_rewards"),
    ],
)
def test_what_is_no_rate(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(RateError, match=reason):
        rewards_of(row)


def test_it_makes_no_rollouts() -> None:
    cfg = Config()
    cfg.profile.from_rows, cfg.profile.second_rollouts = True, 4
    cfg.profile.adaptive.enabled = True
    told = [text for text in conflicts(cfg, "profile", 1, False) if "from_rows" in text]
    assert [text.split(", so ")[1] for text in told] == [
        "profile.second_rollouts cannot be set beside it",
        "profile.adaptive.enabled cannot be set beside it",
    ]
