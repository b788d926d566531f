"""tau2-bench: a SimulationRun ({"messages", "reward_info", "termination_reason"}) or a results file of many.

What the user simulator does with its own tools is not seen by the agent, and so is no part of a state.
"""

from __future__ import annotations

from typing import Any

from pivotrl.trajectories.formats.base import Format, Parsed, describe
from pivotrl.trajectories.normalise import RowError, Unreadable, read_messages, tools_of
from pivotrl.trajectories.schema import JsonDict


def _matches(row: JsonDict) -> bool:
    return ("reward_info" in row and "termination_reason" in row and "messages" in row) or _is_results(row)


def _is_results(row: JsonDict) -> bool:
    return isinstance(row.get("simulations"), list) and "tasks" in row


def expand(row: JsonDict) -> list[JsonDict] | None:
    """The runs of a results file, each with the policy and tools of its head; None for another row."""
    if not _is_results(row):
        return None
    info = row.get("info")
    environment = info.get("environment_info") if isinstance(info, dict) else None
    shared = environment if isinstance(environment, dict) else {}
    head = {"policy": shared.get("policy"), "tools": shared.get("tool_defs"), "domain": shared.get("domain_name")}
    return [{**head, **run} if isinstance(run, dict) else {"messages": run} for run in row["simulations"]]


def _messages(raw: Any) -> list[JsonDict]:
    if not isinstance(raw, list):
        raise RowError("bad_messages", f"messages is a {type(raw).__name__}, not a list")
    result: list[JsonDict] = []
    for i, message in enumerate(raw):
        if not isinstance(message, dict):
            result.append(Unreadable(None, RowError("bad_messages", f"messages[{i}] is not an object")))
            continue
        role = message.get("role")
        if role == "tool":
            inner = message.get("tool_messages")
            for part in inner if isinstance(inner, list) else [message]:
                if isinstance(part, dict) and part.get("requestor", "assistant") != "user":
                    said = {"tool_call_id": part.get("id"), "content": part.get("content")}
                    result.append({"role": "tool", **said, "is_error": part.get("error")})
        elif role != "user" or not message.get("tool_calls"):
            result.append(message)
    return result


def _parse(row: JsonDict) -> Parsed:
    messages = _messages(row["messages"])
    if isinstance(row.get("policy"), str):
        messages.insert(0, {"role": "system", "content": row["policy"]})
    parsed = describe(row, read_messages(messages), tools_of(row.get("tools") or []))
    info = row.get("reward_info")
    if isinstance(info, dict) and "reward" not in parsed.meta:
        parsed.meta["reward"] = info.get("reward")
    parsed.meta["termination_reason"] = row.get("termination_reason")
    return parsed


FORMAT = Format("tau2", _matches, _parse, expand)
