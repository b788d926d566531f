"""The other action grammars: total, exact, and without invention."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pivotrl.rendering.parsing import ACTION_FORMATS, format_action, parse_action
from pivotrl.trajectories.reader import read_trajectories
from pivotrl.trajectories.schema import Action, ToolCall, Trajectory
from pivotrl.trajectories.turns import split_turns
from tests.unit.test_parsing import json_values

MARKS = ("<think>", "</think>", "<function=", "</function>", "<parameter=", "</parameter>", "<tool_call>")
MARKS = (*MARKS, "</tool_call>", "<|python_tag|>")
characters = st.characters(exclude_categories=["Cs"])
plain = st.text(characters).filter(lambda text: not any(mark in text for mark in MARKS))
names = st.from_regex(r"[A-Za-z_][\w.-]{0,12}", fullmatch=True)
# One tool whose schema says what each value is: only so can text be told from numbers.
PROPERTIES = {
    "s": {"type": "string"}, "u": {}, "i": {"type": "integer"}, "n": {"type": ["number", "null"]},
    "b": {"type": "boolean"}, "l": {"type": "array"}, "o": {"anyOf": [{"type": "object"}, {"type": "null"}]},
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": PROPERTIES}}}]
typed = st.fixed_dictionaries(
    {},
    optional={
        "s": plain, "u": plain, "i": st.integers(-(10**30), 10**30), "b": st.booleans(),
        "n": st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.integers(-9, 9),
        "l": st.lists(st.integers() | plain, max_size=3).filter(lambda v: not any(m in json.dumps(v) for m in MARKS)),
        "o": st.none() | st.dictionaries(plain, st.integers(), max_size=2),
    },
)  # fmt: skip
xml_calls = st.builds(ToolCall, st.just("f"), typed) | st.builds(ToolCall, names, st.dictionaries(names, plain))


@given(st.builds(Action, plain, plain, st.lists(xml_calls, max_size=3).map(tuple)))
def test_qwen3_coder_parse_is_the_inverse_of_format(action: Action) -> None:
    if any(call.name == "f" and not set(call.arguments) <= set(PROPERTIES) for call in action.tool_calls):
        return
    assert parse_action(format_action(action, "qwen3_coder"), "qwen3_coder", TOOLS) == action


json_calls = st.builds(ToolCall, st.text(characters, min_size=1), st.dictionaries(st.text(characters), json_values))


@given(st.builds(Action, plain, plain, st.lists(json_calls, max_size=3).map(tuple)))
def test_llama3_json_parse_is_the_inverse_of_format(action: Action) -> None:
    written = format_action(action, "llama3_json")
    if not any(mark in json.dumps([c.to_json() for c in action.tool_calls]) for mark in MARKS):
        assert parse_action(written, "llama3_json") == action


pieces = [*MARKS, "f>", "s>", ">", "\n", '{"name": "f"', ', "parameters": {}}', "{", "}", ";", '"', "1", "text"]
XML = "<tool_call>\n<function=f>\n<parameter=i>\n1\n</parameter>\n</function>\n</tool_call>"


@given(st.lists(st.sampled_from(pieces) | st.text(), max_size=14).map("".join), st.sampled_from(list(ACTION_FORMATS)))
def test_every_parser_is_total(text: str, name: str) -> None:
    parse_action(text, name, TOOLS)


@pytest.mark.parametrize("name", list(ACTION_FORMATS))
def test_odd_text_is_named_and_never_a_call(name: str) -> None:
    odd = ["\ud800", "9" * 5000, "[" * 100_000, '{"a":' * 100_000, "NaN", '"\\udfff"', "\0", '{"a": 1, "a": 2}']
    for value in odd:
        for text in (
            f'<tool_call>\n{{"name": "f", "arguments": {{"a": {value}}}}}\n</tool_call>',
            f'<|python_tag|>{{"name": "f", "parameters": {{"a": {value}}}}}',
            f"<function=f>\n<parameter=o>\n{value}\n</parameter>\n</function>",
        ):
            action = parse_action(text, name, TOOLS)
            assert not action.tool_calls, text[:80]
            assert action.problems or action.text == text


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "llama3_json", "terminus"])
def test_no_cut_of_a_completion_invents_a_call_or_a_value(name: str) -> None:
    action = Action("Look.", "hm", (ToolCall("f", {"s": "  a\n\tb ", "i": 12}),))
    whole = format_action(action, name) if name != "terminus" else '{"analysis": "a", "plan": "b", "commands": []}'
    for end in range(len(whole)):
        cut = parse_action(whole[:end], name, TOOLS)
        assert cut.problems or not cut.tool_calls or cut.tool_calls == action.tool_calls, whole[:end]
        assert all(call == action.tool_calls[0] for call in cut.tool_calls)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (XML.replace("\n1\n", "\none\n"), "bad_value: i"),
        (XML.replace("\n1\n", "\n1.5\n"), "bad_value: i"),
        (XML.replace("\n1\n", "\ntrue\n"), "bad_value: i"),
        (XML.replace("</function>", ""), "unclosed_function"),
        (XML.replace("</parameter>", ""), "unclosed_function"),
        (XML.replace("=f>", "=>"), "missing_name"),
        (XML.replace("</parameter>", "</parameter><parameter=i>2</parameter>"), "duplicate_parameter"),
        ("<tool_call>", "stray_tag: <tool_call>"),
    ],
)
def test_malformed_xml_calls_are_named(text: str, problem: str) -> None:
    action = parse_action(text, "qwen3_coder", TOOLS)
    assert not action.tool_calls and action.problems[0] == problem


def test_xml_calls() -> None:
    call = ToolCall("f", {"i": 1})
    assert parse_action(XML, "qwen3_coder", TOOLS) == Action("", "", (call,))
    assert parse_action(XML, "qwen3_coder").tool_calls == (ToolCall("f", {"i": "1"}),)  # no schema: as written
    bare = XML.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    assert parse_action(bare, "qwen3_coder", TOOLS) == Action("", "", (call,))
    assert parse_action(f"{XML}\n{XML}", "qwen3_coder", TOOLS).tool_calls == (call, call)
    assert parse_action(f"{XML} and", "qwen3_coder", TOOLS).problems == ("text_after_call",)
    assert parse_action(XML[:-13], "qwen3_coder", TOOLS).problems == ("unclosed_tool_call",)
    assert parse_action(f"<think>{XML}</think>no", "qwen3_coder", TOOLS) == Action("no", XML)
    assert parse_action(f"try {XML}\n</think>\n\nno", "qwen3_coder", TOOLS).tool_calls == ()  # opened in the prompt
    value = "    x = '</think>'\n\n"
    quoted = Action("", "", (ToolCall("f", {"s": value}),))
    assert parse_action(format_action(quoted, "qwen3_coder"), "qwen3_coder", TOOLS) == quoted


CALL = '{"name": "f", "parameters": {"a": 1}}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CALL, Action("", "", (ToolCall("f", {"a": 1}),))),
        (f"<|python_tag|>{CALL}; {CALL}", Action("", "", (ToolCall("f", {"a": 1}),) * 2)),
        (f"I would write {CALL}", Action(f"I would write {CALL}")),
        ('{"answer": 3}', Action('{"answer": 3}')),
        ("<|python_tag|>print(1)", Action("", "", (), ("broken_json: not_json",))),
        ('{"name": "f"', Action("", "", (), ("broken_json: not_json",))),
        ('{"name": "f"}', Action("", "", (), ("missing_arguments",))),
        (f"{CALL} done", Action("", "", (ToolCall("f", {"a": 1}),), ("text_after_call",))),
        (f"<think>{CALL}</think>x", Action("x", CALL)),
    ],
)
def test_llama3_json(text: str, expected: Action) -> None:
    assert parse_action(text, "llama3_json") == expected


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ('{"analysis": "", "plan": "", "commands": [{"keystrokes": "ls\\n", "duration": 0.1}]}', ()),
        ("no object", ("no_json",)),
        ('{"analysis": "", "plan": "", "commands": [{"keys": ""}]}', ("bad_command",)),
        ('{"analysis": "", "plan": 1, "commands": []}', ("mistyped_field",)),
        ('{"analysis": "", "plan": "", "commands": [], "x": 1}', ("unexpected_key",)),
        ('{"analysis": "", "plan": "", "commands": []} {}', ("two_objects",)),
    ],
)
def test_terminus(text: str, problems: tuple[str, ...]) -> None:
    assert parse_action(text, "terminus") == Action(text, "", (), problems)
    assert parse_action(f"<think>\nhm\n</think>\n\n{text}", "terminus").thinking == "hm"


def test_every_shared_demonstration_reads_back_in_every_grammar(shared_data: Any) -> None:
    count = 0
    for file in ("tau_bench/airline_sft_compact.jsonl", "swe/swesmith_xml_chat.jsonl", "swe/anyswe_pi_chat.jsonl"):
        for item in read_trajectories(str(shared_data / file)):
            assert isinstance(item, Trajectory)
            for turn in split_turns(item, "train"):
                for name in ("hermes", "qwen3_coder", "llama3_json"):
                    action = turn.demonstration  # type: ignore[union-attr]
                    assert parse_action(format_action(action, name), name, item.tools) == action, (turn.id, name)
                    count += 1
    assert count > 1000
