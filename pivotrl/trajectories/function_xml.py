"""XML tool calls <-> Action: `<function=NAME><parameter=KEY>value</parameter></function>`.

Qwen3-Coder and Nemotron write each inside `<tool_call>`; SWE-smith and OpenHands prompts without. Values are raw text,
and only the tool's schema says which of them are no strings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pivotrl.trajectories.schema import Action, JsonDict, ToolCall
from pivotrl.trajectories.strict_json import StrictJsonError, loads
from pivotrl.trajectories.thinking import split_thinking_text, with_thinking

HEAD = re.compile(r"<function=([^<>\n]*)>")
PARAMETER = re.compile(r"\s*<parameter=([^<>\n]*)>(.*?)</parameter>", re.DOTALL)
TAIL = re.compile(r"\s*</function>")
WRAP_OPEN, WRAP_CLOSE = "<tool_call>", "</tool_call>"
MARKS = ("<function=", "</function>", "<parameter=", "</parameter>", WRAP_OPEN, WRAP_CLOSE)


@dataclass(frozen=True)
class _Read:
    call: ToolCall | None
    end: int  # where to go on
    problem: str | None


def parse_function_xml(text: str, tools: Sequence[JsonDict] = ()) -> Action:
    """Parse a completion. Total: any text gives an Action; what is malformed is named in `problems`, never mended.

    A value whose schema type admits strings, or is unknown, stays the text as written (one newline at each end belongs
    to the grammar); any other type must be JSON of that type (`bad_value`).
    """
    first = HEAD.search(text)
    end = _read(text, first, {}).end if first else -1
    thinking, body, problems = split_thinking_text(text, first.start() if first else -1, end)
    schemas = _schemas(tools)
    calls: list[ToolCall] = []
    pieces: list[str] = []
    position = 0
    while head := HEAD.search(body, position):
        pieces.append(body[position : head.start()])
        read = _read(body, head, schemas)
        position = read.end
        if read.call is not None:
            calls.append(read.call)
        if read.problem:
            problems.append(read.problem)
    pieces.append(body[position:])
    text_part, problem = _text_part(pieces)
    return Action(text_part, thinking, tuple(calls), (*problems, *problem))


def _text_part(pieces: list[str]) -> tuple[str, list[str]]:
    """The text before the first call, and what is wrong with the pieces around and between calls."""
    if len(pieces) == 1:
        stray = [mark for mark in MARKS if mark in pieces[0]]
        return pieces[0], [f"stray_tag: {mark}" for mark in stray[:1]]
    before, *after = pieces
    wrapped = before.rstrip().endswith(WRAP_OPEN)
    if wrapped:
        before = before.rstrip().removesuffix(WRAP_OPEN)
    problems = []
    for i, piece in enumerate(after):
        want = "" if not wrapped else WRAP_CLOSE if i == len(after) - 1 else WRAP_CLOSE + WRAP_OPEN
        found = "".join(piece.split())
        if found != want:
            missing = wrapped and not found.startswith(WRAP_CLOSE)
            problems.append("unclosed_tool_call" if missing else "text_after_call")
    if any(mark in before for mark in MARKS):
        problems.append("stray_tag")
    return before.removesuffix("\n"), problems


def _read(text: str, head: re.Match[str], schemas: dict[str, JsonDict]) -> _Read:
    name, position = head.group(1), head.end()
    following = HEAD.search(text, position)  # a call ends before the next begins: this keeps the whole parse linear
    limit = following.start() if following else len(text)
    arguments: JsonDict = {}
    properties = schemas.get(name, {})
    problem = None if name else "missing_name"
    while match := PARAMETER.match(text, position, limit):
        key, raw = match.groups()
        position = match.end()
        if "<parameter=" in raw or "</function>" in raw:
            problem = problem or "unclosed_parameter"
        if not key or key in arguments:
            problem = problem or ("duplicate_parameter" if key else "missing_parameter_name")
        try:
            arguments[key] = typed_value(raw.removeprefix("\n").removesuffix("\n"), properties.get(key))
        except ValueError:
            problem = problem or f"bad_value: {key[:40]}"
    tail = TAIL.match(text, position, limit)
    if tail is None:
        return _Read(None, limit, problem or "unclosed_function")
    return _Read(None if problem else ToolCall(name, arguments), tail.end(), problem)


def _schemas(tools: Sequence[JsonDict]) -> dict[str, JsonDict]:
    result = {}
    for tool in tools:
        function = tool.get("function", tool)
        properties = (function.get("parameters") or {}).get("properties")
        result[function.get("name")] = properties if isinstance(properties, dict) else {}
    return result


_PYTHON: dict[str, Any] = {
    "object": dict,
    "array": list,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}


def schema_types(schema: Any) -> set[str]:
    """The JSON types that a property's schema admits; empty: it does not say."""
    if not isinstance(schema, dict):
        return set()
    found: set[str] = set()
    for item in schema["type"] if isinstance(schema.get("type"), list) else [schema.get("type")]:
        if isinstance(item, str):
            found.add(item)
    for key in ("anyOf", "oneOf"):
        for item in schema[key] if isinstance(schema.get(key), list) else []:
            found |= schema_types(item)
    return found


def typed_value(raw: str, schema: Any) -> Any:
    """The value that `raw` writes under a property's schema. Raises `ValueError` where it is none of its types."""
    types = schema_types(schema)
    if not types & _PYTHON.keys() or ("string" in types and not (raw == "null" and "null" in types)):
        return raw
    try:
        value = loads(raw)
    except StrictJsonError as error:
        raise ValueError(error.reason) from error
    for name in types & _PYTHON.keys():
        if isinstance(value, _PYTHON[name]) and (name == "boolean" or not isinstance(value, bool)):
            return value
    raise ValueError(f"a {type(value).__name__}")


def format_function_xml(action: Action) -> str:
    """The text, with `<tool_call>` around each call, that `parse_function_xml` reads back as `action`."""
    blocks = []
    for call in action.tool_calls:
        rows = [f"<function={call.name}>"]
        for key, value in call.arguments.items():
            written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            rows.append(f"<parameter={key}>\n{written}\n</parameter>")
        blocks.append("\n".join((WRAP_OPEN, *rows, "</function>", WRAP_CLOSE)))
    calls = "\n".join(blocks)
    return with_thinking(action.thinking, f"{action.text}\n{calls}" if action.text and calls else action.text + calls)
