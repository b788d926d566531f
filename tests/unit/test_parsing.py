"""Hermes text <-> Action: total, exact, and without mending (field reports F1-F7)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pivotrl.errors import UserError
from pivotrl.rendering.parsing import action_from_message, format_action, parse_action
from pivotrl.trajectories.schema import Action, ToolCall


def block(value: Any) -> str:
    return f"<tool_call>\n{value if isinstance(value, str) else json.dumps(value)}\n</tool_call>"


CALL = {"name": "f", "arguments": {"a": 1}}
GOOD = block(CALL)
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
characters = st.characters(exclude_categories=["Cs"])
plain = st.text(characters).filter(lambda text: not any(mark in text for mark in MARKS))
# Text that begins with white space before a mark-like start is still plain: only the marks are grammar.
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(characters),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(characters), inner, max_size=3),
    max_leaves=8,
)
calls = st.builds(
    ToolCall, st.text(characters, min_size=1), st.dictionaries(st.text(characters), json_values, max_size=4)
)
actions = st.builds(Action, plain, plain, st.lists(calls, max_size=3).map(tuple))


@given(actions)
def test_parse_is_the_inverse_of_format(action: Action) -> None:
    assert parse_action(format_action(action)) == action


pieces = st.sampled_from(
    [*MARKS, GOOD, '{"name": "f"', '"', "\\", "{", "}", "\n", " ", "text", '{"name": "f", "arguments": {']
)


@given(st.lists(pieces | st.text(), max_size=12).map("".join))
def test_parse_is_total(text: str) -> None:
    action = parse_action(text)
    assert "<tool_call>" not in action.text or action.problems


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}\n</tool_call>', "broken_json: not_json"),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}', "unclosed_tool_call"),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}', "broken_json: not_json"),
        (block('{"name": "f", "arguments": {}}{"a": 1}'), "trailing_garbage"),
        (block('{"name": "f", "arguments": {"a": 1, "a": 2}}'), "broken_json: duplicate_key"),
        (block('{"name": "f", "name": "g", "arguments": {}}'), "broken_json: duplicate_key"),
        (block('{"name": "f", "arguments": {"a": NaN}}'), "broken_json: non_finite_number"),
        (block({"arguments": {}}), "missing_name"),
        (block({"name": "", "arguments": {}}), "missing_name"),
        (block({"name": "f"}), "missing_arguments"),
        (block({"name": "f", "arguments": '{"a": 1}'}), "arguments_not_an_object"),
        (block({"name": "f", "arguments": [1]}), "arguments_not_an_object"),
        (block([CALL]), "call_not_an_object"),
        (block({**CALL, "b": 1}), "unexpected_key"),
        (block(""), "broken_json: not_json"),
        ("<tool_call>", "broken_json: not_json"),
    ],
)
def test_malformed_calls_are_named_and_give_no_call(text: str, problem: str) -> None:
    assert parse_action(text) == Action("", "", (), (problem,))


def test_a_valid_call_survives_its_broken_neighbour() -> None:
    expected = (ToolCall("f", {"a": 1}),)
    for broken in (block("{"), block("{}x"), '<tool_call>\n{"name"'):
        assert parse_action(f"{GOOD}\n{broken}").tool_calls == expected
        assert len(parse_action(f"{GOOD}\n{broken}").problems) == 1
    assert parse_action(f"<tool_call>{{\n{GOOD}").tool_calls == expected


def test_white_space_of_values_is_kept() -> None:
    text = block({"name": "edit", "arguments": {"new": "    return x\n"}})
    assert parse_action(text).tool_calls[0].arguments["new"] == "    return x\n"


def test_thinking() -> None:
    inside = parse_action(f"<think>{GOOD}</think>ok")
    assert (inside.tool_calls, inside.text, inside.problems) == ((), "ok", ())
    assert parse_action(f"so\n</think>\n\n{GOOD}") == Action(
        "", "so", (ToolCall("f", {"a": 1}),)
    )  # opened in the prompt
    assert parse_action(f"<think>{GOOD}").problems == ("unclosed_thinking",)
    assert parse_action(f"<think>{GOOD}").tool_calls == ()
    late = parse_action(f"hi <think>{GOOD}</think>")
    assert late.tool_calls == () and late.problems == ("misplaced_thinking",)
    assert parse_action("<think>\n\n</think>\n\nhi") == Action("hi")


def test_marks_inside_argument_strings_are_data() -> None:
    arguments = {"text": "</tool_call> <tool_call> <think>x</think>"}
    assert parse_action(block({"name": "f", "arguments": arguments})) == Action("", "", (ToolCall("f", arguments),))


def test_text_around_calls() -> None:
    assert parse_action(f"Let me see.\n{GOOD}").text == "Let me see."
    assert parse_action(f"{GOOD}\nDone.").problems == ("text_after_call",)
    assert parse_action("a </tool_call> b").problems == ("stray_close_tag",)
    assert parse_action("  spaced\n") == Action("  spaced\n")


def test_unknown_format() -> None:
    with pytest.raises(UserError, match="hermes"):
        parse_action("x", "herms")


def test_served_messages_optional_fields_make_no_difference() -> None:
    full = {
        "role": "assistant", "type": "message", "content": None, "refusal": None, "function_call": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
    }  # fmt: skip
    lean = {"tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    assert action_from_message(full) == action_from_message(lean) == Action("", "", (ToolCall("f", {"a": 1}),))


@given(st.dictionaries(st.sampled_from(["content", "tool_calls", "function_call", "thinking"]), json_values))
def test_served_messages_never_raise(message: dict[str, Any]) -> None:
    action_from_message(message)


def test_a_bad_served_call_is_a_problem_and_the_good_one_stays() -> None:
    bad = {"function": {"name": "g", "arguments": "not json"}}
    action = action_from_message({"tool_calls": [{"function": CALL}, bad]})
    assert action.tool_calls == (ToolCall("f", {"a": 1}),) and action.problems == ("arguments_not_json",)
