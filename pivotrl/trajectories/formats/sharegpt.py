"""ShareGPT rows: {"conversations": [{"from", "value"}], "system"?, "tools"?}; LLaMA-Factory roles or Hermes text."""

from __future__ import annotations

from typing import Any

from pivotrl.trajectories import strict_json
from pivotrl.trajectories.formats import hermes
from pivotrl.trajectories.formats.base import Format, Parsed, describe
from pivotrl.trajectories.normalise import RowError, Unreadable, read_messages, tools_of
from pivotrl.trajectories.schema import JsonDict

ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "function_call",
    "observation": "tool",
    "function_response": "tool",
    "tool": "tool",
}


def _matches(row: JsonDict) -> bool:
    turns = row.get("conversations")
    return isinstance(turns, list) and all(isinstance(t, dict) and "from" in t for t in turns[:1])


def _message(turn: Any, where: str) -> JsonDict:
    role = ROLES.get(str(turn.get("from"))) if isinstance(turn, dict) else None
    if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
        return Unreadable(role, RowError("bad_messages", f"{where}: not a from/value pair of strings"))
    if role is None:
        return Unreadable(None, RowError("unknown_role", f"{where}: {str(turn.get('from'))[:80]!r}"))
    if role != "function_call":
        return {"role": role, "content": turn["value"]}
    try:
        value = strict_json.loads(turn["value"])
    except strict_json.StrictJsonError as error:
        return Unreadable("assistant", RowError("malformed_tool_call", f"{where}: {error}"))
    return {"role": "assistant", "tool_calls": value if isinstance(value, list) else [value]}


def _parse(row: JsonDict) -> Parsed:
    messages = [_message(turn, f"conversations[{i}]") for i, turn in enumerate(row["conversations"])]
    if isinstance(row.get("system"), str) and row["system"]:
        messages.insert(0, {"role": "system", "content": row["system"]})
    if hermes.is_hermes(messages):
        return hermes.parse_messages(row, messages)
    return describe(row, read_messages(messages), tools_of(row.get("tools")))


FORMAT = Format("sharegpt", _matches, _parse)
