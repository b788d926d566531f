"""Anthropic messages: content blocks (text, thinking, tool_use, tool_result) and a separate `system`."""

from __future__ import annotations

from typing import Any

from pivotrl.trajectories.formats.base import Format, Parsed, describe
from pivotrl.trajectories.normalise import RowError, Unreadable, read_messages, text_of, tools_of
from pivotrl.trajectories.schema import JsonDict

BLOCKS = ("tool_use", "tool_result", "thinking", "redacted_thinking")


def _matches(row: JsonDict) -> bool:
    messages = row.get("messages")
    if not isinstance(messages, list):
        return False
    if isinstance(row.get("tools"), list) and any(isinstance(t, dict) and "input_schema" in t for t in row["tools"]):
        return True
    contents = [m.get("content") for m in messages if isinstance(m, dict)]
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    return any(isinstance(block, dict) and block.get("type") in BLOCKS for block in blocks)


def _messages(raw: Any) -> list[JsonDict]:
    if not isinstance(raw, list):
        raise RowError("bad_messages", f"messages is a {type(raw).__name__}, not a list")
    result: list[JsonDict] = []
    for i, message in enumerate(raw):
        content = message.get("content") if isinstance(message, dict) else None
        try:
            if not isinstance(content, list):
                result.append(message)
            elif message.get("role") == "assistant":
                result.append(_assistant(content, f"messages[{i}]"))
            else:
                result.extend(_input(message.get("role"), content, f"messages[{i}]"))
        except RowError as error:
            result.append(Unreadable(message.get("role"), error))
    return result


def _assistant(blocks: list[Any], where: str) -> JsonDict:
    turn: JsonDict = {"role": "assistant", "content": "", "thinking": "", "tool_calls": []}
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "thinking":
            turn["thinking"] += text_of(block.get("thinking"), where)
        elif kind == "tool_use":
            call = {"id": block.get("id"), "function": {"name": block.get("name"), "arguments": block.get("input")}}
            turn["tool_calls"].append(call)
        else:
            turn["content"] += text_of([block], where)
    return turn


def _input(role: Any, blocks: list[Any], where: str) -> list[JsonDict]:
    """Tool results first become tool messages; the text of the same turn follows as its own message."""
    results = [b for b in blocks if isinstance(b, dict) and b.get("type") == "tool_result"]
    rest = [b for b in blocks if not (isinstance(b, dict) and b.get("type") == "tool_result")]
    messages: list[JsonDict] = [
        {
            "role": "tool",
            "tool_call_id": b.get("tool_use_id"),
            "content": text_of(b.get("content"), where),
            "is_error": b.get("is_error"),
        }
        for b in results
    ]
    if rest or not results:
        messages.append({"role": role, "content": text_of(rest, where)})
    return messages


def _parse(row: JsonDict) -> Parsed:
    messages = _messages(row["messages"])
    if row.get("system"):
        messages.insert(0, {"role": "system", "content": text_of(row["system"], "system")})
    return describe(row, read_messages(messages), tools_of(row.get("tools")))


FORMAT = Format("anthropic", _matches, _parse)
