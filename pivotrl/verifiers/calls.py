"""What the shell and edit verifiers share: the decision to call or to speak, and equality of plain arguments."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from typing import Any

from pivotrl.errors import UserError
from pivotrl.trajectories.schema import Action, JsonDict, ToolCall, Turn
from pivotrl.verifiers.base import Verdict
from pivotrl.verifiers.compare import Rules, difference, resolve

# Arguments of shell and edit tools that tell the harness or a reader something and do not change what the call does.
HARMLESS_ARGUMENTS = frozenset(
    {
        "duration",
        "timeout",
        "timeout_sec",
        "timeout_seconds",
        "timeout_ms",
        "description",
        "explanation",
        "thought",
        "security_risk",
    }
)
_TIMES = frozenset({"duration", "timeout", "timeout_sec", "timeout_seconds", "timeout_ms"})
_HARNESS_ARGUMENTS = frozenset({"security_risk"})  # OpenHands adds it to every tool
# A thought does nothing, whatever its words; the letters of every other string count.
_RULES = Rules(lambda path: lambda a, b: path == "think.thought" or a == b, lambda path: False)
# SWE-agent writes the working directory, terminals show a prompt.
_DIRECTORY = re.compile(r"\((?:Current directory): (/[^\n]*)\)")
_PROMPT = re.compile(r"[\w.-]+@[\w.-]+:(/[^\s#$]*)[#$]\s*$")
_MAX_JSON_DEPTH = 100


def tool_schemas(turn: Turn) -> dict[str, JsonDict]:
    """Parameters schema of each tool of the turn, by name."""
    schemas: dict[str, JsonDict] = {}
    for tool in turn.tools:
        function = tool.get("function")
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            schemas[function["name"]] = parameters if isinstance(parameters, dict) else {}
    return schemas


def check_options(verifier: str, options: JsonDict, allowed: Iterable[str]) -> None:
    """Raises UserError for an option that the verifier does not have."""
    known = sorted(allowed)
    for key in options:
        if key not in known:
            raise UserError(f"verifier {verifier!r} has no option {key!r}; it has {', '.join(known) or 'none'}")


def decide(turn: Turn, action: Action) -> Verdict | None:
    """The verdict where no call needs comparing; None when both sides call, equally often, with sound arguments."""
    expected = turn.demonstration
    if expected.problems:
        return Verdict(None, "demonstration_malformed", {"problems": list(expected.problems)})
    if action.problems:
        return Verdict(0.0, "malformed", {"problems": list(action.problems)})
    if not expected.tool_calls:
        if action.tool_calls:
            return Verdict(0.0, "called_instead_of_text")
        if not action.text.strip():
            return Verdict(0.0, "empty")
        if action.text.split() == expected.text.split():
            return Verdict(1.0, "same_text")
        return Verdict(None, "text_turn")  # whether other words say the same is not for these rules to tell
    if not action.tool_calls:
        return Verdict(0.0, "no_call")
    if any(not isinstance(call.arguments, dict) for call in action.tool_calls):
        return Verdict(0.0, "malformed", {"problems": ["arguments are not an object"]})
    if len(action.tool_calls) != len(expected.tool_calls):
        return Verdict(0.0, "number_of_calls", {"expected": len(expected.tool_calls), "actual": len(action.tool_calls)})
    return None


def json_form(value: Any, depth: int = 0) -> Any:
    """Hashable form: equal forms iff equal JSON. Key order is free; 1, 1.0, True and "1" are four values."""
    if depth > _MAX_JSON_DEPTH:
        raise ValueError("nested too deeply")
    if isinstance(value, dict):
        return ("object", frozenset((str(k), json_form(v, depth + 1)) for k, v in value.items()))
    if isinstance(value, (list, tuple)):
        return ("array", *(json_form(v, depth + 1) for v in value))
    if isinstance(value, float):
        return ("float", repr(value))
    return (type(value).__name__, value if isinstance(value, (str, int)) else repr(value))


def same_arguments(expected: JsonDict, actual: JsonDict, ignore: frozenset[str] = HARMLESS_ARGUMENTS) -> bool:
    """Equal arguments, those in `ignore` left out on both sides; of harmless ones the kind of value must fit."""
    sound = all(
        _is_sound(name, actual[name], expected.get(name)) for name in ignore & HARMLESS_ARGUMENTS & actual.keys()
    )
    return sound and _plain(expected, ignore) == _plain(actual, ignore)


def _is_sound(name: str, value: Any, expected: Any) -> bool:
    """Whether a harmless argument has a value of the kind that its tool takes: a time is a number, a remark a text."""
    if value is None or type(value) is type(expected):
        return True
    if name in _TIMES:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if expected is not None and number == isinstance(expected, str):
            return False  # "5" is not 5
        return value >= 0 if number else isinstance(value, str) and re.fullmatch(r"\d+(?:\.\d+)?", value) is not None
    return isinstance(value, str)


def _plain(arguments: JsonDict, ignore: frozenset[str]) -> Any:
    try:
        return json_form({k: v for k, v in arguments.items() if k not in ignore})
    except ValueError:
        return object()  # equal to nothing, itself included


def same_call(turn: Turn, expected: ToolCall, actual: ToolCall) -> Verdict:
    """A call of a tool about which no more is known than its JSON Schema: its name and every argument.

    What is harmless in a shell or an edit tool may be the point of another (a `description`, a `duration`).
    """
    if expected.name != actual.name:
        return Verdict(0.0, "wrong_tool", {"expected": expected.name, "actual": actual.name})
    left, right = ({k: v for k, v in c.arguments.items() if k not in _HARNESS_ARGUMENTS} for c in (expected, actual))
    try:
        if json_form(left) == json_form(right):
            return Verdict(1.0, "match")
    except ValueError:
        return Verdict(0.0, "argument_differs", {"tool": expected.name})
    functions = (tool.get("function") for tool in turn.tools)
    root: Any = next(
        (f.get("parameters") for f in functions if isinstance(f, dict) and f.get("name") == expected.name), {}
    )
    root = root if isinstance(root, dict) else {}
    found = difference(left, right, resolve(root, root), root, _RULES, expected.name)
    if found is None:
        return Verdict(1.0, "match")
    return Verdict(0.0, "argument_differs", {"tool": expected.name, "field": found.path})


def last_observation(turn: Turn) -> str:
    """Text of the last tool or user message of the state, "" if none."""
    for message in reversed(turn.messages):
        if message.get("role") in ("tool", "user") and isinstance(message.get("content"), str):
            return str(message["content"])
    return ""


def working_directory(turn: Turn, option: str | None) -> str | None:
    """The working directory: `option` itself, or for "auto" what the last observation shows; None if not known."""
    if option != "auto":
        return option
    observation = last_observation(turn)[-2000:]
    if shown := _DIRECTORY.findall(observation):
        return posixpath.normpath(shown[-1])
    if prompt := _PROMPT.search(observation):
        return posixpath.normpath(prompt[1])
    return None
