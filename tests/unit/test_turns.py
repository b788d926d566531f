"""Turn extraction, splits and the audited stage."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pivotrl import config
from pivotrl.errors import UserError
from pivotrl.io import read_jsonl
from pivotrl.trajectories.duplicates import DigestSet
from pivotrl.trajectories.flags import is_error
from pivotrl.trajectories.reader import Skip, read_trajectories
from pivotrl.trajectories.schema import Trajectory, Turn
from pivotrl.trajectories.splits import TaskSplits
from pivotrl.trajectories.spool import Spool
from pivotrl.trajectories.turn_lines import turns_in
from pivotrl.trajectories.turns import merge_pieces, split_turns
from pivotrl.turns_stage import run_turns
from pivotrl.validation import conflicts

USER = {"role": "user", "content": "u"}
SAID = {"role": "assistant", "content": "a", "thinking": "t"}
CALLED = {"role": "assistant", "tool_calls": [{"id": "1", "name": "f", "arguments": {}}]}
RESULT = {"role": "tool", "tool_call_id": "1", "name": "f", "content": "r"}


def turns(*messages: dict[str, Any], **meta: Any) -> list[Turn | Skip]:
    return list(split_turns(Trajectory("T", "d", list(messages), [], "task", meta, "file.jsonl:3"), "train"))


def split_tasks(tasks: Iterable[str], seed: int, warmup_fraction: float, validation_fraction: float) -> dict[str, str]:
    splits, tasks = TaskSplits(seed, warmup_fraction, validation_fraction), list(tasks)
    for task in tasks:
        splits.add(task)
    return {task: splits.of(task) for task in tasks}


def test_each_assistant_turn_sees_all_before_it() -> None:
    first, second = turns(USER, CALLED, RESULT, SAID)
    assert isinstance(first, Turn) and isinstance(second, Turn)
    assert (first.id, first.messages, first.demonstration.tool_calls[0].name) == ("T#0", [USER], "f")
    assert (second.id, second.messages, second.depth) == ("T#1", [USER, CALLED, RESULT], 1)
    assert (second.demonstration.text, second.demonstration.thinking) == ("a", "t")
    assert Turn.from_json(json.loads(json.dumps(second.to_json()))) == second


def test_pieces_of_one_call_are_one_turn() -> None:
    (turn,) = turns(USER, SAID, CALLED, RESULT)
    assert isinstance(turn, Turn) and turn.messages == [USER]
    assert (turn.demonstration.text, len(turn.demonstration.tool_calls)) == ("a", 1)


def test_turns_that_are_none_are_skipped_with_reasons() -> None:
    items = turns({"role": "assistant", "content": "hello"}, USER, CALLED, SAID, USER, {"role": "assistant"})
    assert [i.reason if isinstance(i, Skip) else i.id for i in items] == [
        "empty_state", "T#1", "not_a_boundary", "empty_action",
    ]  # fmt: skip
    assert isinstance(items[0], Skip) and (items[0].source, items[0].line) == ("file.jsonl", 3)


def test_thinking_that_never_ends_is_no_demonstration() -> None:
    """It stays in later states as it stands; so does a call that got no result."""
    cut_off = {"role": "assistant", "content": "<think>so"}
    first, second, third = turns(USER, cut_off, USER, CALLED, USER, SAID)
    assert isinstance(first, Skip) and (first.id, first.reason) == ("T#0", "unclosed_thinking")
    assert isinstance(second, Turn) and second.messages == [USER, cut_off, USER]
    assert isinstance(third, Turn) and third.messages[3] == CALLED and second.flags == []


def test_rows_of_one_turn_give_one_turn() -> None:
    (turn,) = turns(USER, SAID, USER, CALLED, only_last_turn=True)
    assert isinstance(turn, Turn) and turn.depth == 1


@given(st.sets(st.text(), max_size=200), st.integers(), st.floats(0, 0.49), st.floats(0, 0.49))
def test_splits_are_exact_and_do_not_depend_on_order(tasks: set[str], seed: int, warmup: float, held: float) -> None:
    splits = split_tasks(sorted(tasks), seed, warmup, held)
    assert splits == split_tasks(sorted(tasks, reverse=True), seed, warmup, held) and splits.keys() == tasks
    counts = {name: list(splits.values()).count(name) for name in ("warmup", "train", "validation")}
    assert not tasks or counts["train"] >= 1
    if len(tasks) > 10:
        assert abs(counts["warmup"] - warmup * len(tasks)) <= 1
        assert abs(counts["validation"] - held * len(tasks)) <= 1


some_messages = st.lists(st.sampled_from([USER, SAID, CALLED, RESULT, {"role": "assistant"}]), max_size=12)


@given(some_messages, st.sets(st.sampled_from("0123456789")))
def test_turns_and_skips_are_the_assistant_turns(messages: list[dict[str, Any]], marked: set[str]) -> None:
    found = turns(*messages, unusable_messages=dict.fromkeys(marked, "copied_context"))
    merged = merge_pieces(messages)
    places = [i for i, message in enumerate(merged) if message["role"] == "assistant"]
    assert [item.id for item in found] == [f"T#{depth}" for depth in range(len(places))]
    for item, place in zip(found, places, strict=True):
        assert isinstance(item, Skip) or item.messages == merged[:place]


def test_seed_changes_the_split_and_bad_fractions_are_refused() -> None:
    tasks = [str(i) for i in range(50)]
    assert split_tasks(tasks, 0, 0.2, 0.2) != split_tasks(tasks, 1, 0.2, 0.2)
    with pytest.raises(UserError, match="below 1"):
        split_tasks(tasks, 0, 0.5, 0.5)
    with pytest.raises(UserError, match="warmup_fraction"):
        split_tasks(tasks, 0, -0.1, 0.5)


def configured(path: Path, **settings: Any) -> config.Config:
    cfg = config.Config()
    cfg.trajectories = config.Trajectories(path=str(path), **settings)
    return cfg


def test_stage_accounts_for_every_row(shared_data: Path, tmp_path: Path) -> None:
    summary = run_turns(configured(shared_data / "tau_bench", min_reward=0.5), tmp_path)
    rows = list(turns_in(tmp_path / "turns/turns.jsonl"))
    skipped = list(read_jsonl(tmp_path / "turns/skipped.jsonl"))
    count = summary["trajectories"]
    assert count["read"] == count["kept"] + sum(count["skipped"].values()) == 48 + 44 + 8 + 2
    assert count["skipped"]["low_reward"] >= 8  # airline_failed, and what it shares ids with comes first
    turn = summary["turns"]
    assert turn["candidates"] == turn["kept"] + sum(turn["skipped"].values())
    assert turn["kept"] == len(rows) == sum(turn["by_split"].values())
    assert len(skipped) == sum(count["skipped"].values()) + sum(turn["skipped"].values())
    sides: dict[str, set[str]] = {}
    for row in rows:
        sides.setdefault(row.task_id, set()).add(row.split)
    assert all(len(side) == 1 for side in sides.values())
    assert {row.split for row in rows} == {"warmup", "train", "validation"}
    assert json.loads((tmp_path / "turns/summary.json").read_text()) == summary
    assert sum(f["read"] for f in summary["files"].values()) == count["read"]


def test_a_run_without_a_reward_is_not_taken_for_a_good_one(tmp_path: Path) -> None:
    rows = [{"id": "a"}, {"id": "b", "reward": 1}, {"id": "c", "reward": True}, {"id": "d", "reward": 0.4}]
    summary = run_turns(configured(chat_rows(tmp_path / "x.jsonl", *rows), min_reward=0.5), tmp_path / "run")
    assert summary["trajectories"] == {"read": 4, "kept": 1, "skipped": {"low_reward": 1, "no_reward": 2}}


def test_no_kept_turn_is_an_error_with_an_audit(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "x"}]}\nnope\n')
    with pytest.raises(UserError, match=r"no_assistant_turn.* The first: .*x\.jsonl:1: no_assistant_turn: 1 messages"):
        run_turns(configured(file), tmp_path / "run")
    assert len(list(read_jsonl(tmp_path / "run/turns/skipped.jsonl"))) == 2
    assert not (tmp_path / "run/turns/summary.json").exists()


def test_an_environment_expert_writes_what_is_read(tmp_path: Path) -> None:
    cfg = config.Config(seed=3, environment=config.Environment(name="outfitters", families=["cancel_order"]))
    cfg.trajectories = config.Trajectories(tasks=10, runs_per_task=2, min_reward=1)
    summary = run_turns(cfg, tmp_path)
    assert summary["trajectories"] == {"read": 20, "kept": 20, "skipped": {}}
    rows = list(read_jsonl(tmp_path / "turns/turns.jsonl"))
    splits = {row["task_id"]: row["split"] for row in rows}
    assert sorted(splits.values()) == ["train"] * 7 + ["validation"] + ["warmup"] * 2  # both runs of a task on one side
    assert (rows[0]["id"], rows[0]["domain"]) == ("outfitters-train-3-0/0#0", "conversational_tool_use")


def test_nothing_to_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"trajectories\.path"):
        run_turns(config.Config(), tmp_path)


def test_flags() -> None:
    failed = {**RESULT, "content": "Error: no such order"}
    items = turns(USER, CALLED, failed, CALLED, RESULT, SAID, reward=0.0)
    assert [t.flags for t in items if isinstance(t, Turn)] == [
        ["next_error", "run_failed"], ["run_failed", "repeated"], ["run_failed", "last"],
    ]  # fmt: skip
    assert [t.flags for t in turns(USER, SAID, reward=1)] == [["last"]]  # type: ignore[union-attr]
    (marked, _) = turns(USER, CALLED, {**RESULT, "is_error": True}, SAID, text_syntax=True)
    assert isinstance(marked, Turn) and marked.flags == ["next_error", "text_syntax"]


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("Error: x", True), ("Traceback (most recent call last):\n", True), ("<returncode>1</returncode>", True),
        ("<returncode>0</returncode>", False), ('{"error": "x"}', True), ('{"error": null}', False), ("", False),
        ('{"success": false}', True), ("ls: cannot\n[Command finished with exit code 2]", True),
        ("ValueError: x", True),
        ("[Command finished with exit code 0]", False), ("No errors found", False), ("{" * 100_000, False),
    ],
)  # fmt: skip
def test_only_marked_results_are_errors(content: str, error: bool) -> None:
    assert is_error(content) is error


def chat_rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps({"messages": [USER, CALLED, RESULT, SAID], **row}) + "\n" for row in rows))
    return path


def test_filters_by_flag_and_copies_are_audited(tmp_path: Path) -> None:
    raw_call = {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": {}}}]}
    other_id = [USER, raw_call, {"role": "tool", "tool_call_id": "x", "content": "r"}, SAID]
    called = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {}}}]}
    first = {"id": "a", "messages": [USER, called, RESULT, SAID]}
    file = chat_rows(tmp_path / "x.jsonl", first, {"id": "b", "messages": other_id})
    summary = run_turns(configured(file), tmp_path / "run")
    assert summary["turns"]["skipped"] == {"duplicate_turn": 2} and summary["turns"]["kept"] == 2
    summary = run_turns(configured(file, deduplicate=False), tmp_path / "run")
    assert summary["turns"]["kept"] == 4 and summary["turns"]["flags"] == {"last": 2}
    summary = run_turns(configured(file, drop=["last"], deduplicate=False), tmp_path / "run")
    assert (summary["turns"]["kept"], summary["turns"]["skipped"]) == (2, {"last": 2})
    assert any("'lasst'" in text and "last" in text for text in conflicts(configured(file, drop=["lasst"]), "turns"))


def test_turns_whose_call_failed_can_be_left_out(tmp_path: Path) -> None:
    """Field report O6. The failure stays in later states: the engine would see it."""
    failed = [USER, CALLED, {**RESULT, "content": "Error: no such order"}, SAID]
    file = chat_rows(tmp_path / "x.jsonl", {"id": "a", "messages": failed, "reward": 0}, {"id": "b", "reward": 1})
    summary = run_turns(configured(file, drop=["next_error"]), tmp_path / "run")
    assert (summary["turns"]["kept"], summary["turns"]["skipped"]) == (3, {"next_error": 1})
    kept = list(turns_in(tmp_path / "run/turns/turns.jsonl"))
    assert [t.id for t in kept] == ["a#1", "b#0", "b#1"] and kept[0].messages[2]["content"].startswith("Error")
    summary = run_turns(configured(file, drop=["run_failed"]), tmp_path / "run")
    assert summary["turns"]["skipped"] == {"run_failed": 2}


def test_a_trajectory_in_two_splits_is_an_error(tmp_path: Path) -> None:
    def pivot(turn: int) -> dict[str, Any]:
        return {
            "responses_create_params": {"input": [{"role": "user", "content": f"u{turn}", "type": "message"}]},
            "expected_action": {"type": "message", "content": f"a{turn}"}, "trajectory_id": "same",
            "meta_info": {"turn": turn}, "task_id": f"task{turn}",
        }  # fmt: skip

    file = tmp_path / "x.jsonl"
    file.write_text("\n".join(json.dumps(pivot(turn)) for turn in range(20)))
    with pytest.raises(UserError, match=r"x\.jsonl:\d+: trajectory 'same' is in the splits"):
        run_turns(configured(file), tmp_path / "run")
    file.write_text("\n".join(json.dumps({**pivot(turn), "task_id": "one"}) for turn in range(20)))
    summary = run_turns(configured(file), tmp_path / "run")
    assert summary["turns"]["kept"] == 20 and summary["turns"]["by_split"]["train"] == 20


@given(st.lists(st.integers(0, 300), max_size=2000))
def test_digest_set_is_a_set(values: list[int]) -> None:
    ours, theirs = DigestSet(), set()
    for value in values:
        digest = (value * 7919 + 1).to_bytes(8, "little")
        assert ours.add(digest) is (digest not in theirs)
        theirs.add(digest)
    assert len(ours) == len(theirs)


@settings(max_examples=50)
@given(st.sets(st.integers(1, 2**64 - 2), min_size=1, max_size=40))
def test_the_smallest_of_a_digest_set(values: set[int]) -> None:
    ours = DigestSet()
    for value in values:
        ours.add_number(value)
    assert [ours.smallest(i + 1) for i in range(len(values))] == sorted(values)
    assert all(value.to_bytes(8, "little") in ours for value in values)
    assert all((value + 1).to_bytes(8, "little") not in ours for value in values if value + 1 not in values)


def test_the_spool_gives_back_what_it_got(shared_data: Path, tmp_path: Path) -> None:
    items = [*read_trajectories(str(shared_data / "formats")), Skip("f", 3, None, "not_json", "x")]
    with Spool(tmp_path) as spool:
        for item in items:
            spool.add(item)
        back = list(spool)
        assert back == items == list(spool)
    assert json.dumps([t.tools for t in back if isinstance(t, Trajectory)]) == json.dumps(
        [t.tools for t in items if isinstance(t, Trajectory)]
    )
    assert not list(tmp_path.iterdir())


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    pipe = tmp_path / "rows.jsonl"
    os.mkfifo(pipe)
    text = chat_rows(tmp_path / "x.txt", {"id": "a"}, {"id": "b"}).read_text()
    feeder = threading.Thread(target=pipe.write_text, args=(text,))
    feeder.start()
    summary = run_turns(configured(pipe), tmp_path / "run")
    feeder.join()
    assert summary["trajectories"]["read"] == 2
