"""A trajectory that breaks in its middle: the turns before stand, those from there on are skipped with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pivotrl import config
from pivotrl.io import read_jsonl
from pivotrl.trajectories.normalise import RowError, messages_of, read_messages
from pivotrl.trajectories.reader import Skip, read_trajectories
from pivotrl.trajectories.schema import Trajectory, Turn
from pivotrl.trajectories.turns import merge_pieces, split_turns
from pivotrl.turns_stage import run_turns

USER = {"role": "user", "content": "u"}
SAID = {"role": "assistant", "content": "a"}


def calls(*ids: str, arguments: Any = "{}") -> dict[str, Any]:
    made = [{"id": i, "type": "function", "function": {"name": "f", "arguments": arguments}} for i in ids]
    return {"role": "assistant", "tool_calls": made}


def result(identity: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": identity, "content": "r"}


def cut(tmp_path: Path, row: Any) -> tuple[list[str], list[tuple[str | None, str]], str]:
    """(ids of turns, (id, reason) of skips, detail) of a file of one row that is kept up to a defect."""
    file = tmp_path / "x.json"
    file.write_text(json.dumps(row), encoding="utf-8")
    (item,) = read_trajectories(str(file))
    assert isinstance(item, Trajectory) and item.defect is not None, item
    found = list(split_turns(item, "train"))
    kept, skips = [t for t in found if isinstance(t, Turn)], [t for t in found if isinstance(t, Skip)]
    assert all((skip.source, skip.line) == (str(file), 1) for skip in skips)
    assert not any("last" in turn.flags for turn in kept) or not skips
    return [t.id for t in kept], [(s.id, s.reason) for s in skips], item.defect.detail


GOOD = [USER, calls("1"), result("1"), SAID, USER]  # two turns
REST = [SAID, USER, calls("9"), result("9"), SAID]  # three more


@pytest.mark.parametrize(
    ("broken", "reason", "turns", "where"),
    [
        ([calls("2", arguments="{'a'"), result("2")], "arguments_not_json", [2, 3, 4, 5], 5),
        ([calls("2", arguments="[]"), result("2")], "arguments_not_an_object", [2, 3, 4, 5], 5),
        ([calls("2", "2"), result("2")], "duplicate_call_id", [2, 3, 4, 5], 5),
        ([{"role": "assistant", "tool_calls": "f()"}], "bad_tool_calls", [2, 3, 4, 5], 5),
        ([calls("2"), result("other")], "orphan_tool_result", [2, 3, 4, 5], 6),
        ([calls("2"), result("2"), result("3")], "orphan_tool_result", [2, 3, 4, 5], 7),  # one of two calls was lost
        ([SAID, result("2")], "orphan_tool_result", [2, 3, 4, 5], 6),  # its only call was lost
        ([SAID, calls("2"), result("3")], "orphan_tool_result", [2, 3, 4, 5], 7),  # two pieces of one turn
        ([SAID, calls("2", arguments="")], "arguments_not_json", [2, 3, 4, 5], 6),
        ([result("2")], "orphan_tool_result", [2, 3, 4], 5),  # a whole turn was lost; the one before it is whole
        ([{"role": "wizard", "content": ""}], "unknown_role", [2, 3, 4], 5),
        (["text"], "unknown_role", [2, 3, 4], 5),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "unsupported_content", [2, 3, 4], 5),
    ],
)
def test_turns_before_a_defect_stand(
    tmp_path: Path, broken: list[Any], reason: str, turns: list[int], where: int
) -> None:
    by_assistant = isinstance(broken[-1], dict) and broken[-1]["role"] == "assistant"
    rest = [USER, *REST] if by_assistant else REST
    kept, skipped, detail = cut(tmp_path, {"id": "T", "messages": [*GOOD, *broken, *rest]})
    assert kept == ["T#0", "T#1"]
    assert skipped == [(f"T#{i}", reason) for i in turns]
    assert detail.startswith(f"messages[{where}]")


def test_a_defect_after_the_last_turn_costs_none_and_is_told(tmp_path: Path) -> None:
    kept, skipped, _ = cut(tmp_path, {"id": "T", "messages": [*GOOD[:-1], {"role": "wizard", "content": ""}]})
    assert (kept, skipped) == (["T#0", "T#1"], [])
    cfg = config.Config(trajectories=config.Trajectories(path=str(tmp_path / "x.json")))
    summary = run_turns(cfg, tmp_path / "run")
    assert summary["cut_short"] == {"unknown_role": 1} and summary["trajectories"]["kept"] == 1
    (line,) = read_jsonl(tmp_path / "run/turns/skipped.jsonl")
    assert (line["kind"], line["id"], line["reason"], line["line"]) == ("rest", "T", "unknown_role", 1)


def test_every_turn_is_accounted_for(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    rows = [[*GOOD, calls("2"), result("3"), *REST], [USER, calls("1"), result("3"), *REST], [*GOOD, SAID]]
    file.write_text("".join(json.dumps({"id": str(i), "messages": row}) + "\n" for i, row in enumerate(rows)))
    cfg = config.Config(trajectories=config.Trajectories(path=str(file), deduplicate=False))
    summary = run_turns(cfg, tmp_path / "run")
    assert summary["trajectories"] == {"read": 3, "kept": 2, "skipped": {"orphan_tool_result": 1}}
    assert summary["cut_short"] == {"orphan_tool_result": 1}
    turns = summary["turns"]
    assert (turns["candidates"], turns["kept"], turns["skipped"]) == (9, 5, {"orphan_tool_result": 4})
    kinds = [row["kind"] for row in read_jsonl(tmp_path / "run/turns/skipped.jsonl")]
    assert kinds == ["rest", "turn", "turn", "turn", "turn", "trajectory"]


USE = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
USED = {"type": "tool_result", "tool_use_id": "1", "content": "r"}
CALL = {"type": "function_call", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "1", "output": "r"}
TEXT = {"type": "message", "role": "assistant", "content": "a"}
HERMES = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
ASKED, AGENT = {"source": "user", "message": "u"}, {"source": "agent", "message": "a"}
SAYS = {"action": "message", "args": {"content": "x"}}
FORMATS: dict[str, tuple[dict[str, Any], str, list[int]]] = {
    "anthropic": (
        {"messages": [USER, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [USED]}, SAID,
                      {"role": "user", "content": [{"type": "image"}]}, SAID]},
        "unsupported_content", [2]),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"},
                           {"from": "human", "value": "u"}, {"from": "function_call", "value": "{oops"},
                           {"from": "observation", "value": "r"}, {"from": "gpt", "value": "a"}]},
        "malformed_tool_call", [1, 2]),
    "hermes": (
        {"messages": [USER, {"role": "assistant", "content": HERMES},
                      {"role": "tool", "content": "<tool_response>\nr\n</tool_response> and more"}, SAID]},
        "malformed_tool_response", [1]),
    "atif": (
        {"schema_version": "ATIF-v1.8",
         "steps": [ASKED, AGENT, ASKED, {**AGENT, "tool_calls": ["f()"]}, ASKED, AGENT]},
        "bad_tool_calls", [1, 2]),
    "responses": (
        {"responses_create_params": {"input": "u"},
         "response": {"output": [{**CALL, "call_id": "1"}, OUTPUT, {**CALL, "call_id": "2"}, TEXT,
                                 {**CALL, "call_id": "3"}, {**OUTPUT, "call_id": "2"}, TEXT]}},
        "text_after_call", [1, 2]),
    "openhands": (
        {"events": [{"source": "user", **SAYS}, {"source": "agent", **SAYS}, {"source": "user", **SAYS},
                    {"source": "agent", "action": "run", "args": {"command": "ls"}}]},
        "unsupported_event", [1]),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_keeps_what_stands_before_its_own_defects(tmp_path: Path, name: str) -> None:
    row, reason, lost = FORMATS[name]
    kept, skipped, _ = cut(tmp_path, {**row, "id": "T"})
    assert kept == [f"T#{i}" for i in range(lost[0])]
    assert skipped == [(f"T#{i}", reason) for i in lost]


some_messages = st.lists(
    st.sampled_from(
        [USER, SAID, calls("1"), calls("1", "2"), result("1"), result("2"), calls("1", arguments="x"), {"role": "x"}]
    ),
    max_size=14,
)


@settings(max_examples=300)
@given(some_messages)
def test_turns_and_skips_are_the_assistant_turns(messages: list[dict[str, Any]]) -> None:
    turns = sum(m["role"] == "assistant" for m in merge_pieces(messages))
    try:
        kept, defect = read_messages(messages)
    except RowError:
        return
    found = list(split_turns(Trajectory("T", "d", kept, [], "t", defect=defect), "train"))
    assert [t.id for t in found] == [f"T#{i}" for i in range(turns)]
    assert kept == messages_of(messages[: len(kept)])  # what stands before a defect is a record of its own
    if defect is None:
        assert len(kept) == len(messages)
    elif defect.turns:
        assert not any("last" in t.flags for t in found if isinstance(t, Turn))
