"""Field reports F, G and O held against every domain's verifier and every action format, not only the one reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_turns import call, turn

from pivotrl import cli
from pivotrl.config import Trajectories
from pivotrl.configuration import load_config
from pivotrl.rendering.parsing import action_from_message, format_action, parse_action
from pivotrl.trajectories.reader import Skip, read_trajectories
from pivotrl.trajectories.schema import Action, ToolCall, Turn
from pivotrl.trajectories.turns import split_turns
from pivotrl.turns_stage import run_turns
from pivotrl.verifiers.base import Verdict
from pivotrl.verifiers.registry import get_verifier
from pivotrl.verifiers.rows import verify_rows

DOMAINS = ("conversational", "tau2", "terminal", "swe", "search")  # those whose verdicts need no environment
SETTINGS = {domain: load_config([f"domain={domain}"]).domain.verifier for domain in DOMAINS}
VERIFIERS = {domain: get_verifier(SETTINGS[domain]) for domain in DOMAINS}
GRAMMARS = ("hermes", "qwen3_coder", "llama3_json")
each_domain = pytest.mark.parametrize("domain", DOMAINS)
each_grammar = pytest.mark.parametrize("grammar", GRAMMARS)


def schema(**properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}


def score(domain: str, demonstration: Action, action: Action, *tools: dict[str, Any]) -> float | None:
    base = turn(demonstration)
    asked = Turn(base.id, base.id, base.id, 0, domain, "train", base.messages, list(tools), demonstration)
    return VERIFIERS[domain].verify(asked, action).reward


# F: tool-call parsing ---------------------------------------------------------------------------------


@each_grammar
@pytest.mark.parametrize("value", ["    return x\n", "\n\n  a\t", " ", "\n", "", "a\r\n", "</p>\n"])
def test_f1_white_space_of_values_round_trips(grammar: str, value: str) -> None:
    action = Action("", "", (ToolCall("f", {"s": value}),))
    assert parse_action(format_action(action, grammar), grammar, [schema(s={"type": "string"})]) == action


def test_f1_the_xml_format_takes_its_own_newlines_alone() -> None:
    text = "<tool_call>\n<function=f>\n<parameter=s>\n    return x\n\n</parameter>\n</function>\n</tool_call>"
    assert parse_action(text, "qwen3_coder").tool_calls == (ToolCall("f", {"s": "    return x\n"}),)


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"s": "a"}}</tool_call>\n<tool_call>{"name": "f"</tool_call>',
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=f>\n<parameter=s>\na\n</parameter>\n</function>\n</tool_call>\n"
            "<tool_call>\n<function=f>\n<parameter=s>\nb\n</function>\n</tool_call>",
        ),
        ("llama3_json", '{"name": "f", "parameters": {"s": "a"}}; {"name": "f", "parameters": {"s"'),
    ],
)
def test_f3_one_malformed_call_loses_no_other(grammar: str, text: str) -> None:
    action = parse_action(text, grammar)
    assert action.tool_calls == (ToolCall("f", {"s": "a"}),) and action.problems
    for domain in DOMAINS:  # found, and still not a success
        assert score(domain, call("f", s="a"), action) == 0


@each_domain
@pytest.mark.parametrize(
    "arguments", ['{"a": 1', '{"a": 1, "a": 1}', '{"a": 1}{"a": 1}', '{"a": 1}}', "{'a': 1}", '{"a": 1,}', '{"a": "1"}']
)
def test_f6_nothing_is_mended(domain: str, arguments: str) -> None:
    demonstration = call("f", a=1)
    text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    written = parse_action(text)
    served = action_from_message({"tool_calls": [{"function": {"name": "f", "arguments": arguments}}]})
    for action in (written, served):
        assert action.problems or action.tool_calls == (ToolCall("f", {"a": "1"}),)
        assert score(domain, demonstration, action, schema(a={"type": "integer"})) == 0
    doubled = parse_action('<tool_call>{"name": "f", "name": "f", "arguments": {"a": 1}}</tool_call>')
    assert doubled.tool_calls == () and score(domain, demonstration, doubled) == 0


@each_domain
@each_grammar
def test_f7_a_call_in_thinking_is_no_call(domain: str, grammar: str) -> None:
    demonstration = call("f", s="a")
    inside = parse_action(f"<think>{format_action(demonstration, grammar)}</think>ok", grammar)
    assert (inside.tool_calls, inside.text) == ((), "ok")
    assert score(domain, demonstration, inside) == 0
    after = parse_action(f"<think>so</think>\n\n{format_action(demonstration, grammar)}", grammar)
    assert score(domain, demonstration, after) == 1


# G: verifiers -----------------------------------------------------------------------------------------


@each_domain
@pytest.mark.parametrize("tool", ["bash", "terminal", "execute_bash"])
@pytest.mark.parametrize("arguments", ["{}", '{"command":""}', "not json", '{"command":"rm -rf /"}', "null", "[]"])
def test_g1_any_bash_call_is_not_the_bash_call(domain: str, tool: str, arguments: str) -> None:
    message = {"tool_calls": [{"function": {"name": tool, "arguments": arguments}}]}
    expected = {"tool_calls": [{"function": {"name": tool, "arguments": '{"command": "pytest -q"}'}}]}
    row, own = verify_rows(
        [{"expected": expected, "completion": message}, {"expected": expected, "completion": expected}],
        SETTINGS[domain],
    )
    assert (row["reward"], own["reward"]) == (0, 1)


@each_domain
def test_g2_arguments_of_a_search_count(domain: str) -> None:
    for tool, field in [("search", "query"), ("grep", "pattern"), ("web_search", "query"), ("find", "name")]:
        assert score(domain, call(tool, **{field: "a"}), call(tool, **{field: "b"})) == 0
    for other in ("FOO=1 pytest", "cd /r && pytest"):  # documented: what precedes the command is part of it
        assert score(domain, call("bash", command="pytest"), call("bash", command=other)) == 0


@each_domain
@pytest.mark.parametrize("field", ["description", "duration", "explanation", "timeout"])
def test_g2_no_argument_of_an_unknown_tool_is_ignored(domain: str, field: str) -> None:
    assert score(domain, call("create", **{field: "a"}), call("create", **{field: "b"})) == 0
    assert score(domain, call("create", **{field: "a"}), call("create")) == 0


@each_domain
@pytest.mark.parametrize(
    ("kind", "one", "two", "same"),
    [
        ("number", 1, 1.0, 1),
        ("integer", 1, 1.0, 0),
        (None, 1, 1.0, 0),
        ("number", 1, True, 0),
        ("integer", 1, True, 0),
        (None, 0, False, 0),
        ("number", 1, "1", 0),
        (None, 1, "1", 0),
        ("boolean", True, "true", 0),
        (None, None, "", 0),
        ("object", {"a": 1, "b": 2}, {"b": 2, "a": 1}, 1),
        ("object", {"a": {"b": [1]}}, {"a": {"b": [True]}}, 0),
        ("array", ["a", "b"], ["b", "a"], 0),
        ("array", [{"a": 1}], [{"a": "1"}], 0),
    ],
)
def test_g4_types(domain: str, kind: str | None, one: Any, two: Any, same: int) -> None:
    tools = [schema(v={"type": kind} if kind else {})]
    assert score(domain, call("f", v=one), call("f", v=two), *tools) == same
    assert score(domain, call("f", v=two), call("f", v=one), *tools) == same


@each_domain
def test_g5_a_message_is_no_constant_1(domain: str) -> None:
    said = Action("Your order W123 ships on Monday.")
    assert score(domain, said, Action("")) == score(domain, said, Action(" \n\t")) == 0
    assert score(domain, said, call("f", s="a")) == 0
    for other in ("anything", "ok", "Your order W124 ships on Monday.", said.text * 2, "Do not: " + said.text):
        assert score(domain, said, Action(other)) in (0, None), other


@each_domain
def test_g14_optional_fields_change_no_score(domain: str) -> None:
    bare: dict[str, Any] = {"tool_calls": [{"function": {"name": "f", "arguments": {"s": "a"}}}]}
    extra = {"type": "message", "role": "assistant", "content": None, "refusal": None, "id": "m", "status": "completed"}
    full = {**extra, "tool_calls": [{"id": "c", "type": "function", "index": 0, **bare["tool_calls"][0]}]}
    said: dict[str, Any] = {"content": "Done: 12."}
    parts = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Done: 12."}]}
    for forms in ((bare, full), (said, parts, {"role": "assistant", **said})):
        rows = [{"expected": one, "completion": two} for one in forms for two in forms]
        assert len({json.dumps(row) for row in verify_rows(rows, SETTINGS[domain])}) == 1


# O: turns ---------------------------------------------------------------------------------------------


def test_o6_turns_whose_call_failed_can_be_dropped_and_are_counted(tmp_path: Path) -> None:
    def called(name: str) -> list[dict[str, Any]]:
        content = "Error: no such order" if name == "bad" else "fine"
        function = {"name": name, "arguments": "{}"}
        message = {"role": "assistant", "tool_calls": [{"id": name, "type": "function", "function": function}]}
        return [message, {"role": "tool", "tool_call_id": name, "content": content}]

    messages = [{"role": "user", "content": "u"}, *called("good"), *called("bad"), *called("other")]
    (tmp_path / "x.jsonl").write_text(json.dumps({"id": "t", "messages": messages}))
    cfg = load_config([])
    cfg.trajectories = Trajectories(path=str(tmp_path / "x.jsonl"))
    assert run_turns(cfg, tmp_path / "all")["turns"]["kept"] == 3
    cfg.trajectories.drop = ["next_error"]
    summary = run_turns(cfg, tmp_path / "dropped")["turns"]
    assert (summary["kept"], summary["skipped"]) == (2, {"next_error": 1})


# Properties over all shared turns ---------------------------------------------------------------------


def shared_turns(folder: Path) -> list[Turn]:
    files = [
        file for file in sorted(folder.glob("*/*.json*")) if file.parent.name != "ood" and "EXPECTED" not in file.name
    ]
    items = [item for file in files for item in read_trajectories(str(file)) if not isinstance(item, Skip)]
    return [step for item in items for step in split_turns(item, "train") if not isinstance(step, Skip)]


def test_every_domain_accepts_every_shared_demonstration_and_no_trick(shared_data: Path) -> None:
    """A text turn scores 1 or is excluded for being one; both ways no other text is paid."""
    turns = shared_turns(shared_data)
    assert len(turns) > 1000
    for domain, verifier in VERIFIERS.items():
        for step in turns:
            own = verifier.verify(step, step.demonstration)
            if step.demonstration.tool_calls or domain not in ("conversational", "tau2"):
                assert own.reward == 1, (domain, step.id, own)
            else:
                assert own == Verdict(None, "text_turn"), (domain, step.id, own)
            calls = step.demonstration.tool_calls
            broken = Action(step.demonstration.text, "", calls, ("broken_json",))
            assert verifier.verify(step, Action()).reward == verifier.verify(step, broken).reward == 0
            if calls:
                emptied = Action("", "", tuple(ToolCall(c.name, {}) for c in calls))
                surplus = Action("", "", (*calls, ToolCall("unheard_of", {"x": 1})))
                assert verifier.verify(step, surplus).reward == 0, (domain, step.id)
                if any(c.arguments for c in calls):
                    assert verifier.verify(step, emptied).reward == 0, (domain, step.id)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)
calls = st.builds(
    ToolCall,
    st.sampled_from(["f", "bash", "search", "str_replace_editor"]),
    st.dictionaries(st.sampled_from(["v", "command", "query", "path"]), values, max_size=3),
)
actions = st.builds(Action, st.text(max_size=8), st.text(max_size=3), st.lists(calls, max_size=2).map(tuple))


@settings(max_examples=150)
@given(actions, actions, st.sampled_from(DOMAINS))
def test_total_reflexive_and_blind_to_thinking(one: Action, two: Action, domain: str) -> None:
    assert score(domain, two, two) in ((1,) if two.tool_calls else (1, None, 0) if not two.text.strip() else (1, None))
    verdict = VERIFIERS[domain].verify(turn(one), two)
    assert verdict.reason not in ("verifier_error", "invalid_reward")
    unthinking = Action(two.text, "", two.tool_calls)
    assert VERIFIERS[domain].verify(turn(one), unthinking) == verdict
    if one.tool_calls and two.tool_calls:
        assert score(domain, two, one) == verdict.reward


@settings(max_examples=150)
@given(
    st.text() | st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "<think>", "{", '"name"', "f"])).map("".join)
)
def test_arbitrary_text_is_judged(text: str) -> None:
    for grammar in (*GRAMMARS, "terminus"):
        action = parse_action(text, grammar)
        for domain in DOMAINS:
            assert score(domain, call("f", v=1), action) == 0


# The command ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "rewards"),
    [([], [0, 1, 1, 0, 0, None, None, None]), (["domain=terminal"], [1, 1, 1, 1, 1, None, None, None])],
)
def test_the_command_judges_each_row_by_its_domain(tmp_path: Path, overrides: list[str], rewards: list[Any]) -> None:
    def message(command: str) -> dict[str, Any]:
        return {"role": "assistant", "tool_calls": [{"function": {"name": "bash", "arguments": {"command": command}}}]}

    names = ["conversational_tool_use", "terminal", "swe", "tau2", "airline"]
    rows = [
        {"id": i, "domain": d, "expected": message("ls -la"), "completion": message("ls -al")}
        for i, d in enumerate(names)
    ]
    lines = [*map(json.dumps, rows), "no json", "[" * 100_000, '{"id": "x", "domain": 7}']
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    arguments = ["verify", "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl"), *overrides]
    assert cli.main(arguments) == 0
    out = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["reward"] for row in out] == rewards
    assert [row.get("id") for row in out] == [0, 1, 2, 3, 4, None, None, "x"]
    assert all(row["reason"] == "bad_row" for row in out[5:])
