"""Terminus batches: keystrokes and the flag of completion, compared as shell commands."""

from __future__ import annotations

import json

from recorded_turns import call, terminus, turn

from pivotrl.trajectories.schema import Action, ToolCall
from pivotrl.verifiers.shell import ShellVerifier


def terminus_1(*keystrokes: str, complete: bool = False) -> Action:
    commands = [{"keystrokes": k, "is_blocking": True, "timeout_sec": 3} for k in keystrokes]
    return Action(
        text=json.dumps({"state_analysis": "", "explanation": "", "commands": commands, "is_task_complete": complete})
    )


def score(expected: Action, actual: Action, screen: str = "root@box:/app# ") -> float | None:
    t = turn(expected, [{"role": "user", "content": screen}])
    return ShellVerifier({}).verify(t, actual).reward


def test_terminus_batches() -> None:
    assert score(terminus("ls -la\n", "pwd\n"), terminus("ls -al\n", "pwd\n")) == 1.0
    assert score(terminus("ls -la\n", "pwd\n"), terminus("ls -la\npwd\n")) == 1.0  # the cut into batches is free
    assert score(terminus("ls\n"), terminus("ls\n", "")) == 1.0  # a wait
    assert score(terminus("ls\n"), Action(text="Here:\n```json\n" + terminus("ls\n").text + "\n```")) == 1.0
    assert score(terminus_1("ls -la\n"), terminus_1("ls -al\n")) == 1.0
    assert score(terminus("ls\n"), terminus("cd /app && ls\n")) == 1.0
    for other in [
        terminus("pwd\n", "ls -la\n"),
        terminus("ls -la\n"),
        terminus("ls -la\n", "pwd"),  # not run without its newline
        terminus("ls -la\n", "pwd\n", "rm -rf x\n"),
        terminus(),
        terminus("", ""),
        terminus_1("ls -la\n", "pwd\n"),
        call("bash_command", keystrokes="ls -la\npwd\n"),
    ]:
        assert score(terminus("ls -la\n", "pwd\n"), other) == 0.0


def test_terminus_completion_flag_must_match_both_ways() -> None:
    assert score(terminus("ls\n", complete=True), terminus("ls\n", complete=True)) == 1.0
    assert score(terminus("ls\n", complete=True), terminus("ls\n")) == 0.0
    assert score(terminus("ls\n"), terminus("ls\n", complete=True)) == 0.0
    recorded = Action(
        text=terminus("ls\n", complete=True).text, tool_calls=(ToolCall("bash_command", {"keystrokes": "ls\n"}),)
    )
    assert score(recorded, recorded) == 1.0
    assert score(recorded, Action(text="", tool_calls=recorded.tool_calls)) == 0.0
    open_turn = Action(text=terminus("ls\n").text, tool_calls=recorded.tool_calls)
    assert score(open_turn, recorded) == 0.0
    assert score(open_turn, Action(text="", tool_calls=recorded.tool_calls)) == 1.0


def test_terminus_malformed_scores_0() -> None:
    good = terminus("ls\n")
    texts = [
        "",
        "ls",
        good.text[:-1],
        good.text + good.text,
        good.text.replace('"plan"', '"analysis"'),  # a key twice
        terminus("ls\n", extra=1).text,
        good.text.replace("0.1", '"0.1"'),
        good.text.replace("0.1", "NaN"),
        good.text.replace("false", '"false"'),
        '{"commands": ' + "[" * 100_000,
        '{"analysis": ' + "1" * 5000 + "}",
    ]
    for text in texts:
        assert score(good, Action(text=text)) == 0.0, text[:80]


def test_keystrokes_for_other_programs_are_compared_to_the_letter() -> None:
    assert score(terminus("x = 'a'\n"), terminus('x = "a"\n'), ">>> ") == 0.0
    assert score(terminus("x = 'a'\n"), terminus("x = 'a'\n"), ">>> ") == 1.0
    assert score(terminus("python3\n", "x = 'a'\n"), terminus("python3\n", 'x = "a"\n')) == 0.0
    assert score(terminus("cat > f\n", "a  b\n", "C-d"), terminus("cat > f\n", "a b\n", "C-d")) == 0.0
    assert score(terminus("C-c", "ls -la\n"), terminus("C-c", "ls -al\n")) == 1.0
    assert score(terminus("C-c"), terminus("C-d")) == 0.0
    assert score(terminus("echo hi!x\n"), terminus("echo 'hi!x'\n")) == 0.0  # history expansion at a prompt
