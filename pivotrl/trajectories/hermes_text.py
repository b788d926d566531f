"""Hermes tool-call text <-> Action: `<think>...</think>`, text, then `<tool_call>{"name", "arguments"}</tool_call>`s.

The grammar lives below `rendering` because recorded demonstrations are written in it too.
"""

from __future__ import annotations

import json
from typing import Any

from pivotrl.trajectories.schema import Action, ToolCall
from pivotrl.trajectories.strict_json import StrictJsonError, raw_decode

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_PROBLEMS = 50  # of one completion, which is malformed from the first
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


def format_hermes(action: Action) -> str:
    """The text that `parse_hermes` reads back as `action` (whose text and thinking hold no tag of the grammar)."""
    values = [json.dumps(call.to_json(), ensure_ascii=False) for call in action.tool_calls]
    calls = "\n".join(f"{OPEN}\n{value}\n{CLOSE}" for value in values)
    body = f"{action.text}\n{calls}" if action.text and calls else action.text + calls
    return f"{THINK_OPEN}\n{action.thinking}\n{THINK_CLOSE}\n\n{body}" if action.thinking else body


def parse_hermes(text: str) -> Action:
    """Parse a completion. Total: any text gives an Action; what is malformed is named in `problems`, never mended.

    Calls inside thinking do not count. The white space of values is kept: only the grammar's own newlines (after
    `<think>`, before `</think>`, two after it, one before the first call) are taken away.
    """
    thinking, body, problems = _split_thinking(text)
    pieces: list[str] = []
    calls: list[ToolCall] = []
    position = 0
    while (start := body.find(OPEN, position)) >= 0:
        if len(problems) >= MAX_PROBLEMS:  # each costs a look at the whole text
            problems.append("too_many_problems")
            break
        pieces.append(body[position:start])
        call, position, problem = _read_call(body, start + len(OPEN))
        if call is not None:
            calls.append(call)
        if problem:
            problems.append(problem)
    pieces.append(body[position:])
    if any(CLOSE in piece for piece in pieces):
        problems.append("stray_close_tag")
    if any(THINK_OPEN in piece or THINK_CLOSE in piece for piece in pieces):
        problems.append("misplaced_thinking")
    if len(pieces) == 1:
        return Action(pieces[0], thinking, (), tuple(problems))
    if any(piece.strip() for piece in pieces[1:]):
        problems.append("text_after_call")
    return Action(pieces[0].removesuffix("\n"), thinking, tuple(calls), tuple(problems))


def _split_thinking(text: str) -> tuple[str, str, list[str]]:
    """(thinking, what follows it, problems). Thinking may lack its opening tag: some templates put it in the prompt."""
    stripped = text.lstrip()
    if stripped.startswith(THINK_OPEN):
        inner, found, body = stripped[len(THINK_OPEN) :].partition(THINK_CLOSE)
        if not found:
            return inner.removeprefix("\n"), "", ["unclosed_thinking"]
    else:
        close, call = text.find(THINK_CLOSE), text.find(OPEN)
        opening = text.find(THINK_OPEN)
        if close < 0 or 0 <= opening < close or (0 <= call < close and _inside_call(text, call, close)):
            return _cut_later_thinking(text)
        inner, _, body = text.partition(THINK_CLOSE)
    thinking = inner.removeprefix("\n").removesuffix("\n")
    return thinking, body.removeprefix("\n").removeprefix("\n"), []


def _inside_call(text: str, call: int, index: int) -> bool:
    """Whether `index` lies in the JSON value of the call at `call` (an argument may quote a tag)."""
    _, end, _ = _read_call(text, call + len(OPEN))
    return index < end


def _cut_later_thinking(text: str) -> tuple[str, str, list[str]]:
    """Thinking after text and before any call is malformed, and calls inside it must still not count."""
    opening, call = text.find(THINK_OPEN), text.find(OPEN)
    if opening < 0 or (0 <= call < opening):
        return "", text, []
    inner, found, rest = text[opening + len(THINK_OPEN) :].partition(THINK_CLOSE)
    problem = "misplaced_thinking" if found else "unclosed_thinking"
    return inner, text[:opening] + rest, [problem]


def _read_call(body: str, start: int) -> tuple[ToolCall | None, int, str | None]:
    """The call whose JSON begins at `start`: (call or None, where to go on, problem or None)."""
    value_start = start
    while value_start < len(body) and body[value_start] in " \t\r\n":
        value_start += 1
    try:
        value, end = raw_decode(body, value_start)
    except StrictJsonError as error:
        return None, _after_broken(body, start), f"broken_json: {error.reason}"
    rest = end
    while rest < len(body) and body[rest] in " \t\r\n":
        rest += 1
    if not body.startswith(CLOSE, rest):
        closed = _marks(body, rest)[0] >= 0
        return None, _after_broken(body, rest), "trailing_garbage" if closed else "unclosed_tool_call"
    call, problem = call_from_value(value)
    return call, rest + len(CLOSE), problem


def _after_broken(body: str, start: int) -> int:
    close, following = _marks(body, start)
    return close + len(CLOSE) if close >= 0 else following


def _marks(body: str, start: int) -> tuple[int, int]:
    """(the closing tag before the next opening one, or -1; that opening tag, or the end). Linear over a whole parse."""
    following = body.find(OPEN, start)
    following = following if following >= 0 else len(body)
    return body.find(CLOSE, start, following), following


def call_from_value(value: Any) -> tuple[ToolCall | None, str | None]:
    """A decoded `{"name", "arguments"}` object as a call, or the problem with it."""
    if not isinstance(value, dict):
        return None, "call_not_an_object"
    if not isinstance(value.get("name"), str) or not value["name"]:
        return None, "missing_name"
    if "arguments" not in value:
        return None, "missing_arguments"
    if not isinstance(value["arguments"], dict):
        return None, "arguments_not_an_object"
    if len(value) > 2:
        return None, "unexpected_key"
    return ToolCall(value["name"], value["arguments"]), None
