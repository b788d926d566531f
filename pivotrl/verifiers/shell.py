"""Functional verifier of shell actions (terminal domain): commands that do the same, by their bash syntax tree."""

from __future__ import annotations

import shlex
from typing import Any

from pivotrl.errors import UserError
from pivotrl.trajectories.schema import Action, JsonDict, ToolCall, Turn
from pivotrl.verifiers.base import Verdict
from pivotrl.verifiers.bash_ast import equivalent
from pivotrl.verifiers.calls import (
    HARMLESS_ARGUMENTS,
    check_options,
    decide,
    last_observation,
    same_arguments,
    same_call,
    working_directory,
)
from pivotrl.verifiers.shell_execution import SandboxComparison
from pivotrl.verifiers.terminus import TerminusAction, TerminusError, at_shell_prompt, keystrokes_form, parse_terminus
from pivotrl.verifiers.texts import EXCLUDE, SAME, TextRule, both_speak, make_judge

SHELL_TOOLS = frozenset(
    {
        "bash",
        "shell",
        "terminal",
        "bash_command",
        "execute_bash",
        "run_bash",
        "run_command",
        "execute_command",
        "run_shell_command",
        "shell_command",
        "run_in_terminal",
        "run_terminal_cmd",
        "exec",
        "exec_command",
        "local_shell",
        "container.exec",
        "command",
        "sh",
        "Bash",
        "Shell",
    }
)
OPTIONS = ("tool", "cwd", "execution", "execution_seconds", "text", "judge")
_BLANK = " \t\n"  # to bash; not all that Python takes for white space
_OPEN = ("command_differs", "text_turn")  # reasons that a judge may overrule
COMMAND_FIELDS = ("command", "cmd", "keystrokes", "script", "commands", "input")


class ShellVerifier:
    """Commands compared by what they do, Terminus batches included; calls of other tools by name and every argument.

    Options:
        tool: {name: field} of the shell tools, or a list of names; default: detected by name from the demonstration.
        cwd: working directory: "auto" (default: read from the last observation), a path, or None (not known).
             A leading `cd <cwd> &&` is then a no-op; any other leading cd is part of the command.
        execution: true: commands that the rules tell apart are run in a sandbox (see shell_execution); the same effect
             is 1. Refused where bubblewrap does not work. `execution_seconds`: limit of one run (default 5).
        text: turns where both speak (see texts): "same" (default), "exclude", "similarity:x", "facts" or "judge".
        judge: options of the LLM judge, which is then asked last: about commands that neither the rules nor the sandbox
             found equal and the sandbox did not find different, and about texts in other words (text: same).
    """

    name = "shell"
    version = "3"

    def __init__(self, options: JsonDict | None = None) -> None:
        options = dict(options or {})
        check_options(self.name, options, OPTIONS)
        tool = options.get("tool")
        if isinstance(tool, str):
            tool = [tool]
        if isinstance(tool, list) and all(isinstance(t, str) for t in tool):
            self.tools: dict[str, str | None] | None = dict.fromkeys(tool)
        elif isinstance(tool, dict) and all(isinstance(k, str) and isinstance(v, str) for k, v in tool.items()):
            self.tools = dict(tool)
        elif tool is None:
            self.tools = None
        else:
            raise UserError(
                f"verifier 'shell': option 'tool' takes a name, a list of names or {{name: field}}, not {tool!r}"
            )
        self.cwd = options.get("cwd", "auto")
        if self.cwd is not None and not isinstance(self.cwd, str):
            raise UserError(f"verifier 'shell': option 'cwd' must be \"auto\", a path or null, not {self.cwd!r}")

        self.sandbox = self._sandbox(options)
        self.judge = make_judge(options)
        self.text = TextRule("verifier 'shell': options", options.get("text") or SAME, self.judge)

    def _sandbox(self, options: JsonDict) -> SandboxComparison | None:
        wanted, seconds = options.get("execution", False), options.get("execution_seconds", 5.0)
        if not isinstance(wanted, bool):
            raise UserError(f"verifier 'shell': option 'execution' must be true or false, not {wanted!r}")
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds <= 600:
            raise UserError(f"verifier 'shell': option 'execution_seconds' must be from 0 to 600, not {seconds!r}")
        return SandboxComparison(float(seconds)) if wanted else None

    def config(self) -> JsonDict:
        """Options that are off are left out."""
        made: JsonDict = {"tool": self.tools, "cwd": self.cwd}
        if self.text.rule != SAME:
            made["text"] = self.text.rule
        if self.sandbox is not None:
            made |= {"execution": True, "execution_seconds": self.sandbox.limits.seconds}
        return made | ({"judge": self.judge.config()} if self.judge is not None else {})

    def verify(self, turn: Turn, action: Action) -> Verdict:
        verdict = self.by_rules(turn, action)
        excluded = verdict.reason == "text_turn" and self.text.rule == EXCLUDE
        if self.judge is None or verdict.reason not in _OPEN or excluded:
            return verdict
        said = self.judge.verify(turn, action)
        return Verdict(said.reward, said.reason, {**said.details, "rules": verdict.reason})

    def by_rules(self, turn: Turn, action: Action) -> Verdict:
        """The verdict without the judge."""
        terminus = self._terminus(turn, action)
        if terminus is not None:
            return terminus
        if both_speak(turn, action):
            return self.text.verify(turn, action)
        decided = decide(turn, action)
        if decided is not None:
            return decided
        expected, actual = turn.demonstration.tool_calls, action.tool_calls
        fields = [self.command_field(call) for call in expected]
        if fields and all(field == "keystrokes" for field in fields):
            return self._batch(turn, action)
        reason = "match"
        for i, (e, a) in enumerate(zip(expected, actual)):
            verdict = self.compare(turn, e, a)
            if verdict.reward != 1.0:
                return Verdict(verdict.reward, verdict.reason, {**verdict.details, "call": i})
            if verdict.reason != "match":
                reason = verdict.reason
        return Verdict(1.0, reason)

    def command_field(self, call: ToolCall) -> str | None:
        """The argument of a demonstrated call that holds its command; None if it is no shell call."""
        if self.tools is not None:
            if call.name not in self.tools:
                return None
            if field := self.tools[call.name]:
                return field if _script(call.arguments.get(field)) is not None else None
        elif call.name not in SHELL_TOOLS:
            return None
        return next((f for f in COMMAND_FIELDS if _script(call.arguments.get(f)) is not None), None)

    def compare(self, turn: Turn, expected: ToolCall, actual: ToolCall) -> Verdict:
        """One demonstrated call, of the shell tool or another, with one call of the action."""
        field = self.command_field(expected)
        if field is None or expected.name != actual.name:
            return same_call(turn, expected, actual)
        if not same_arguments(expected.arguments, actual.arguments, HARMLESS_ARGUMENTS | {field}):
            return Verdict(0.0, "argument_differs", {"tool": expected.name})
        typed = expected.arguments.get("is_input") in (True, "true")  # goes to a running program, not to bash
        return self.compare_commands(turn, expected.arguments.get(field), actual.arguments.get(field), typed)

    def compare_commands(self, turn: Turn, expected: Any, actual: Any, typed: bool = False) -> Verdict:
        wanted, given = _script(expected), _script(actual)
        if wanted is None or given is None or wanted[0] != given[0]:
            return Verdict(0.0, "command_differs", {"problems": [f"a command given as {type(actual).__name__}"]})
        if not given[1].strip(_BLANK):
            return Verdict(0.0, "empty_command") if wanted[1].strip(_BLANK) else Verdict(1.0, "match")
        cwd = working_directory(turn, self.cwd)
        if wanted[1] == given[1] if typed else equivalent(wanted[1], given[1], cwd=cwd):
            return Verdict(1.0, "match")
        details: JsonDict = {"expected": wanted[1], "actual": given[1]}
        if typed:
            return Verdict(0.0, "command_differs", details)
        return self._executed(turn, wanted[1], given[1], cwd, details)

    def _executed(self, turn: Turn, expected: str, actual: str, cwd: str | None, details: JsonDict) -> Verdict:
        """The verdict on commands that the rules tell apart."""
        if self.sandbox is None:
            return Verdict(0.0, "command_differs", details)
        same, why = self.sandbox.compare(turn, expected, actual, cwd)
        if same is None:
            return Verdict(0.0, "command_differs", {**details, "execution": why})
        return Verdict(1.0, "same_effect", details) if same else Verdict(0.0, "effect_differs", {**details, "by": why})

    # Terminus -----------------------------------------------------------------------------------------------------

    def _terminus(self, turn: Turn, action: Action) -> Verdict | None:
        """Verdict where the demonstration is a Terminus action written as JSON text; None elsewhere."""
        demonstration = turn.demonstration
        if demonstration.tool_calls or demonstration.problems or action.problems or "{" not in demonstration.text:
            return None
        try:
            expected = parse_terminus(demonstration.text)
        except TerminusError:
            return None
        if action.tool_calls:
            return Verdict(0.0, "called_instead_of_text")
        try:
            actual = parse_terminus(action.text)
        except TerminusError as error:
            return Verdict(0.0, "malformed", {"problems": [str(error)]})
        if actual.harness != expected.harness:
            return Verdict(
                0.0, "malformed", {"problems": [f"a {actual.harness} action where {expected.harness} is spoken"]}
            )
        if actual.complete != expected.complete:
            return Verdict(0.0, "completion_differs", {"expected": expected.complete, "actual": actual.complete})
        return self._same_keystrokes(turn, expected.keystrokes, actual.keystrokes)

    def _batch(self, turn: Turn, action: Action) -> Verdict:
        """A Terminus batch recorded as one call a command, with the JSON (and its completion flag) as content."""
        demonstration = turn.demonstration
        for e, a in zip(demonstration.tool_calls, action.tool_calls):
            if e.name != a.name:
                return Verdict(0.0, "wrong_tool", {"expected": e.name, "actual": a.name})
            if not same_arguments(e.arguments, a.arguments, HARMLESS_ARGUMENTS | {"keystrokes"}):
                return Verdict(0.0, "argument_differs", {"tool": e.name})
        expected, actual = _completion(demonstration.text), _completion(action.text)
        if expected != actual:
            return Verdict(0.0, "completion_differs", {"expected": expected, "actual": actual})
        wanted = [call.arguments.get("keystrokes") for call in demonstration.tool_calls]
        given = [call.arguments.get("keystrokes") for call in action.tool_calls]
        if not all(isinstance(k, str) for k in (*wanted, *given)):
            return Verdict(0.0, "command_differs", {"problems": ["keystrokes are not text"]})
        return self._same_keystrokes(turn, tuple(map(str, wanted)), tuple(map(str, given)))

    def _same_keystrokes(self, turn: Turn, expected: tuple[str, ...], actual: tuple[str, ...]) -> Verdict:
        if "".join(expected) and not "".join(actual).strip():
            return Verdict(0.0, "empty_command") if "".join(expected) != "".join(actual) else Verdict(1.0, "match")
        shell, cwd = at_shell_prompt(last_observation(turn)), working_directory(turn, self.cwd)
        if keystrokes_form(expected, shell, cwd) == keystrokes_form(actual, shell, cwd):
            return Verdict(1.0, "match")
        details: JsonDict = {"expected": list(expected), "actual": list(actual)}
        if shell and all(keys.endswith("\n") for keys in (*expected, *actual)):  # whole commands, typed at a prompt
            return self._executed(turn, "".join(expected), "".join(actual), cwd, details)
        return Verdict(0.0, "command_differs", details)


def _completion(text: str) -> bool:
    """The completion flag of a Terminus JSON in `text`; False where there is none."""
    try:
        action: TerminusAction = parse_terminus(text)
    except TerminusError:
        return False
    return action.complete


def _script(command: Any) -> tuple[tuple[str, ...], str] | None:
    """A command argument as (interpreter, text): a string, or an argument vector as some harnesses pass it."""
    if isinstance(command, str):
        return (), command
    if not isinstance(command, list) or not all(isinstance(word, str) for word in command):
        return None
    if len(command) == 3 and command[0].rpartition("/")[2] in ("bash", "sh") and command[1] in ("-c", "-lc"):
        return (command[0], command[1]), command[2]
    return ("argv",), shlex.join(command)
