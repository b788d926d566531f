"""ATIF, the agent trajectory interchange format: {"schema_version": "ATIF-...", "steps": [...]}."""

from __future__ import annotations

from typing import Any

from pivotrl.trajectories.formats.base import Format, Parsed, describe
from pivotrl.trajectories.normalise import RowError, Unreadable, read_messages, tools_of
from pivotrl.trajectories.schema import JsonDict


def _matches(row: JsonDict) -> bool:
    return str(row.get("schema_version", "")).startswith("ATIF") and "steps" in row


def _step(step: Any, where: str) -> list[JsonDict]:
    if not isinstance(step, dict):
        raise RowError("bad_messages", f"{where} is not an object")
    if step.get("source") != "agent":
        return [{"role": step.get("source"), "content": step.get("message")}]
    calls = [
        {"id": c.get("tool_call_id"), "function": {"name": c.get("function_name"), "arguments": c.get("arguments")}}
        for c in _objects(step.get("tool_calls"), "bad_tool_calls", f"{where}.tool_calls")
    ]
    turn = {"role": "assistant", "content": step.get("message"), "tool_calls": calls}
    turn["thinking"] = step.get("reasoning_content")
    observation = step.get("observation")
    if observation is not None and not isinstance(observation, dict):
        raise RowError("bad_messages", f"{where}.observation is not an object")
    results = _objects((observation or {}).get("results"), "bad_messages", f"{where}.observation.results")
    if not calls:  # what the environment shows without having been called
        return [turn] + [{"role": "user", "content": r.get("content")} for r in results]
    return [turn] + [
        {"role": "tool", "tool_call_id": r.get("source_call_id"), "content": r.get("content")} for r in results
    ]


def _objects(value: Any, reason: str, where: str) -> list[JsonDict]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RowError(reason, f"{where} is not a list of objects")
    return value


def _parse(row: JsonDict) -> Parsed:
    if not isinstance(row["steps"], list):
        raise RowError("bad_messages", "steps is not a list")
    messages: list[JsonDict] = []
    copied: dict[str, str] = {}
    for i, step in enumerate(row["steps"]):
        if isinstance(step, dict) and step.get("source") == "agent" and step.get("is_copied_context"):
            copied[str(len(messages))] = "copied_context"  # shown to the model again, not generated here
        try:
            messages.extend(_step(step, f"steps[{i}]"))
        except RowError as error:
            agents = isinstance(step, dict) and step.get("source") == "agent"
            messages.append(Unreadable("assistant" if agents else None, error))
    agent = row.get("agent")
    tools = agent.get("tool_definitions") if isinstance(agent, dict) else None
    parsed = describe(row, read_messages(messages), tools_of(tools))
    if copied:
        parsed.meta["unusable_messages"] = copied
    return parsed


FORMAT = Format("atif", _matches, _parse)
