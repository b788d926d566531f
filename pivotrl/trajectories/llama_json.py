"""Llama 3 and 4 tool calls <-> Action: `{"name": ..., "parameters": {...}}`, several joined by `;`.

After text, or in front of built-in tools, `<|python_tag|>` opens them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from pivotrl.trajectories.schema import Action, JsonDict, ToolCall
from pivotrl.trajectories.strict_json import StrictJsonError, raw_decode
from pivotrl.trajectories.thinking import split_thinking_text, with_thinking

TAG = "<|python_tag|>"
_LOOKS_LIKE_CALL = re.compile(r"""\{\s*"(?:name|parameters|arguments|type)"\s*:""")
_SEPARATOR = re.compile(r"\s*;\s*")


def parse_llama_json(text: str, tools: Sequence[JsonDict] = ()) -> Action:
    """Parse a completion. Total. JSON inside prose, or an object without the keys of a call, is text and no call."""
    thinking, body, problems = split_thinking_text(text)
    said, tagged, rest = body.partition(TAG)
    if not tagged:
        said, rest = "", body
        if not _LOOKS_LIKE_CALL.match(body.lstrip()):
            return Action(body, thinking, (), tuple(problems))
    calls: list[ToolCall] = []
    position = len(rest) - len(rest.lstrip())
    while True:
        try:
            value, position = raw_decode(rest, position)
        except StrictJsonError as error:
            problems.append(f"broken_json: {error.reason}")
            break
        call, problem = _call(value)
        if problem == "no_call" and not tagged and not calls and not rest[position:].strip():
            return Action(body, thinking, (), tuple(problems))  # an answer that is a JSON object
        if call is not None:
            calls.append(call)
        if problem:
            problems.append(problem)
        if not rest[position:].strip():
            break
        separator = _SEPARATOR.match(rest, position)
        if separator is None:
            problems.append("text_after_call")
            break
        position = separator.end()
    return Action(said, thinking, tuple(calls), tuple(problems))


def _call(value: Any) -> tuple[ToolCall | None, str | None]:
    if not isinstance(value, dict):
        return None, "call_not_an_object"
    keys = [key for key in ("parameters", "arguments") if key in value]
    if "name" not in value and not keys:
        return None, "no_call"
    if not isinstance(value.get("name"), str) or not value["name"]:
        return None, "missing_name"
    if not keys:
        return None, "missing_arguments"
    if len(keys) > 1 or set(value) - {"name", "type", *keys}:
        return None, "unexpected_key"
    if not isinstance(value[keys[0]], dict):
        return None, "arguments_not_an_object"
    return ToolCall(value["name"], value[keys[0]]), None


def format_llama_json(action: Action) -> str:
    """The text that `parse_llama_json` reads back as `action`."""
    calls = "; ".join(
        json.dumps({"name": c.name, "parameters": c.arguments}, ensure_ascii=False) for c in action.tool_calls
    )
    body = f"{action.text}{TAG}{calls}" if action.text and calls else action.text + calls
    return with_thinking(action.thinking, body)
