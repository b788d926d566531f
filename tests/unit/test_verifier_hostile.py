"""What a policy would try, and what it would write otherwise: tool calls, searches and answers.

Each pair was looked for by hand and stands for its kind; those that scored wrongly when they were found are mended.
"""

from __future__ import annotations

from typing import Any

import pytest
from verifier_doubles import act, call, judged, tool

from pivotrl.trajectories.schema import Action

# Tool calls -------------------------------------------------------------------------------------------

ANY_OF = {"anyOf": [{"type": "string", "default": "a"}, {"type": "null", "default": "b"}]}
PRICES = {"type": "object", "additionalProperties": {"type": "number"}}


@pytest.mark.parametrize(
    ("schema", "expected", "actual", "reward"),
    [
        (ANY_OF, {}, {"v": "b"}, 0),  # two alternatives, two defaults: neither is known to be meant
        (ANY_OF, {"v": "a"}, {}, 0),
        ({"type": "string", "default": "a"}, {"v": "a"}, {}, 1),
        (PRICES, {"v": {"x": 1}}, {"v": {"x": 1.0}}, 1),  # a number by `additionalProperties`
        (PRICES, {"v": {"x": 1}}, {"v": {"x": True}}, 0),
        (PRICES, {"v": {"x": 1}}, {"v": {"y": 1}}, 0),
        ({"type": "number"}, {"v": 9007199254740993}, {"v": 9007199254740992.0}, 0),
        ({"type": ["number", "string"]}, {"v": "1"}, {"v": 1}, 0),
        ({"enum": ["a", "A"]}, {"v": "a"}, {"v": "A"}, 0),
        ({"$ref": "#"}, {"v": 1}, {"v": 2}, 0),
        ({"type": {"of": []}, "required": 7, "properties": []}, {"v": 1}, {"v": 1.0}, 0),
        ({"type": "array", "items": [{"type": "number"}]}, {"v": [1]}, {"v": [1, 1]}, 0),
        ({}, {"v": "a"}, {"v": "a\u200b"}, 0),
        ({}, {"v": "a"}, {"v": "a", "v ": "a"}, 0),
        ({}, {"v": "e\u0301"}, {"v": "\u00e9"}, 1),
        ({}, {"v": None}, {}, 0),
        ({}, {"v": []}, {"v": {}}, 0),
        ({}, {"v": [[1]]}, {"v": [1]}, 0),
        ({}, {"v": -0.0}, {"v": 0.0}, 1),
    ],
)
def test_values_of_arguments(schema: Any, expected: Any, actual: Any, reward: int) -> None:
    tools = tool("f", v=schema)
    assert judged("tool_calls", act(call("f", **expected)), act(call("f", **actual)), tools) == reward


@pytest.mark.parametrize(
    ("rule", "expected", "actual", "reward"),
    [
        ("case", "Gross@X.com", "gross@x.com", 1),
        ("case", "groß", "gross", 0),  # no environment that lowers letters finds it
        ("spaces", "2 * (3 + 4)", "2*(3+4)", 1),
        ("spaces", "2 ** 3", "2 * * 3", 0),
        ("spaces", "7 // 2", "7 / / 2", 0),
        ("spaces", "1.5 + 1", "1 .5 + 1", 0),
        ("spaces", "1.5 + 1", "1. 5 + 1", 0),
        ("spaces", "a b", "ab", 0),
        ("normalized", "5%", "5", 0),
        ("normalized", "C#", "C", 0),
        ("normalized", "AT&T", "AT T", 0),
        ("normalized", "-5", "5", 0),
        ("normalized", "Hello, World!", "hello world", 1),
        ("similarity:0.7", "please cancel my whole order", "please do not cancel my whole order", 0),
        ("similarity:0.7", "it is in stock in the store", "it isn\u2019t in stock in the store", 0),
        ("similarity:0.7", "refund order 12 to the card today", "refund order 13 to the card today", 0),
        ("similarity:0.7", "refund order 12 to the card today", "refund order 12 to the card now", 1),
        ("similarity:0.7", "a b c", "a b c " * 50, 0),
        ("date", "2024-05-01", "May 1, 2024", 1),
        ("date", "2024-05-06", "05/06/2024", 0),  # which of two days is not known
        ("any", "x", " \n", 0),
    ],
)
def test_string_rules(rule: str, expected: str, actual: str, reward: int) -> None:
    for one, two in ((expected, actual), (actual, expected)) if rule != "any" else ((expected, actual),):
        assert judged("tool_calls", act(call("f", v=one)), act(call("f", v=two)), strings={"f.v": rule}) == reward


@pytest.mark.parametrize(
    ("actual", "reward"),
    [
        ("Refund of $50 for order W12 on Monday was approved for you.", 1),
        ("Refund of $50 for order W12 was not approved.", None),
        ("W12 $50", 0),  # a list of the values is no message
        ("Your refund of $50 for W12 and W13 has been approved.", 0),
        ("Your refund of $50 for order W12 has been approved?", 0),
        ("Your refund of 50 EUR for order W12 has been approved.", 0),
    ],
)
def test_facts_of_texts(actual: str, reward: Any) -> None:
    said = act(text="I am glad to tell you: your refund of $50 for order W12 has been approved.")
    assert judged("tool_calls", said, act(text=actual), text="facts") == reward


# Search -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "actual", "reward"),
    [
        ("🍕", "🚀", 0),
        ("???", "!!!", 0),
        ("🍕", "🍕", 1),
        (".net tutorial", "net tutorial", 0),
        ("the * of kings", "the of kings", 0),
        ("(cats OR dogs) food", "cats OR (dogs food)", 0),
        ("cats OR dogs food", "dogs OR cats food", 1),
        ("python -snake", "python snake", 0),
        ("site:a.com x", "site:b.com x", 0),
        ('"new york" hotel', "new york hotel", 0),
        ("best price 2024", "best price 2023", 0),
        ("what is rust?", "What is Rust", 1),
        ("size 5' board", "size 5 board", 0),
        ("a", "a a", 0),
        ("cheap flights", "cheap flights\u200b", 0),
    ],
)
def test_queries(expected: str, actual: str, reward: int) -> None:
    for one, two in ((expected, actual), (actual, expected)):
        assert judged("search", act(call("search", query=one)), act(call("search", query=two))) == reward


@pytest.mark.parametrize(
    ("expected", "actual", "reward"),
    [
        ("https://a.com/x", "https://a.com@evil.com/x", 0),
        ("https://a.com/x", "https://a.com.evil.com/x", 0),
        ("https://a.com/x", "https://\u0430.com/x", 0),  # a Cyrillic letter
        ("https://a.com/a/b", "https://a.com/a/../b", 0),
        ("https://a.com/x?a=1&a=2", "https://a.com/x?a=2&a=1", 0),
        ("https://a.com/x?a=1&b=2", "https://a.com/x?b=2&a=1", 1),
        ("https://a.com/x", "https://a.com/x?utm_source=y#top", 1),
        ("https://a.com/#/x", "https://a.com/#/y", 0),
        ("https://a.com/%2Fx", "https://a.com//x", 0),
        ("https://a.com/~u", "https://A.com:443/%7Eu", 1),
        ("https://a.com:8443/", "https://a.com/", 0),
        ("https://a.com/X", "https://a.com/x", 0),
    ],
)
def test_urls(expected: str, actual: str, reward: int) -> None:
    for one, two in ((expected, actual), (actual, expected)):
        assert judged("search", act(call("open", url=one)), act(call("open", url=two))) == reward


@pytest.mark.parametrize(
    ("expected", "actual", "reward"),
    [
        ("Answer: .5", "Answer: 5", 0),
        ("???", "...", 0),
        ("Answer: -5", "Answer: 5", 0),
        ("Answer: $5", "Answer: 5", None),
        ("__init__", "init", None),
        ("5 mW", "5 MW", None),
        ("100 Mb", "100 MB", None),
        ("5 kg", "5 KG", 1),
        ("$5 B", "$5 b", 1),
        ("-5", "5", 0),
        ("yes", "no", 0),
        ("$115,877 million", "$115.877 billion", 1),
        ("<answer>Paris</answer>", "<answer>Paris</answer> or <answer>London</answer>", None),
        ("**Answer:** **Paris**.", "Answer: Paris", 1),
        ("Paris", "", 0),
        ("4", "four", 1),
    ],
)
def test_answers(expected: str, actual: str, reward: Any) -> None:
    assert judged("search", act(text=expected), act(text=actual)) == reward


def test_ranges_and_hostile_schemas() -> None:
    def read(*rows: Any) -> Action:
        return act(call("read", ranges=list(rows)))

    one = {"key": 1, "start": 0, "end": 10}
    assert judged("search", read(one), read({**one, "key": "1"})) == 0
    assert judged("search", read({"start": 0, "end": 10}), read({"key": "None", "start": 0, "end": 10})) == 0
    assert judged("search", read(one), read({**one, "start": False})) == 0
    assert judged("search", read(one), read(one, one)) == 0
    for properties in ([], "x", {"query": []}, {"query": {"type": {"x": 1}}}, None):
        broken = {"type": "function", "function": {"name": "search", "parameters": {"properties": properties}}}
        assert judged("search", act(call("search", query="a")), act(call("search", query="b")), broken) == 0
