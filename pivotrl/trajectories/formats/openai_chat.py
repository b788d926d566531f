"""OpenAI chat rows: {"messages": [...], "tools": [...]}, with parallel calls or the older `function_call`.

Also the TRL variants: arguments as objects, tools as a JSON string, calls and results without ids.
"""

from __future__ import annotations

import json

from pivotrl.trajectories.formats.base import Format, Parsed, describe
from pivotrl.trajectories.normalise import read_messages, tools_of
from pivotrl.trajectories.schema import JsonDict, Trajectory


def _matches(row: JsonDict) -> bool:
    return "messages" in row


def _parse(row: JsonDict) -> Parsed:
    tools = row.get("tools")
    return describe(row, read_messages(row["messages"]), tools_of(row.get("functions") if tools is None else tools))


def to_row(trajectory: Trajectory) -> JsonDict:
    """A trajectory as an OpenAI chat row, which this reader reads back as it was (but for `source`)."""
    return {
        "id": trajectory.id,
        "domain": trajectory.domain,
        "tools": trajectory.tools,
        "messages": [_raw(message) for message in trajectory.messages],
        "meta": {**trajectory.meta, "task_id": trajectory.task_id},
    }


def _raw(message: JsonDict) -> JsonDict:
    if message["role"] != "assistant":
        return dict(message)
    row: JsonDict = {"role": "assistant", "content": message.get("content")}
    if "thinking" in message:
        row["reasoning_content"] = message["thinking"]
    if "tool_calls" in message:
        row["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)},
            }
            for call in message["tool_calls"]
        ]
    return row


FORMAT = Format("openai_chat", _matches, _parse)
