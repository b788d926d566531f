"""Turns and verifiers for the tests of the verifiers; importable by worker processes."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from pivotrl.trajectories.schema import Action, ToolCall, Turn
from pivotrl.verifiers.base import Verdict


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, arguments)


def act(*calls: ToolCall, text: str = "", problems: tuple[str, ...] = (), thinking: str = "") -> Action:
    return Action(text=text, tool_calls=calls, problems=problems, thinking=thinking)


def tool(name: str, required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": required or []}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}


def turn(demonstration: Action, *tools: dict[str, Any], id: str = "t#0", messages: Any = None) -> Turn:
    state = messages or [{"role": "user", "content": "Please do it."}]
    return Turn(id, id.split("#")[0], "task", 0, "test", "train", state, list(tools), demonstration, "test:1")


def judged(name: str, expected: Action, actual: Action, *tools: Any, messages: Any = None, **options: Any) -> Any:
    """The reward of `actual`; the demonstration itself must be right or excluded, and nothing may raise."""
    from pivotrl.config import VerifierConfig  # not at the top: worker processes import this module
    from pivotrl.verifiers.registry import get_verifier

    verifier = get_verifier(VerifierConfig(name, options))
    one = turn(expected, *tools, messages=messages)
    assert verifier.verify(one, expected).reward in (1.0, None)
    found = verifier.verify(one, actual)
    assert found.reason not in ("verifier_error", "invalid_reward"), found
    return found.reward


class Scripted:
    """Does what the action's text says."""

    name, version = "scripted", "1"

    def config(self) -> dict[str, Any]:
        return {}

    def verify(self, turn: Turn, action: Action) -> Verdict:
        word, _, rest = action.text.partition(" ")
        if word == "hang":
            while True:
                pass
        if word == "sleep":
            time.sleep(float(rest or 3600))
        if word == "children":  # a child in the group, and a daemon that left it
            subprocess.Popen(["sleep", "3600"])
            script = "import os, time\nif os.fork(): os._exit(0)\nos.setsid()\ntime.sleep(3600)"
            subprocess.run([sys.executable, "-c", script], check=True)
            time.sleep(3600)
        if word == "touch":  # tells whoever looks that this pair was reached
            Path(rest).touch()
        if word == "exit":
            os._exit(7)
        if word == "raise":
            raise ValueError("broken")
        if word == "print":
            print("noise on stdout")
        if word == "return":
            return eval(rest, {"math": math, "Verdict": Verdict, "nan": math.nan, "inf": math.inf})
        return Verdict(1.0, "match", {"pid": os.getpid(), "counts": {"calls": 1}})


class FromOptions(Scripted):
    """As the registry makes it: `name="verifier_doubles:FromOptions"`."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options


class IgnoresThinking(Scripted):
    ignores_thinking = True


class CannotStart(Scripted):
    def __init__(self) -> None:
        if os.environ.get("VERIFIER_TEST_PARENT") != str(os.getpid()):
            raise RuntimeError("no such file")


class DiesAtStart(Scripted):
    def __init__(self) -> None:
        if os.environ.get("VERIFIER_TEST_PARENT") != str(os.getpid()):
            os._exit(3)
