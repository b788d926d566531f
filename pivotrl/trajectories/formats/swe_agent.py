"""SWE-agent `.traj`: {"history": [...], "info"?, "trajectory"?}; function calling, or text that SWE-agent parsed.

Text actions (fenced, `<command>`) are read from the `thought` and `action` that SWE-agent recorded beside the content,
as calls of `bash`; the system text still asks for text, so such turns get the flag `text_syntax`. `swe_agent_text`
leaves all text as the model wrote and saw it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from pivotrl.trajectories import strict_json
from pivotrl.trajectories.formats.base import BASH_TOOL, Format, Parsed, bash_call, describe
from pivotrl.trajectories.normalise import RowError, Unreadable, read_messages, text_of, tools_of
from pivotrl.trajectories.schema import JsonDict


def _matches(row: JsonDict) -> bool:
    history = row.get("history")
    first = history[0] if isinstance(history, list) and history else None
    return isinstance(first, dict) and "role" in first


def _instance(row: JsonDict) -> Any:
    replay = row.get("replay_config")
    if isinstance(replay, str):  # SWE-agent writes it as JSON inside JSON
        try:
            replay = strict_json.loads(replay)
        except strict_json.StrictJsonError:
            return None
    for key in ("problem_statement", "agent"):
        part = replay.get(key) if isinstance(replay, dict) else None
        name = part.get("id" if key == "problem_statement" else "name") if isinstance(part, dict) else None
        if isinstance(name, str) and name:
            return name
    return None


def _parse(row: JsonDict, as_calls: bool = True) -> Parsed:
    messages: list[JsonDict] = []
    unusable: dict[str, str] = {}
    called = False  # the action before was text, so that its result is a user message
    uses_text = False
    for i, message in enumerate(row["history"]):
        if not isinstance(message, dict):
            messages.append(Unreadable(None, RowError("bad_messages", f"history[{i}] is not an object")))
            continue
        role = message.get("role")
        if role == "assistant":
            written = not message.get("tool_calls") and isinstance(message.get("action"), str)
            called = as_calls and written and message["action"] != ""
            uses_text = uses_text or called
            if message.get("is_demo"):
                unusable[str(len(messages))] = "copied_context"
            messages.append(_text_action(message, f"history[{i}]") if called else message)
        elif role == "tool":
            ids = message.get("tool_call_ids")
            identity = ids[0] if isinstance(ids, list) and ids else message.get("tool_call_id")
            messages.append({"role": "tool", "tool_call_id": identity, "content": message.get("content")})
        elif role == "user" and called:
            messages.append({"role": "tool", "content": message.get("content")})
            called = False
        else:
            messages.append({"role": role, "content": message.get("content")})
    parsed = describe(row, read_messages(messages), tools_of([BASH_TOOL] if uses_text else row.get("tools")))
    parsed.task_id = parsed.task_id or _instance(row)
    if uses_text:
        parsed.meta["text_syntax"] = True
    if unusable:
        parsed.meta["unusable_messages"] = unusable
    info = row.get("info")
    if isinstance(info, dict) and isinstance(info.get("exit_status"), str):
        parsed.meta["exit_status"] = info["exit_status"]
    return parsed


def _text_action(message: JsonDict, where: str) -> JsonDict:
    try:
        thought = text_of(message.get("thought"), f"{where}.thought").removesuffix("\n")
    except RowError as error:
        return Unreadable("assistant", error)
    return {"role": "assistant", "content": thought, "tool_calls": [bash_call(message["action"])]}


FORMAT = Format("swe_agent", _matches, _parse)
TEXT = Format("swe_agent_text", _matches, partial(_parse, as_calls=False), detected=False)
