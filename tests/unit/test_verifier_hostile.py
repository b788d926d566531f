"""What a policy would try, and what it would write otherwise: pairs that each verifier must tell apart or call equal.

Each was looked for by hand and stands for its kind; those that scored wrongly when they were found are mended.
"""

from __future__ import annotations

from typing import Any

import pytest
from verifier_doubles import act, call, tool, turn

from pivotrl.config import VerifierConfig
from pivotrl.trajectories.schema import Action
from pivotrl.verifiers.base import Verdict
from pivotrl.verifiers.composition import All, First, Weighted
from pivotrl.verifiers.guard import safe_verify
from pivotrl.verifiers.registry import get_verifier
from pivotrl.verifiers.runner import VerifierRunner


def judged(name: str, expected: Action, actual: Action, *tools: Any, messages: Any = None, **options: Any) -> Any:
    """The reward of `actual`; the demonstration itself must be right or excluded, and nothing may raise."""
    verifier = get_verifier(VerifierConfig(name, options))
    one = turn(expected, *tools, messages=messages)
    assert verifier.verify(one, expected).reward in (1.0, None)
    found = verifier.verify(one, actual)
    assert found.reason not in ("verifier_error", "invalid_reward"), found
    return found.reward


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
        ("???", "...", None),
        ("__init__", "init", None),
        ("5 mW", "5 MW", None),
        ("100 Mb", "100 MB", None),
        ("5 kg", "5 KG", 1),
        ("$5 B", "$5 b", 1),
        ("-5", "5", 0),
        ("yes", "no", 0),
        ("$115,877 million", "$115.877 billion", 1),
        ("<answer>Paris</answer>", "<answer>Paris</answer> or <answer>London</answer>", None),
        ("The answer: **Paris**.", "Answer: Paris", 1),
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


# Edits, views, searches of code -----------------------------------------------------------------------

EDIT = {"path": "/r/a.py", "old_str": "x = 1  # the first value", "new_str": "x = 2"}


@pytest.mark.parametrize(
    ("name", "expected", "actual", "reward"),
    [
        # arguments that the tool does not have, beside or in place of those that it has
        ("edit", EDIT, {**EDIT, "old_string": "y", "new_string": "z"}, 0),
        ("edit", EDIT, {"file_path": "/r/a.py", "old_str": EDIT["old_str"], "new_str": "x = 2"}, 0),
        ("edit", EDIT, {**EDIT, "file_path": "/r/a.py"}, 0),
        ("edit", EDIT, {"path": "/r/a.py", "old_string": EDIT["old_str"], "new_string": "x = 2"}, 0),
        ("edit", {**EDIT, "replace_all": True}, {**EDIT, "replace_all": 1}, 0),
        ("edit", {**EDIT, "replace_all": True}, {**EDIT, "replace_all": "true"}, 0),
        ("edit", {**EDIT, "replace_all": True}, {**EDIT, "replaceAll": True}, 0),
        ("edit", EDIT, {**EDIT, "new_str": "x = 2 "}, 0),
        ("edit", EDIT, {**EDIT, "path": "/r/A.py"}, 0),
        ("edit", EDIT, {**EDIT, "path": "/r/./a.py"}, 1),
        ("edit", EDIT, {**EDIT, "old_str": EDIT["old_str"] + "\n", "new_str": "x = 2\n"}, 0),  # not seen
        ("edit", {**EDIT, "path": "/r/../a.py"}, {**EDIT, "path": "/a.py"}, 0),
        (
            "insert",
            {"path": "a", "insert_line": 5, "new_str": "t"},
            {"path": "a", "insert_line": "5", "new_str": "t"},
            0,
        ),
        (
            "insert",
            {"path": "a", "insert_line": 1, "new_str": "t"},
            {"path": "a", "insert_line": True, "new_str": "t"},
            0,
        ),
        ("write", {"path": "a", "content": "x"}, {"path": "a", "file_text": "x"}, 0),
        ("write", {"path": "a", "content": "x"}, {"path": "a", "content": "x\n"}, 0),
        ("view", {"path": "a", "view_range": [1, 9]}, {"path": "a", "view_range": [1.9, 9]}, 0),
        ("view", {"path": "a", "view_range": [1, 9]}, {"path": "a", "view_range": [True, 9]}, 0),
        ("view", {"path": "a", "view_range": [1, 9]}, {"path": "a", "start_line": 1, "end_line": 9}, 0),
        ("view", {"path": "a", "view_range": [1, 9]}, {"path": "a", "view_range": [1, 10**12]}, 0),
        ("read", {"path": "a", "offset": 0, "limit": 10}, {"path": "a", "offset": 1, "limit": 10}, 0),
        ("read", {"path": "a", "offset": 5, "limit": 10}, {"path": "a", "offset": "5", "limit": 10}, 0),
        ("read", {"path": "a"}, {"filename": "a"}, 0),
        ("grep", {"pattern": "x", "path": "."}, {"pattern": "x"}, 1),
        ("grep", {"pattern": "x"}, {"pattern": "x", "include": "*.py"}, 0),
        ("grep", {"pattern": "x "}, {"pattern": "x"}, 0),
    ],
)
def test_edits_and_views(name: str, expected: Any, actual: Any, reward: int) -> None:
    assert judged("edits", act(call(name, **expected)), act(call(name, **actual))) == reward


@pytest.mark.parametrize(
    "source", ["-" * 50_000 + "1", "(" * 5_000, "a" + ".b" * 50_000, "x = " + "[" * 300 + "]" * 300]
)
def test_python_that_is_nested_without_end(source: str) -> None:
    """The syntax tree is an option; nothing that is written may end the process."""
    one, two = (act(call("write", path="/r/a.py", content=source + tail)) for tail in ("\n", "\n# c\n"))
    assert judged("edits", one, two, python="ast") in (0, 1)


# Shell ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "actual", "reward"),
    [
        ("ls", "ls\u00a0", 0),  # bash looks for a program of that name
        ("ls -la\npwd", "ls -la\r\npwd", 0),
        ("ls\r", "ls", 0),
        ("cat a\\ ", "cat a\\", 0),
        ("echo $10", "echo ${10}", 0),  # $1 and a zero
        ("echo $1a", "echo ${1a}", 0),
        ("tar -cf a.tar ./x", "tar -cf a.tar x", 0),  # the archive keeps the names
        ("echo 2>f", "echo 2 >f", 0),
        ("echo a #b", "echo a '#b'", 0),
        ("a && b & c", "a && (b & c)", 0),
        ("a; b &", "a & b", 0),
        ("cat <<E\nhi\nE", "cat <<E\nhi\n\nE", 0),
        ("cat <<-E\n\thi\n\tE", "cat <<E\nhi\nE", 1),
        ("echo $'a\\x41'", "echo aA", 1),
        ("rm -rf ~", "rm -rf '~'", 0),
        ("rm -rf $DIR/", "rm -rf /", 0),
        ("X=1; echo $X", "X=1 echo $X", 0),
        ('echo "$(cat f)"', "echo $(cat f)", 0),
        ("grep -e -v f", "grep -v -e f", 0),
        ("head -n -5 f", "head -n 5 f", 0),
        ("tail -n +5 f", "tail -n 5 f", 0),
        ("sort -k 1 -k 2 f", "sort -k 2 -k 1 f", 0),
        ("git commit -m a -m b", "git commit -m b -m a", 0),
        ("kill -9 1", "kill -1 9", 0),
        ("find . -name a -delete", "find . -delete -name a", 0),
        ("ls \u202egpj.x", "ls x.jpg", 0),
        ("exit 0", "exit", 0),
        ("ls; exit 0", "ls", 0),
        ("ls | tee f", "ls > f", 0),
        ("ls 2>&1 | cat", "ls | cat", 0),
        ("yes | head -1", "yes | head -n 1", 1),
    ],
)
def test_commands(expected: str, actual: str, reward: int) -> None:
    for one, two in ((expected, actual), (actual, expected)):
        assert judged("shell", act(call("bash", command=one)), act(call("bash", command=two))) == reward, (one, two)


@pytest.mark.parametrize(
    ("expected", "actual", "reward"),
    [
        ({"command": "ls", "timeout": 10}, {"command": "ls", "timeout": 99}, 1),
        ({"command": "ls"}, {"command": "ls", "timeout": "soon"}, 0),
        ({"command": "ls"}, {"command": "ls", "timeout": -1}, 0),
        ({"command": "ls"}, {"command": "ls", "timeout": [1]}, 0),
        ({"command": "ls"}, {"command": "ls", "description": {"a": 1}}, 0),
        ({"command": "ls"}, {"command": "ls", "run_in_background": True}, 0),
        ({"command": "ls"}, {"cmd": "ls"}, 0),
        ({"command": "ls"}, {"command": "ls", "cmd": "rm x"}, 0),
        ({"command": "ls"}, {"command": ["ls"]}, 0),
        ({"command": ["bash", "-lc", "ls -la"]}, {"command": ["bash", "-lc", "ls -a -l"]}, 1),
        ({"command": ["bash", "-lc", "ls"]}, {"command": ["sh", "-lc", "ls"]}, 0),
        ({"command": "y", "is_input": "true"}, {"command": " y", "is_input": "true"}, 0),
    ],
)
def test_arguments_of_the_shell(expected: Any, actual: Any, reward: int) -> None:
    assert judged("shell", act(call("bash", **expected)), act(call("bash", **actual))) == reward


def keys(*keystrokes: str, **waits: Any) -> Action:
    return act(*(call("keys", keystrokes=k, **waits) for k in keystrokes))


@pytest.mark.parametrize(
    ("expected", "actual", "reward"),
    [
        (("python3", "Enter", "print( 1 )\n"), ("python3", "Enter", "print(1)\n"), 0),  # Python reads it, not bash
        (("sudo vim f\n", "dd  d\n"), ("sudo vim f\n", "dd d\n"), 0),
        (("docker exec -it x sh\n", "a  b\n"), ("docker exec -it x sh\n", "a b\n"), 0),
        (("perl\n", "1  +  1\n"), ("perl\n", "1 + 1\n"), 0),
        (("ls  -la\n", "pwd\n"), ("ls -al\n", "pwd\n"), 1),
        (("ls -la", "Enter"), ("ls -al", "Enter"), 1),
        (("ls -la\n", "C-c"), ("ls -la\n", "C-d"), 0),
        (("ls -la\n", ""), ("ls -la", ""), 0),  # not run
    ],
)
def test_keystrokes(expected: tuple[str, ...], actual: tuple[str, ...], reward: int) -> None:
    for one, two in ((expected, actual), (actual, expected)):
        assert judged("shell", keys(*one), keys(*two), tool={"keys": "keystrokes"}) == reward


def test_waits_of_a_batch_are_numbers() -> None:
    def text(wait: str) -> Action:
        return act(
            text='{"analysis": "a", "plan": "p", "commands": [{"keystrokes": "ls\\n", "duration": ' + wait + "}]}"
        )

    for wait, reward in (("0.1", 1), ("60", 1), ("true", 0), ('"1"', 0), ("null", 0)):
        assert judged("shell", text("1.0"), text(wait)) == reward, wait


# The judge is asked about actions, not about texts that read like them ------------------------------------


def test_a_text_that_reads_like_a_call_is_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from pivotrl.verifiers.judge import Judge

    monkeypatch.setattr(Judge, "_ask", lambda *_: {"verdict": "different", "analysis": ""})
    judge = Judge({"base_url": "http://127.0.0.1:9/v1", "model": "m"})
    said = Action(text="g {}", tool_calls=(call("h"),))
    two = act(call("g"), call("h"))
    assert judge.verify(turn(two), two).reason == "match"
    assert judge.verify(turn(two), said).reason == "judge_different"
    assert judge.verify(turn(said), two).reason == "judge_different"


# Own verifiers, and composition -----------------------------------------------------------------------


class Returns:
    name, version = "returns", "1"

    def __init__(self, value: Any) -> None:
        self.value = value

    def config(self) -> dict[str, Any]:
        return {}

    def verify(self, turn: Any, action: Any) -> Any:
        if isinstance(self.value, type) and issubclass(self.value, BaseException):
            raise self.value("stop")
        return self.value


class Loud(float):
    """A float of another type, as numpy's are."""


@pytest.mark.parametrize(
    ("value", "reward", "reason"),
    [
        (Verdict(Loud(0.5), "x"), 0.5, "x"),
        (Verdict(10**400, "x"), None, "invalid_reward"),
        (Verdict(complex(1), "x"), None, "invalid_reward"),  # type: ignore[arg-type]
        (Verdict([1.0], "x"), None, "invalid_reward"),  # type: ignore[arg-type]
        (Verdict(1.0, None), 1.0, "None"),  # type: ignore[arg-type]
        (Verdict(1.0, "half \ud800"), 1.0, "half ?"),
        (Verdict(1.0, "x", None), 1.0, "x"),  # type: ignore[arg-type]
        (Verdict(1.0, "x", {"a": object()}), 1.0, "x"),
        (Verdict(1.0, "x", {"a": "\ud800"}), 1.0, "x"),
        (Verdict(1.0, "x", {"counts": {"tokens": "many", "cost": float("nan"), "n": 10**400}}), 1.0, "x"),
        (SystemExit, None, "verifier_error"),
        (MemoryError, None, "verifier_error"),
        ({"reward": 1.0}, None, "invalid_reward"),
    ],
)
def test_what_own_verifiers_return_can_be_written(value: Any, reward: Any, reason: str) -> None:
    import json

    one = turn(act(text="a"))
    found = safe_verify(Returns(value), one, act(text="b"))
    assert (found.reward, found.reason) == (reward, reason)
    json.dumps(found.details, ensure_ascii=False).encode()
    with VerifierRunner(lambda: Returns(value)) as runner:
        assert [v.reward for v in runner.score([(one, act(text="b"))] * 2)] == [reward] * 2
        assert json.dumps(runner.metrics())


@pytest.mark.parametrize(
    ("kind", "values", "reward"),
    [
        (First, [Verdict(None, "down"), Verdict(1.0, "ok")], 1.0),
        (First, [SystemExit, Verdict(0.0, "no")], 0.0),
        (First, [True, Verdict(0.0, "no")], 0.0),
        (First, [Verdict(1.5, "x")], None),
        (All, [Verdict(1.0, "ok"), Verdict(float("nan"), "x")], None),
        (All, [Verdict(None, "down"), Verdict(0.0, "no")], 0.0),
        (All, [Verdict(1.0, "ok"), Verdict(0.25, "x")], 0.25),
        (Weighted, [Verdict(1.0, "ok"), Verdict(None, "down")], None),
        (Weighted, [Verdict(1.0, "ok"), Verdict(0.0, "no")], 0.5),
        (Weighted, [Verdict(1, "ok")] * 3, 1.0),
        (Weighted, ["1", Verdict(1.0, "ok")], None),
    ],
)
def test_no_fault_of_a_member_becomes_a_reward(kind: Any, values: list[Any], reward: Any) -> None:
    members = [{"name": str(i)} for i in range(len(values))]
    made = kind({"members": members}, build=lambda name, options: Returns(values[int(name)]))
    assert safe_verify(made, turn(act(text="a")), act(text="b")).reward == reward
