"""The functional verifier: right values of the field reports (F, G), and what an exploit would try."""

from __future__ import annotations

import json
import math
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pivotrl import config
from pivotrl.errors import UserError
from pivotrl.rendering.parsing import format_action, parse_action
from pivotrl.trajectories.reader import Skip, read_trajectories
from pivotrl.trajectories.schema import Action, ToolCall, Turn
from pivotrl.trajectories.turns import split_turns
from pivotrl.verifiers.base import Verdict
from pivotrl.verifiers.compare import json_equal, perfect_match
from pivotrl.verifiers.facts import facts_of
from pivotrl.verifiers.registry import CheckedVerifier, get_verifier
from pivotrl.verifiers.rows import verify_rows
from pivotrl.verifiers.strings import normalise

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "count": {"type": "integer"},
        "price": {"type": "number"},
        "flag": {"type": "boolean", "default": False},
        "size": {"type": "integer", "default": 10},
        "kind": {"type": "string", "enum": ["One", "Two"]},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "tags": {"type": "array", "items": {"type": "string"}},
        "people": {"type": "array", "items": {"$ref": "#/$defs/person"}},
    },
    "required": ["city"],
    "$defs": {
        "person": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "age": {"type": "number", "default": 18},
                "boss": {"$ref": "#/$defs/person"},
            },
        }
    },
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("find", "book")]


def turn(demonstration: Action) -> Turn:
    return Turn("t#0", "t", "t", 0, "d", "train", [{"role": "user", "content": "u"}], TOOLS, demonstration)


def calls(*arguments: Any, name: str = "find") -> Action:
    return Action(tool_calls=tuple(ToolCall(name, a) for a in arguments))


def verdict(expected: Action, actual: Action, verifier: str = "tool_calls", **options: Any) -> Verdict:
    return get_verifier(config.VerifierConfig(verifier, options)).verify(turn(expected), actual)


def reward(expected: Action, actual: Action, **options: Any) -> float | None:
    return verdict(expected, actual, **options).reward


@pytest.mark.parametrize(
    ("expected", "actual", "value"),
    [
        ({"city": "A"}, {"city": "A"}, 1),
        ({"city": "A", "count": 1}, {"count": 1, "city": "A"}, 1),
        ({"price": 1}, {"price": 1.0}, 1),
        ({"count": 1}, {"count": 1.0}, 0),
        ({"count": 1}, {"count": True}, 0),
        ({"price": 1}, {"price": True}, 0),
        ({"count": 1}, {"count": "1"}, 0),
        ({"flag": True}, {"flag": 1}, 0),
        ({"city": "A"}, {"city": "A", "flag": False}, 1),
        ({"city": "A", "flag": False}, {"city": "A"}, 1),
        ({"city": "A"}, {"city": "A", "flag": True}, 0),
        ({"city": "A"}, {"city": "A", "size": 10}, 1),
        ({"city": "A"}, {"city": "A", "size": 10.0}, 0),
        ({"city": "A"}, {"city": "A", "note": None}, 1),
        ({"city": "A"}, {"city": "A", "note": ""}, 0),
        ({"city": "A"}, {"city": "A", "bogus": None}, 0),
        ({"city": "A"}, {"city": "A", "count": 0}, 0),
        ({"city": "A"}, {}, 0),
        ({"city": "A"}, {"city": None}, 0),
        ({"city": "A"}, {"city": "a"}, 0),
        ({"city": "A"}, {"city": " A"}, 0),
        ({"city": "\u00e9"}, {"city": "e\u0301"}, 1),
        ({"tags": ["a", "b"]}, {"tags": ["b", "a"]}, 0),
        ({"tags": ["a"]}, {"tags": ["a", "a"]}, 0),
        ({"people": [{"name": "X", "age": 18}]}, {"people": [{"name": "X"}]}, 1),
        ({"people": [{"name": "X", "age": 20}]}, {"people": [{"age": 20.0, "name": "X"}]}, 1),
        ({"people": [{"name": "X", "boss": {"name": "Y"}}]}, {"people": [{"name": "X", "boss": {"name": "Z"}}]}, 0),
        ({"people": [{"name": "X"}]}, {"people": {"name": "X"}}, 0),
        ({"price": 10**400}, {"price": 1e300}, 0),
    ],
)
def test_arguments(expected: Any, actual: Any, value: float) -> None:
    assert reward(calls(expected), calls(actual)) == value


def test_reasons_name_the_field() -> None:
    demonstration = calls({"city": "A", "people": [{"name": "X"}]})
    found = verdict(demonstration, calls({"city": "A", "people": [{"name": "Y"}]}))
    assert (found.reason, found.details) == ("argument_differs", {"field": "find.people.name"})
    assert verdict(demonstration, calls({"people": []})).reason == "missing_required"
    assert verdict(demonstration, calls({"city": "A"})).reason == "missing_argument"
    assert verdict(calls({"city": "A"}), calls({"city": "A", "x": 1})).reason == "unknown_argument"


def test_speak_or_call_and_tool_names() -> None:
    said, called = Action("Hello."), calls({"city": "A"})
    assert verdict(said, called).reason == "called_instead_of_speaking"
    assert verdict(called, said).reason == "spoke_instead_of_calling"
    assert verdict(called, Action(" \n")).reason == verdict(said, Action("")).reason == "empty"
    assert verdict(called, calls({"city": "A"}, name="book")).reason == "wrong_tool"
    assert verdict(called, calls({"city": "A"}, name="nope")).reason == "unknown_tool"
    assert verdict(called, calls({"city": "A"}, name="Find")).reward == 0
    assert verdict(called, Action("Looking...", "thought", called.tool_calls)).reward == 1
    assert verdict(called, Action("", "", called.tool_calls, ("text_after_call",))).reason == "malformed"
    assert verdict(said, Action("Hello.", "", (), ("stray_close_tag",))).reward == 0


def test_calls_are_a_multiset_without_free_surplus() -> None:
    a, b = {"city": "A"}, {"city": "B"}
    assert reward(calls(a, b), calls(b, a)) == 1
    assert verdict(calls(a), calls(a, a)).reason == "surplus_call"
    assert verdict(calls(a), calls(a, b)).reason == "surplus_call"
    assert verdict(calls(a, b), calls(a)).reason == "missing_call"
    assert verdict(calls(a, b), calls(a, a)).reward == 0
    assert verdict(calls(a, a), calls(a, b)).reward == 0


@pytest.mark.parametrize(
    "text", ["{}", '{"command": ""}', "not json", '{"command": "rm -rf /"}', '{"command": "pytest"}']
)
def test_any_bash_call_is_no_bash_call(text: str) -> None:  # G1
    expected = calls({"command": "pytest -q"}, name="bash")
    action = parse_action(f'<tool_call>\n{{"name": "bash", "arguments": {text}}}\n</tool_call>')
    assert verdict(expected, action).reward == 0


def test_shell_spellings_are_different_commands() -> None:  # G2: this verifier knows no shell; the shell verifier does
    for other in ("FOO=1 pytest", "cd /r && pytest"):
        assert reward(calls({"command": "pytest"}, name="bash"), calls({"command": other}, name="bash")) == 0
    assert reward(calls({"query": "a"}, name="search"), calls({"query": "b"}, name="search")) == 0


def test_string_rules() -> None:
    def city(a: str, b: str, rule: str) -> float | None:
        return reward(calls({"city": a}), calls({"city": b}), strings={"find.city": rule})

    assert city("São Paulo, BR.", " são  paulo br", "normalized") == 1
    assert city("1.5", "15", "normalized") == city("-5", "5", "normalized") == city("!!!", "???", "normalized") == 0
    assert city("10:30", "1030", "normalized") == city("C++", "C", "exact") == 0
    long = "Please change the flight of the whole family to May"
    assert city(long, long.replace("whole", "entire"), "similarity:0.6") == 1
    assert city(long, long.replace("whole", "entire"), "similarity:0.95") == 0
    assert city(f"{long} 5", f"{long} 6", "similarity:0.5") == 0
    assert city("", "", "similarity:0.5") == 1 and city("", "x", "similarity:0.5") == 0
    assert city("x", "anything", "any") == 1 and city("x", " ", "any") == 0
    assert reward(calls({"city": "x"}), calls({"city": 3}), strings={"*": "any"}) == 0
    assert reward(calls({"kind": "One"}), calls({"kind": "one"}), strings={"*": "normalized"}) == 0
    assert reward(calls({"city": "a"}), calls({"city": "A"}), strings={"*": "normalized", "find.city": "exact"}) == 0


def test_unordered_fields() -> None:
    a, b = calls({"tags": ["a", "b", "b"]}), calls({"tags": ["b", "a", "b"]})
    assert reward(a, b, unordered=["find.tags"]) == 1
    assert reward(a, calls({"tags": ["a", "a", "b"]}), unordered=["find.tags"]) == 0
    assert reward(a, b, unordered=["book.tags"]) == 0


def test_text_turns() -> None:
    said = Action("Your order #W123 costs $1,234.50. Shall I go on?")
    assert verdict(said, Action("Anything.")) == Verdict(None, "text_turn")
    assert reward(said, Action(said.text), text="similarity:0.8") == 1
    assert reward(said, Action("No idea."), text="similarity:0.8") == 0

    def facts(text: str, expected: Action = said) -> tuple[float | None, str]:
        found = verdict(expected, Action(text), text="facts")
        return found.reward, found.reason

    assert facts("It is 1234.5 USD for order W123, all right?") == (1, "match")
    assert facts("It is 1234.5 USD for order W124, all right?") == (0, "fact_missing")
    assert facts("It is $1234.50 for order W123.") == (0, "question_differs")
    assert facts("It is $1234.50 for W123 and W999. OK?") == (0, "fact_added")
    assert facts("") == (0, "empty")
    assert facts("Hi!", Action("Hello there.")) == (None, "no_facts")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("Mail bob.x@example.com.", {("email", "bob.x@example.com")}),
        ("on May 15, 2024 or 17 June", {("date", "2024-05-15"), ("date", "????-06-17")}),
        ("1. first\n2. second: 30%", {("number", "30")}),
        ("3 bags, 24-hour rule, 4-5 days, -3.5 off", {("number", n) for n in ("3", "24", "4", "5", "-3.5")}),
        ("at 2pm, 10:30 and 9:05 PM", {("time", "14:00"), ("time", "10:30"), ("time", "21:05")}),
        ("from 2024-05-15T10:00:00", {("date", "2024-05-15"), ("time", "10:00")}),
        ("EUJUY6, ORD-1042 and #99", {("id", "EUJUY6"), ("id", "ORD-1042"), ("id", "99")}),
        ("user lucas_brown_4047, 'AB-c'", {("id", "LUCAS_BROWN_4047"), ("id", "AB-C")}),
        ("1,000 dollars or €5", {("money", "1000 usd"), ("money", "5 eur")}),
        ("It's the user's 'thing'.", set()),
    ],
)  # fmt: skip
def test_facts(text: str, values: set[tuple[str, str]]) -> None:
    assert set(facts_of(text).values) == values


HOSTILE = [
    "a",
    "a-",
    "1",
    "1,111",
    "a.",
    "a@",
    "$",
    "-1",
    "2:",
    "<tool_call>",
    "<think>",
    '<tool_call>{"',
    "may 1",
    "'a",
    "#",
    "1/",
    "é",
]


@pytest.mark.parametrize("piece", HOSTILE)
def test_long_hostile_text_does_not_hang(piece: str) -> None:
    """Backtracking or a quadratic scan of 100,000 characters would take the suite's time limit."""
    text = piece * (100_000 // len(piece))
    facts_of(text)
    action = parse_action(text)
    assert verdict(Action("order W1"), action, text="facts").reward == 0
    assert verdict(Action(text), Action(text + "x"), text="similarity:0.9").reason != "verifier_error"


def test_options_are_checked() -> None:
    for options, message in [
        ({"string": {}}, "strings"),
        ({"strings": {"*": "fuzzy"}}, "fuzzy"),
        ({"strings": {"*": "similarity:0"}}, "similarity"),
        ({"strings": "exact"}, "strings"),
        ({"unordered": "find.tags"}, "unordered"),
        ({"text": "judge"}, "text"),
    ]:
        with pytest.raises(UserError, match=message):
            get_verifier(config.VerifierConfig("tool_calls", options))
    with pytest.raises(UserError, match="strict"):
        get_verifier(config.VerifierConfig("tool_cals"))
    with pytest.raises(UserError, match="cannot be imported"):
        get_verifier(config.VerifierConfig("no_such_package:X"))


def test_strict() -> None:
    a = calls({"city": "A", "price": 1})
    assert verdict(a, calls({"price": 1, "city": "A"}), "strict").reward == 1
    assert verdict(a, calls({"price": 1.0, "city": "A"}), "strict").reward == 0
    assert verdict(a, Action("x", "", a.tool_calls), "strict").reward == 0
    assert verdict(Action("a"), Action("a", "thought"), "strict").reward == 1
    assert verdict(Action("a"), Action("a "), "strict").reward == 0


class Custom:
    name, version = "custom", "1"

    def __init__(self, value: Any = 1.0) -> None:
        self.value = value

    def config(self) -> dict[str, Any]:
        return {}

    def verify(self, turn: Turn, action: Action) -> Any:
        if isinstance(self.value, type):
            raise self.value("boom")
        return Verdict(self.value, "custom") if self.value != "no verdict" else 1.0


@pytest.mark.parametrize("value", [math.nan, math.inf, 1.5, -1, "1", True, [1], "no verdict"])
def test_bad_rewards_are_unscorable_and_counted(value: Any) -> None:  # G7
    verifier = CheckedVerifier(Custom(value))
    found = verifier.verify(turn(Action("a")), Action("b"))
    assert (found.reward, found.reason, verifier.faults) == (None, "invalid_reward", {"invalid_reward": 1})


def test_exceptions_are_unscorable_and_counted() -> None:  # C12
    verifier = CheckedVerifier(Custom(RecursionError))
    found = verifier.verify(turn(Action("a")), Action("b"))
    assert (found.reward, found.reason, verifier.faults) == (None, "verifier_error", {"verifier_error": 1})
    assert CheckedVerifier(Custom(0.5)).verify(turn(Action("a")), Action("b")).reward == 0.5


def test_import_path() -> None:
    found = get_verifier(config.VerifierConfig("pivotrl.verifiers.strict:StrictVerifier"))
    assert found.name == "strict"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
arguments = st.dictionaries(st.sampled_from(["city", "count", "people", "tags", "note", "zz"]), json_values, max_size=4)


@given(arguments, arguments, st.sampled_from(["exact", "normalized", "similarity:0.5", "any"]))
def test_reflexive_and_total(a: Any, b: Any, rule: str) -> None:
    options = {"strings": {"*": rule}, "unordered": ["find.tags"]}
    assert reward(calls(a), calls(a), **options) == 1
    verdict_ = verdict(calls(a), calls(b), **options)
    assert verdict_.reward in (0, 1) and verdict_.reason != "verifier_error"
    if json_equal(a, b):
        assert verdict_.reward == 1


@given(st.text(), st.text())
def test_text_modes_are_total(a: str, b: str) -> None:
    for text in ("facts", "similarity:0.5"):
        assert verdict(Action(a), Action(b), text=text).reason != "verifier_error"
    assert normalise(normalise(a)) == normalise(a)


@given(st.lists(st.lists(st.integers(0, 4), max_size=5), max_size=5))
def test_perfect_match_against_all_permutations(edges: list[list[int]]) -> None:
    n = len(edges)
    brute = any(all(p[i] in edges[i] for i in range(n)) for p in permutations(range(n)))
    assert perfect_match(range(n), range(n), lambda i, j: j in edges[i]) == brute


def test_demonstrations_of_shared_data_match_themselves(shared_data: Path) -> None:
    functional, strict = get_verifier(config.VerifierConfig()), get_verifier(config.VerifierConfig("strict"))
    facts = get_verifier(config.VerifierConfig("tool_calls", {"text": "facts"}))
    scored = 0
    for file in sorted(shared_data.glob("*/*_*.jsonl")):
        if not any(part in file.name for part in ("_chat", "_sft", "_replay")):
            continue
        for item in read_trajectories(str(file)):
            for step in () if isinstance(item, Skip) else split_turns(item, "train"):
                if isinstance(step, Skip):
                    continue
                action = parse_action(format_action(step.demonstration))
                assert action == step.demonstration, step.id
                assert strict.verify(step, action).reward == 1
                assert facts.verify(step, action).reward in (1, None)
                if step.demonstration.tool_calls:
                    scored += 1
                    assert functional.verify(step, action) == Verdict(1.0, "match"), step.id
    assert scored > 600


def test_rows_one_out_for_one_in() -> None:
    expected = {"role": "assistant", "tool_calls": [{"function": {"name": "find", "arguments": '{"city": "日本"}'}}]}
    text = '<tool_call>\n{"name": "find", "arguments": {"city": "\\u65e5\\u672c"}}\n</tool_call>'  # E7
    rows: list[Any] = [
        {"id": 1, "tools": TOOLS, "expected": expected, "completion": text},
        {"tools": json.dumps(TOOLS), "expected": expected, "completion": expected},
        {"tools": TOOLS, "expected": expected, "completion": "hello"},
        {"tools": TOOLS, "expected": {"content": "hi"}, "completion": "hello"},
        {"tools": TOOLS, "expected": {}, "completion": "hello"},
        {"tools": TOOLS, "expected": expected},
        "nonsense",
        {
            "tools": TOOLS,
            "expected": expected,
            "completion": {"tool_calls": [{"function": {"name": "find", "arguments": "{"}}]},
        },
    ]
    results = list(verify_rows(rows))
    assert results[0] == {"id": 1, "reward": 1.0, "reason": "match"}
    assert [r["reward"] for r in results] == [1, 1, 0, None, None, None, None, 0]
    assert [r["reason"] for r in results[2:]] == [
        "spoke_instead_of_calling", "text_turn", "bad_row", "bad_row", "bad_row", "malformed",
    ]  # fmt: skip
