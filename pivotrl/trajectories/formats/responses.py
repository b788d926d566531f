"""OpenAI Responses items as NeMo-Gym stores them: rollouts (input, output) and pivot rows (input, expected_action).

The items of one model response (reasoning, message, calls) are one assistant turn; those of a later response begin
after an input item (a user message or a call's output).
"""

from __future__ import annotations

from typing import Any

from pivotrl.trajectories.formats.base import Format, Parsed, describe
from pivotrl.trajectories.normalise import RowError, Unreadable, messages_of, read_messages, text_of, tools_of
from pivotrl.trajectories.schema import JsonDict

#: Where a pivot row says which turn of its trajectory it is.
PLACE = ("assistant_depth", "turn", "step", "pivot_agent_turn_index")


def _items(value: Any, where: str) -> list[JsonDict]:
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RowError("bad_messages", f"{where} is not a list of items")
    return value


def messages_from_items(items: list[JsonDict]) -> list[JsonDict]:
    """Responses items -> OpenAI chat messages, `Unreadable` ones where an item cannot be taken."""
    messages: list[JsonDict] = []
    turn: JsonDict | None = None  # the assistant message that is being put together
    for i, item in enumerate(items):
        where, kind = f"items[{i}]", item.get("type", "message")
        if kind == "message" and item.get("role") != "assistant":
            turn = None
            messages.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "function_call_output":
            turn = None
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        elif kind in ("message", "reasoning", "function_call"):
            if turn is None:
                turn = {"role": "assistant", "content": "", "thinking": "", "tool_calls": []}
                messages.append(turn)
            if messages[-1] is turn:  # else an earlier item of this response could not be taken
                try:
                    _extend(turn, kind, item, where)
                except RowError as error:
                    messages[-1] = Unreadable("assistant", error)
        else:
            unknown = RowError("unsupported_content", f"{where}: item of type {str(kind)[:40]!r}")
            if turn is None:
                messages.append(Unreadable(None, unknown))
            elif messages[-1] is turn:
                messages[-1] = Unreadable("assistant", unknown)
    return messages


def _extend(turn: JsonDict, kind: str, item: JsonDict, where: str) -> None:
    if kind == "message":
        if turn["tool_calls"]:
            raise RowError("text_after_call", f"{where}: a message after a call of the same response")
        turn["content"] += text_of(item.get("content"), where)
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        if not isinstance(parts, list):
            raise RowError("unsupported_content", f"{where}: reasoning is not a list of parts")
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
            raise RowError("unsupported_content", f"{where}: a part of reasoning without text")
        turn["thinking"] += "\n".join(part["text"] for part in parts)
    else:
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        turn["tool_calls"].append({"id": item.get("call_id"), "function": function})


def _params(row: JsonDict) -> JsonDict:
    params = row["responses_create_params"]
    return params if isinstance(params, dict) else {}


def _head(params: JsonDict) -> list[JsonDict]:
    items = _items(params.get("input"), "input")
    if isinstance(params.get("instructions"), str):
        items = [{"type": "message", "role": "system", "content": params["instructions"]}, *items]
    return items


def state_of(params: JsonDict) -> tuple[list[JsonDict], list[JsonDict]]:
    """(messages, tools) of a request's parameters. Raises `RowError`."""
    turn = {"role": "assistant", "content": ""}  # what will follow it; no trajectory is without one
    return messages_of([*messages_from_items(_head(params)), turn])[:-1], tools_of(params.get("tools"))


def _matches_rollout(row: JsonDict) -> bool:
    return isinstance(row.get("responses_create_params"), dict) and isinstance(row.get("response"), dict)


def _parse_rollout(row: JsonDict) -> Parsed:
    params = _params(row)
    items = _head(params) + _items(row["response"].get("output"), "response.output")
    tools = params.get("tools") or row["response"].get("tools")
    return describe(row, read_messages(messages_from_items(items)), tools_of(tools))


def _matches_pivot(row: JsonDict) -> bool:
    if not isinstance(row.get("responses_create_params"), dict):
        return False
    return "expected_action" in row or isinstance(row.get("expected_answer"), str)  # the latter: Terminus rows


def _parse_pivot(row: JsonDict) -> Parsed:
    answer = {"type": "message", "content": row.get("expected_answer")}
    expected = row.get("expected_action", answer)
    kind = expected.get("type") if isinstance(expected, dict) else None
    if kind == "message":
        action = [{"type": "message", "role": "assistant", "content": expected.get("content")}]
    elif kind == "function_call":
        action = [expected]
    elif kind == "function_call_batch":
        action = _items(expected.get("calls"), "expected_action.calls")
    else:
        raise RowError("bad_expected_action", f"expected_action of type {str(kind)[:40]!r}")
    params = _params(row)
    messages = messages_of(messages_from_items(_head(params) + action))  # whole, or the turn cannot be used
    parsed = describe(row, (messages, None), tools_of(params.get("tools")))
    parsed.meta["only_last_turn"] = True  # one turn a row: the turns of its history have rows of their own
    trajectory = row.get("trajectory_id", parsed.meta.get("source_trajectory_uid"))
    if isinstance(trajectory, str):  # several rows a trajectory, which must stay on one side of a split
        parsed.meta["trajectory_id"] = trajectory
        parsed.task_id = parsed.task_id or trajectory
        if "id" not in row:
            parsed.id = _row_id(row, parsed, trajectory)
    if parsed.id is None and parsed.task_id is not None and "turn" in parsed.meta:
        parsed.id = f"{parsed.task_id}@{parsed.meta['turn']}"
    return parsed


def _row_id(row: JsonDict, parsed: Parsed, trajectory: str) -> str:
    info = row.get("meta_info")
    place = info if isinstance(info, dict) else parsed.meta
    parts = [str(place[key]) for key in PLACE if isinstance(place.get(key), (int, str))]
    turns = sum(1 for message in parsed.messages if message["role"] == "assistant")
    return f"{trajectory}@{'.'.join(parts) or turns - 1}"


ROLLOUT = Format("responses", _matches_rollout, _parse_rollout)
PIVOT = Format("nemo_gym_pivot", _matches_pivot, _parse_pivot)
