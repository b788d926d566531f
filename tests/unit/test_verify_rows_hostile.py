"""`pivotrl verify` on rows of every domain with missing fields, wrong types and huge input: one row for one row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pivotrl import cli

DOMAINS = ("conversational", "tau2", "terminal", "swe", "search", "outfitters", "shell_tasks")


def called(name: str, **arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


EXPECTED = {
    "conversational": called("find", city="x"),
    "tau2": called("get_user_details", user_id="mia_li_3668"),
    "terminal": called("bash", command="ls -la"),
    "swe": called("edit", path="/r/a.py", old_str="x = 1", new_str="x = 2"),
    "search": called("search", query="a b"),
    "outfitters": called("get_order", order_id="W1"),
    "shell_tasks": called("bash", command="ls"),
}
DEEP = 100_000
MEGABYTE = 1_000_000
VALUES: list[Any] = [None, 7, 1.5, True, "x", [], {}, [[]], [None], {"a": 1}, [{"role": 5}], {"tool_calls": 3}]
COMPLETIONS: list[Any] = [
    *VALUES,
    {"content": [{"type": "image"}]},
    {"tool_calls": [None]},
    {"tool_calls": [{"function": {"name": "f", "arguments": 5}}]},
    {"tool_calls": [{"function": {"name": "f", "arguments": "[" * DEEP}}]},
    {"tool_calls": "x", "function_call": []},
    {"content": "a" * MEGABYTE},
    "a" * MEGABYTE,
    "<tool_call>" * (MEGABYTE // 11),
    "<think>" * (MEGABYTE // 7),
    "{" * MEGABYTE,
    "<answer>" * (MEGABYTE // 8),
    "\n" * MEGABYTE,
    "\nanswer" + "!" * MEGABYTE,
    "\\boxed{" * (MEGABYTE // 7),
    "<tool_call>" + "[" * DEEP + "]" * DEEP + "</tool_call>",
    '<tool_call>{"name": "bash", "arguments": {"command": "' + "a " * (MEGABYTE // 2) + '"}}</tool_call>',
    '<tool_call>{"name": "edit", "arguments": {"path": "' + "/" * MEGABYTE + '"}}</tool_call>',
    '<tool_call>{"name": "search", "arguments": {"query": "' + "a OR " * (MEGABYTE // 5) + '"}}</tool_call>',
    '<tool_call>{"name": "find", "arguments": {"city": ' + "9" * 5000 + "}}</tool_call>",
]


def rows_of(domain: str) -> list[dict[str, Any]]:
    good = {"domain": domain, "expected": EXPECTED[domain], "completion": EXPECTED[domain], "state": [], "tools": []}
    rows = [{k: v for k, v in good.items() if k != left_out} for left_out in good if left_out != "domain"]
    rows += [{**good, key: value} for key in ("expected", "state", "tools") for value in VALUES]
    rows += [{**good, "completion": value} for value in COMPLETIONS]
    said = {"role": "assistant", "content": "Answer: 5 %"}
    rows += [{**good, "expected": said, "completion": value} for value in COMPLETIONS if isinstance(value, str)]
    return [{"id": f"{domain} {i}", **row} for i, row in enumerate(rows)]


def verify(folder: Path, lines: list[str], *overrides: str) -> list[dict[str, Any]]:
    (folder / "in.jsonl").write_text("\n".join(lines))
    arguments = ["verify", "--input", str(folder / "in.jsonl"), "--output", str(folder / "out.jsonl")]
    assert cli.main([*arguments, *overrides]) == 0
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def test_one_row_for_one_row(tmp_path: Path, shell_sandbox: None) -> None:
    rows = [row for domain in DOMAINS for row in rows_of(domain)]
    out = verify(tmp_path, [json.dumps(row) for row in rows])
    assert [row["id"] for row in out] == [row["id"] for row in rows]
    for row, verdict in zip(rows, out, strict=True):
        known = row.get("completion") == row.get("expected") == EXPECTED[row["domain"]]
        if not known:  # nothing but the demonstration is ever paid
            assert verdict["reward"] in (0, None), (row["id"], verdict)
        assert verdict["reason"] not in ("verifier_error", "invalid_reward"), (row["id"], verdict)
    told = {row["id"]: row for row in out}
    for domain in ("conversational", "terminal", "swe", "search"):
        assert told[f"{domain} 2"]["reward"] == told[f"{domain} 3"]["reward"] == 1  # state and tools may be absent
        assert told[f"{domain} 0"]["reason"] == told[f"{domain} 1"]["reason"] == "bad_row"


def test_lines_that_are_no_rows_keep_their_place_and_id(tmp_path: Path) -> None:
    said = json.dumps({"role": "assistant", "content": "x"})
    lines = [
        f'{{"id": 1, "expected": {said}, "completion": "x"}}',
        "[" * DEEP,
        '{"id": 3, "expected": ' + "[" * 150 + "]" * 150 + "}",
        f'{{"id": 4, "expected": {said}, "completion": "\\ud800"}}',
        f'{{"id": "\\ud800", "expected": {said}, "completion": "x"}}',
        f'{{"id": 6, "id": 7, "expected": {said}, "completion": "x"}}',
        f'{{"id": 8, "expected": {said}, "completion": NaN}}',
        "",
        f'{{"id": {{"a": [1]}}, "expected": {said}, "completion": "x"}}',
        "7",
        '{"id": 10, "expected": {"role": "user", "content": "x"}, "completion": "x"}',
        f'{{"id": 11, "state": "x", "expected": {said}, "completion": "x"}}',
        '{"id": 12, "state": [{"role": "user", "content": "q"}], "expected": {"content": "x"}, "completion": "x"}',
    ]
    out = verify(tmp_path, lines, "domain=terminal")
    assert [row.get("id") for row in out] == [1, None, 3, 4, None, 7, 8, {"a": [1]}, None, 10, 11, 12]
    assert [row["reward"] for row in out] == [1, None, None, None, None, None, None, 1, None, None, None, 1]
    assert all(row["reason"] == "bad_row" and row["details"]["error"] for row in out if row["reward"] is None)


@pytest.fixture
def shell_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """`shell_tasks` opens only where a sandbox works; these rows have no state that it would run anything in."""
    from pivotrl.verifiers import sandbox

    if sandbox.unusable():
        monkeypatch.setattr(sandbox, "unusable", lambda: None)
