"""OpenHands: an event stream (a JSON array, or {"events"}), or evaluation output ({"instance_id", "history"})."""

from __future__ import annotations

from typing import Any

from pivotrl.trajectories.formats.base import Format, Parsed, describe
from pivotrl.trajectories.normalise import RowError, Unreadable, read_messages, tools_of
from pivotrl.trajectories.schema import JsonDict

#: Book-keeping that no model sees.
SILENT = ("change_agent_state", "agent_state_changed", "recall", "null", "start", "condensation", "loop_recovery")


def _is_event(value: Any) -> bool:
    return isinstance(value, dict) and ("action" in value or "observation" in value) and "role" not in value


def _matches(row: JsonDict) -> bool:
    events = row.get("events", row.get("history"))
    if not isinstance(events, list) or not events:
        return False
    return _is_event(events[0][0] if isinstance(events[0], list) and events[0] else events[0])


def _flat(events: Any) -> list[Any]:
    """Older output pairs each action with its observation."""
    if not isinstance(events, list):
        raise RowError("bad_messages", "no list of events")
    return [event for item in events for event in (item if isinstance(item, list) else [item])]


def _dict(value: Any) -> JsonDict:
    return value if isinstance(value, dict) else {}


def _model_message(event: JsonDict, where: str) -> tuple[str | None, JsonDict | None]:
    """(id of the model response, its message) of an action that came from a tool call."""
    response = _dict(event.get("tool_call_metadata")).get("model_response")
    choices = response.get("choices") if isinstance(response, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return None, None
    message = choices[0].get("message")
    if not isinstance(message, dict):
        return None, Unreadable("assistant", RowError("bad_messages", f"{where}: a model response without a message"))
    return str(response.get("id")) if isinstance(response, dict) else None, message


def _parse(row: JsonDict) -> Parsed:
    events = _flat(row.get("events", row.get("history")))
    messages: list[JsonDict] = []
    tools: Any = row.get("tools")
    seen: str | None = None
    for i, event in enumerate(events):
        where = f"events[{i}]"
        if not _is_event(event):
            messages.append(Unreadable(None, RowError("bad_messages", f"{where} is no event")))
            continue
        arguments = _dict(event.get("args"))
        kind = event.get("action", event.get("observation"))
        if kind in SILENT:
            continue
        if kind == "system":
            messages.append({"role": "system", "content": arguments.get("content")})
            tools = tools or arguments.get("tools")
        elif "observation" in event:
            messages.append(_observation(event, where))
        elif event.get("source") == "user":
            messages.append({"role": "user", "content": arguments.get("content", event.get("message"))})
        else:
            identity, message = _model_message(event, where)
            if message is None and kind == "message":
                message = {"role": "assistant", "content": arguments.get("content")}
            if message is None:
                told = f"{where}: action {str(kind)[:40]!r} without its model response"
                message = Unreadable("assistant", RowError("unsupported_event", told))
            if identity is None or identity != seen:  # parallel calls: one event each, one response
                messages.append(message if isinstance(message, Unreadable) else {**message, "role": "assistant"})
            seen = identity
    return _described(row, messages, tools)


def _observation(event: JsonDict, where: str) -> JsonDict:
    metadata = event.get("tool_call_metadata")
    extras = event.get("extras")
    shown = (extras.get("formatted_output_and_error") if isinstance(extras, dict) else None) or event.get("content")
    if not isinstance(metadata, dict):
        return {"role": "user", "content": shown}
    if not isinstance(metadata.get("tool_call_id"), str):
        return Unreadable("tool", RowError("orphan_tool_result", f"{where}: no tool_call_id"))
    failed = event.get("observation") == "error"
    return {"role": "tool", "tool_call_id": metadata["tool_call_id"], "content": shown, "is_error": failed}


def _described(row: JsonDict, messages: list[JsonDict], tools: Any) -> Parsed:
    parsed = describe(row, read_messages(messages), tools_of(tools))
    result = row.get("test_result")
    report = result.get("report") if isinstance(result, dict) else None
    resolved = report.get("resolved") if isinstance(report, dict) else None
    if isinstance(resolved, bool) and "reward" not in parsed.meta:
        parsed.meta["reward"] = float(resolved)
    if parsed.id is None and parsed.task_id is not None and "instance_id" in row:
        parsed.id = parsed.task_id
    return parsed


FORMAT = Format("openhands", _matches, _parse)
