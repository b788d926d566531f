"""Terminus-1 and Terminus-2 actions: a JSON object of keystroke batches, which is the text of the action.

The harness takes no tool calls, so the object stays `Action.text` to the letter; this module says what is wrong
with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pivotrl.trajectories.schema import Action, JsonDict
from pivotrl.trajectories.strict_json import StrictJsonError, raw_decode
from pivotrl.trajectories.thinking import split_thinking_text, with_thinking

#: harness -> (text fields, completion flag, timing fields of a command)
HARNESSES: dict[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {
    "terminus_1": (("state_analysis", "explanation"), "is_task_complete", ("is_blocking", "timeout_sec")),
    "terminus_2": (("analysis", "plan"), "task_complete", ("duration",)),
}


def harness_of(row: Any) -> str | None:
    """The harness whose fields a decoded object has."""
    if not isinstance(row, dict) or "commands" not in row:
        return None
    return next((name for name, (texts, _, _) in HARNESSES.items() if all(text in row for text in texts)), None)


def parse_terminus_text(text: str, tools: Sequence[JsonDict] = ()) -> Action:
    """Thinking apart, the rest as text. Total; `problems` names JSON that the harness cannot run as it stands."""
    thinking, body, problems = split_thinking_text(text)
    problem = None if problems else terminus_problem(body)
    return Action(body, thinking, (), (*problems, *([problem] if problem else [])))


def format_terminus_text(action: Action) -> str:
    """The text that `parse_terminus_text` reads back as `action`."""
    return with_thinking(action.thinking, action.text)


def terminus_problem(text: str) -> str | None:
    """What keeps `text` from being one action (the harness passes over prose around the object), or None."""
    start = text.find("{")
    if start < 0:
        return "no_json"
    try:
        row, end = raw_decode(text, start)
    except StrictJsonError as error:
        return f"broken_json: {error.reason}"
    if "{" in text[end:]:
        return "two_objects"
    harness = harness_of(row)
    if harness is None:
        return "missing_field"
    texts, flag, timing = HARNESSES[harness]
    if set(row) - {*texts, flag, "commands"}:
        return "unexpected_key"
    mistyped = any(not isinstance(row[name], str) for name in texts) or not isinstance(row.get(flag, False), bool)
    if mistyped or not isinstance(row["commands"], list):
        return "mistyped_field"
    return None if all(_is_command(command, timing) for command in row["commands"]) else "bad_command"


def _is_command(command: Any, timing: tuple[str, ...]) -> bool:
    return (
        isinstance(command, dict)
        and isinstance(command.get("keystrokes"), str)
        and not set(command) - {"keystrokes", *timing}
        and all(isinstance(command.get(name, 0), (int, float)) for name in timing)
    )
