"""Software-engineering actions: edits by the file they leave, views by what they cover, and recorded turns."""

from __future__ import annotations

import difflib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_turns import call, recorded_turns, turn

from pivotrl.errors import UserError
from pivotrl.trajectories.schema import Action, ToolCall
from pivotrl.verifiers.edits import EditsVerifier
from pivotrl.verifiers.patches import EditError, Hunk, apply, parse_patch
from pivotrl.verifiers.python_code import same_python
from pivotrl.verifiers.tool_name import ToolNameVerifier

FILE = """import os


def area(w, h):
    # width times height
    return w + h


def edge(w, h):
    return 2 * (w + h)
"""
FIXED = FILE.replace("return w + h\n", "return w * h\n")


def seen(path: str = "/r/a.py", content: str = FILE, **arguments: Any) -> list[dict[str, Any]]:
    """A state in which the file was read."""
    read = {"id": "c1", "name": "read", "arguments": {"path": path, **arguments}}
    return [{"role": "assistant", "tool_calls": [read]}, {"role": "tool", "tool_call_id": "c1", "content": content}]


def replace(old: str, new: str, path: str = "/r/a.py", **more: Any) -> Action:
    return call("edit", path=path, old_str=old, new_str=new, **more)


def score(expected: Action, actual: Action, state: list[dict[str, Any]] | None = None, **options: Any) -> float | None:
    return EditsVerifier(options).verify(turn(expected, state, "swe"), actual).reward


DEMONSTRATION = replace("    return w + h\n", "    return w * h\n")


@pytest.mark.parametrize(
    ("actual", "known", "unknown"),  # rewards with the file in the state, and without
    [
        (DEMONSTRATION, 1.0, 1.0),
        (replace("height\n    return w + h\n", "height\n    return w * h\n"), 1.0, 0.0),
        (replace("    return w + h", "    return w * h"), 1.0, 1.0),
        (replace("return w + h", "return w * h"), 1.0, 1.0),
        (replace("    return w + h\n", "    return w * h\n", path="/r/./a.py"), 1.0, 1.0),
        (replace("    return w + h\n", "    return w * h"), 0.0, 0.0),  # the newline goes too
        (replace("    return w + h\n", "    return h * w\n"), 0.0, 0.0),
        (replace("    return w + h\n", "    return w + h\n"), 0.0, 0.0),
        (replace("    return 2 * (w + h)\n", "    return w * h\n"), 0.0, 0.0),
        (replace("w + h", "w * h"), 0.0, 0.0),  # occurs twice: the tool refuses
        (replace("w + h", "w * h", replace_all=True), 0.0, 0.0),
        (replace("", "    return w * h\n"), 0.0, 0.0),
        (replace("    return w + h\n", "    return w * h\n", path="/r/b.py"), 0.0, 0.0),
        (call("edit", path="/r/a.py", edits=[{"oldText": "return w + h\n", "newText": "return w * h\n"}]), 1.0, 0.0),
        (call("edit", path="/r/a.py", content=FIXED), 0.0, 0.0),  # not this tool's arguments
        (call("edit", path="/r/a.py"), 0.0, 0.0),
        (call("edit"), 0.0, 0.0),
        (call("write", path="/r/a.py", content=FIXED), 0.0, 0.0),
        (call("edit", path="/r/a.py", old_str=1, new_str=None), 0.0, 0.0),
    ],
)
def test_str_replace(actual: Action, known: float, unknown: float) -> None:
    assert score(DEMONSTRATION, actual, seen()) == known
    assert score(DEMONSTRATION, actual) in (known, unknown)
    if unknown == 0.0 and known == 0.0:
        assert score(DEMONSTRATION, actual) == 0.0


def test_equal_for_2000_characters_is_not_equal() -> None:
    long = "x = 1\n" * 400
    assert score(call("write", path="a.py", content=long), call("write", path="a.py", content=long + "y")) == 0.0
    assert score(replace("a = 1\n", long + "b"), replace("a = 1\n", long + "c")) == 0.0


def sre(command: str, **arguments: Any) -> Action:
    return call("str_replace_editor", command=command, path="/r/a.py", **arguments)


def test_every_way_to_write_one_file_is_equal() -> None:
    ways = [
        sre("create", file_text=FIXED),
        sre("str_replace", old_str="return w + h\n", new_str="return w * h\n"),
        sre("str_replace", old_str="    return w + h\n\n", new_str="    return w * h\n\n"),
    ]
    wrong = [
        sre("create", file_text=FIXED + "\n"),
        sre("insert", insert_line=5, new_str="    return w * h"),
        sre("insert", insert_line=99, new_str="    return w * h"),
        sre("view"),
        sre("undo_edit"),
    ]
    for a in ways:
        for b in ways:
            assert score(a, b, seen()) == 1.0
        for b in wrong:
            assert score(a, b, seen()) == 0.0
            assert score(b, a, seen()) == 0.0


def test_inserts_and_line_edits() -> None:
    insert = sre("insert", insert_line=5, new_str="    w = abs(w)")
    assert score(insert, sre("insert", insert_line=5, new_str="    w = abs(w)"), seen()) == 1.0
    by_text = sre("str_replace", old_str="height\n", new_str="height\n    w = abs(w)\n")
    assert score(insert, by_text, seen()) == 1.0
    assert score(insert, by_text) == 0.0  # line 5 of an unseen file
    assert score(insert, sre("insert", insert_line=4, new_str="    w = abs(w)"), seen()) == 0.0
    lines = call("edit", path="/r/a.py", start_line=6, end_line=6, content="    return w * h")
    assert score(lines, DEMONSTRATION, seen()) == 1.0
    assert (
        score(lines, call("edit", path="/r/a.py", start_line=5, end_line=6, content="    return w * h"), seen()) == 0.0
    )


def diff(a: str, b: str, n: int = 3) -> str:
    return "".join(difflib.unified_diff(a.splitlines(True), b.splitlines(True), "a/r/a.py", "b/r/a.py", n=n))


V4A = """*** Begin Patch
*** Update File: r/a.py
@@ def area(w, h):
     # width times height
-    return w + h
+    return w * h
*** End Patch"""


def test_patches() -> None:
    state = seen("r/a.py")
    ways = [call("apply_patch", patch=diff(FILE, FIXED, n)) for n in (0, 1, 3)] + [call("apply_patch", patch=V4A)]
    for a in ways:
        for b in ways:
            assert score(a, b, state) == 1.0
        assert score(a, call("apply_patch", patch=diff(FILE, FIXED.replace("2 *", "4 *"))), state) == 0.0
        assert score(a, call("apply_patch", patch=diff(FILE, FIXED).replace("w * h", "w - h")), state) == 0.0
        assert score(a, call("apply_patch", patch=diff(FILE, FIXED).replace("-    return", "-   return")), state) == 0.0
        assert score(a, call("apply_patch", patch=V4A.replace("*** End Patch", "")), state) == 0.0
        assert score(a, call("apply_patch", patch=""), state) == 0.0
    assert score(ways[2], ways[3]) == 1.0  # also with the file unseen
    assert score(ways[0], ways[3]) == 0.0  # context that nobody has seen
    assert score(ways[3], call("apply_patch", input=V4A), state) == 0.0  # an argument that this tool does not have
    assert parse_patch("--- a/x\n+++ /dev/null\n@@ -1,1 +0,0 @@\n-a\n")[0][0] == "x"
    with pytest.raises(EditError):
        parse_patch("--- a/x\n+++ b/x\n@@ -1,3 +1,1 @@\n-a\n+b\n")
    assert apply("a\nx\na\n", Hunk(("a",), ("b",), near=3)) == "a\nx\nb\n"


@settings(max_examples=60)
@given(st.lists(st.sampled_from("abc"), max_size=12), st.lists(st.sampled_from("abcd"), max_size=12), st.integers(0, 3))
def test_a_unified_diff_gives_the_file_it_was_made_for(a: list[str], b: list[str], n: int) -> None:
    before, after = "".join(f"{x}\n" for x in a), "".join(f"{x}\n" for x in b)
    text = diff(before, after, n)
    if not a or not b or before == after or (n == 0 and any(not hunk.old for _, hunk in parse_patch(text))):  # type: ignore[union-attr]
        return
    content: str | None = before
    shift = 0
    for _, hunk in parse_patch(text):
        assert isinstance(hunk, Hunk)
        content = apply(content, Hunk(hunk.old, hunk.new, hunk.near + shift))
        shift += len(hunk.new) - len(hunk.old)
    assert content == after


def test_python_by_its_syntax_tree_is_an_option() -> None:
    new = 'def f(a):\n    """Doc."""\n    return a\n'
    other = "def f( a ):\n    '''Doc.'''\n    # a comment\n\n    return (a)\n"
    a, b = call("write", path="x.py", content=new), call("write", path="x.py", content=other)
    assert score(a, b) == 0.0
    assert score(a, b, python="ast") == 1.0
    assert score(a, call("write", path="x.py", content=other.replace("Doc", "Dok")), python="ast") == 0.0
    assert (
        score(call("write", path="x.txt", content=new), call("write", path="x.txt", content=other), python="ast") == 0.0
    )
    commented = replace("    return w + h\n", "    # product\n    return w*h\n")
    assert score(DEMONSTRATION, commented, seen()) == 0.0
    assert score(DEMONSTRATION, commented, seen(), python="ast") == 1.0
    assert score(DEMONSTRATION, commented, python="ast") == 1.0
    assert score(DEMONSTRATION, replace("    return w + h\n", "    return w*w\n"), python="ast") == 0.0
    assert (
        score(DEMONSTRATION, replace("    return w + h\n", "  return w*h\n"), seen(), python="ast") == 1.0
    )  # one block
    assert not same_python("if a:\n    b\nc", "if a:\n    b\n    c")
    assert not same_python("x = [1,\n  f(", "x = [1,\n  g(")
    assert same_python("x = [1,\n  f(", "x = [1, f(  # hm")
    assert not same_python("(" * 5000, "(" * 5001)
    assert not same_python("\0", "\1")


def view(start: int | None = None, end: int | None = None, path: str = "/r/a.py") -> Action:
    return call("str_replace_editor", command="view", path=path, **({"view_range": [start, end]} if start else {}))


def test_views_by_what_they_cover() -> None:
    demonstration = view(100, 120)
    for actual, reward in [
        (view(100, 120), 1.0),
        (view(90, 130), 1.0),
        (view(100, 119), 0.0),
        (view(101, 120), 0.0),
        (view(1, 100000), 0.0),  # shows everything, hides the point
        (view(120, 100), 0.0),
        (view(), 0.0),
        (view(100, -1), 0.0),
        (view(100, 120, "/r/b.py"), 0.0),
        (view(100, 120, "/r//a.py"), 1.0),
        (call("str_replace_editor", command="view", path="/r/a.py", view_range="[100, 120]"), 1.0),
        (call("str_replace_editor", command="view", path="/r/a.py", view_range="all"), 0.0),
    ]:
        assert score(demonstration, actual) == reward, actual
    assert score(view(), view(1, -1)) == 1.0
    assert score(view(), view(2, -1)) == 0.0
    assert score(view(3, 5), view(), seen()) == 1.0  # a short file, known to be short
    assert score(view(), view(1, 11), seen()) == 1.0
    assert score(view(), view(1, 5), seen()) == 0.0
    assert score(demonstration, view(90, 130), view_slack=5) == 0.0
    read = call("read_file", path="a.py", offset=10, limit=5)
    assert score(read, call("read_file", path="./a.py", offset=10, limit=6)) == 1.0
    assert score(read, call("read_file", path="a.py", offset=10, limit=4)) == 0.0
    assert score(read, call("read_file", path="a.py", offset=10, limit=5, raw=True)) == 0.0


def test_searches_compare_every_argument() -> None:
    grep = call("grep", pattern="def foo", path="src")
    assert score(grep, call("grep", pattern="def foo", path="./src")) == 1.0
    for arguments in [
        {"pattern": "def bar", "path": "src"},
        {"pattern": "*", "path": "src"},
        {"pattern": "def foo"},
        {},
    ]:
        assert score(grep, call("grep", **arguments)) == 0.0
    assert score(grep, call("glob", pattern="def foo", path="src")) == 0.0
    assert score(call("grep", pattern="a"), call("grep", pattern="a", path=".")) == 1.0
    assert score(call("search", query="a"), call("search", query="b")) == 0.0


def test_several_calls() -> None:
    a = ToolCall("edit", {"path": "/r/a.py", "old_str": "import os\n", "new_str": "import sys\n"})
    b = DEMONSTRATION.tool_calls[0]
    run = ToolCall("bash", {"command": "ls -la"})
    both = Action(tool_calls=(a, b))
    assert score(both, Action(tool_calls=(b, a)), seen()) == 1.0  # the same file in the end
    assert score(both, Action(tool_calls=(b, b)), seen()) == 0.0
    assert score(both, Action(tool_calls=(a, b, b)), seen()) == 0.0
    mixed = Action(tool_calls=(b, run))
    assert score(mixed, Action(tool_calls=(b, ToolCall("bash", {"command": "ls -al"}))), seen()) == 1.0
    assert score(mixed, Action(tool_calls=(run, b)), seen()) == 0.0


def test_what_the_state_shows_is_followed_through_edits() -> None:
    first = {
        "id": "c2",
        "name": "edit",
        "arguments": {"path": "/r/a.py", "old_str": "import os\n", "new_str": "import re\n"},
    }
    edited = [
        *seen(),
        {"role": "assistant", "tool_calls": [first]},
        {"role": "tool", "tool_call_id": "c2", "content": "Done."},
    ]
    demonstration = replace("import re\n", "import sys\n")
    assert score(demonstration, replace("import re\n\n", "import sys\n\n"), edited) == 1.0
    refused = [*edited[:-1], {"role": "tool", "tool_call_id": "c2", "content": "Error: did not appear verbatim"}]
    assert (
        score(demonstration, replace("import re\n\n", "import sys\n\n"), refused) == 0.0
    )  # the file is not known any more
    shell = {"id": "c3", "name": "bash", "arguments": {"command": "sed -i s/w/v/ /r/a.py"}}
    changed = [
        *seen(),
        {"role": "assistant", "tool_calls": [shell]},
        {"role": "tool", "tool_call_id": "c3", "content": ""},
    ]
    assert score(DEMONSTRATION, replace("height\n    return w + h\n", "height\n    return w * h\n"), changed) == 0.0
    numbered = "".join(f"{i:6}\t{line}\n" for i, line in enumerate(FILE.splitlines(), 1))
    state = seen(content="Here is the result of `cat -n`:\n" + numbered)
    assert score(DEMONSTRATION, replace("height\n    return w + h\n", "height\n    return w * h\n"), state) == 1.0


# Public verifiers' weaknesses (peers.md 0b), edit and tool rows ---------------------------------------


def test_public_weaknesses() -> None:
    for expected, actual in [
        (call("bash", command="pytest tests/a.py"), Action(problems=("arguments are not JSON",))),
        (call("bash", command="rm -rf build"), call("bash")),
        (call("grep", pattern="def foo", path="a"), call("grep", pattern="bar", path="a")),
        (call("grep", pattern="def foo", path="a"), call("grep", pattern="*", path="a")),
        (call("bash", command="cd /repo && rm -rf src"), call("bash", command="cd /repo && ls src")),
        (call("bash", command="cp a b"), call("bash", command="cp b a")),
        (call("bash", command="pytest tests/a.py"), call("bash", command="rm -rf / --no-preserve-root")),
        (call("tool", n=1), call("tool", n=True)),
        (call("tool", n=1), call("tool", n="1")),
        (Action(text="Here is the answer."), Action(text="")),
    ]:
        assert score(expected, actual) == 0.0
        assert score(expected, expected) == 1.0
    assert score(Action(text="Here is the answer."), Action(text="anything")) is None
    same = "the very same words in both strings"
    assert score(call("tool", text=same), call("tool", text=same)) == 1.0


def test_tool_name_baseline() -> None:
    verifier = ToolNameVerifier({})
    t = turn(call("bash", command="pytest"))
    assert verifier.verify(t, call("bash", command="rm -rf /")).reward == 1.0  # the paper's rule, as it is
    assert verifier.verify(t, call("edit")).reward == 0.0
    assert verifier.verify(t, Action(problems=("broken",))).reward == 0.0
    with pytest.raises(UserError):
        ToolNameVerifier({"x": 1})


def test_options_are_checked() -> None:
    for options in ({"python": "yes"}, {"view_slack": -1}, {"view_slack": True}, {"pyton": "ast"}):
        with pytest.raises(UserError):
            EditsVerifier(options)


# Recorded turns ---------------------------------------------------------------------------------------

TURNS = recorded_turns()


@pytest.mark.skipif(not TURNS, reason="shared trajectories are absent (PIVOTRL_SHARED)")
@pytest.mark.parametrize("python", ["exact", "ast"])
def test_recorded_turns(python: str) -> None:
    """The demonstration is accepted; the next turn's action, and the demonstration with any text changed, are not."""
    verifier = EditsVerifier({"python": python})
    edits = 0
    for i, t in enumerate(TURNS):
        if not t.demonstration.tool_calls:
            continue
        assert verifier.verify(t, t.demonstration).reward == 1.0, t.id
        for name in ("new_str", "new_string", "replace", "content", "pattern", "path", "file_text", "command"):
            calls = t.demonstration.tool_calls
            if not isinstance(calls[0].arguments.get(name), str):
                continue
            edits += 1
            changed = ToolCall(calls[0].name, {**calls[0].arguments, name: calls[0].arguments[name] + " zq"})
            assert verifier.verify(t, Action(tool_calls=(changed, *calls[1:]))).reward == 0.0, (t.id, name)
        other = TURNS[(i + 1) % len(TURNS)].demonstration
        if other.tool_calls and other.tool_calls[0].name != t.demonstration.tool_calls[0].name:
            assert verifier.verify(t, other).reward == 0.0
    assert edits > 100


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
FIELDS = (
    "path",
    "command",
    "old_str",
    "new_str",
    "edits",
    "content",
    "patch",
    "insert_line",
    "view_range",
    "offset",
    "limit",
    "text",
)
NAMES = st.sampled_from(
    ["str_replace_editor", "edit", "write_file", "read", "apply_patch", "insert", "bash", "grep", "x"]
)
VALUES = JSON | st.sampled_from(
    ["view", "create", "str_replace", "insert", FILE, "w + h", diff(FILE, FIXED), V4A, "[1, 2]", "a.py"]
)
CALLS = st.builds(ToolCall, NAMES, st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4))


@settings(max_examples=300)
@given(CALLS, CALLS, st.sampled_from(["exact", "ast"]))
def test_total_and_reflexive(a: ToolCall, b: ToolCall, python: str) -> None:
    verifier = EditsVerifier({"python": python})
    t = turn(Action(tool_calls=(a,)), seen("a.py"), "swe")
    assert verifier.verify(t, t.demonstration).reward == 1.0
    assert verifier.verify(t, Action(tool_calls=(b,))).reward in (0.0, 1.0)
