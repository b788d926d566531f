"""What a policy would try, and what it would write otherwise: edits, views, shell commands and keystrokes.

Each pair was looked for by hand and stands for its kind; those that scored wrongly when they were found are mended.
"""

from __future__ import annotations

from typing import Any

import pytest
from verifier_doubles import act, call, judged

from pivotrl.trajectories.schema import Action

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
        ("str_replace_editor", {"command": "str_replace", **EDIT}, EDIT, 0),
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
        ("view", {"path": "a", "view_range": [1, 9]}, {"path": "a", "view_range": [1, "9"]}, 0),
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
