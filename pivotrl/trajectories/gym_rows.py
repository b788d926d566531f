"""Turns -> NeMo-Gym pivot rows (method.md 4.2), which the reader `nemo_gym_pivot` takes back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pivotrl.errors import UserError
from pivotrl.trajectories import strict_json
from pivotrl.trajectories.schema import Action, JsonDict, Turn
from pivotrl.trajectories.terminus_text import harness_of

AGENT = "single_step_tool_use_with_argument_comparison_agent"


def gym_row(turn: Turn, rewards: Sequence[float | None] = (), agent: str | None = None) -> JsonDict:
    """One row. `rewards` are those of the turn's profile (None: unscorable, which leaves the pass rate); none: no rate.

    The label holds no thinking and, beside calls, no text; the state keeps both. `agent` must be a name in the
    configuration of NeMo-Gym. A demonstration that is a Terminus object becomes `expected_answer`, and needs one:
    raises `UserError` without.
    """
    harness = _harness(turn.demonstration)
    row: JsonDict = {"responses_create_params": _params(turn)}
    if harness is None:
        row["expected_action"] = _expected(turn.demonstration)
    else:
        row["expected_answer"] = turn.demonstration.text
        if agent is None:
            raise UserError(f"{turn.id} is a Terminus turn: give --agent NAME, the one of your NeMo-Gym configuration")
    row["agent_ref"] = {"type": "responses_api_agents", "name": agent or AGENT}
    scored = [reward for reward in rewards if reward is not None]
    if scored:
        row["pass_rate"] = sum(scored) / len(scored)
        row["pass_rate_total"] = len(scored)
        row["pass_rate_passed"] = sum(reward == 1 for reward in scored)
    row["trajectory_id"] = turn.trajectory_id
    row["meta_info"] = {"assistant_depth": turn.depth}
    row["metadata"] = {"task_id": turn.task_id, "turn_id": turn.id, "domain": turn.domain}
    if harness is not None:
        row["metadata"]["harness"] = harness
    return row


def unlisted_tools(turn: Turn) -> list[str]:
    """Names that the demonstration calls and `tools` does not list: NeMo-Gym refuses such a row."""
    listed = {tool["function"]["name"] for tool in turn.tools}
    return sorted({call.name for call in turn.demonstration.tool_calls} - listed)


def _harness(action: Action) -> str | None:
    if action.tool_calls or not action.text.lstrip().startswith("{"):
        return None
    try:
        return harness_of(strict_json.loads(action.text))
    except strict_json.StrictJsonError:
        return None


def _params(turn: Turn) -> JsonDict:
    items: list[JsonDict] = []
    for i, message in enumerate(turn.messages):
        items.extend(items_of(message, i))
    several = [message for message in turn.messages if len(message.get("tool_calls", ())) > 1]
    parallel = bool(several) or len(turn.demonstration.tool_calls) > 1
    tools = [{"type": "function", **tool["function"], "strict": True} for tool in turn.tools]
    return {"input": items, "tools": tools, "parallel_tool_calls": parallel, "tool_choice": "auto"}


def items_of(message: JsonDict, index: int) -> list[JsonDict]:
    """Responses items of one message. Ids are made of its place, so that the same turn gives the same row."""
    if message["role"] == "tool":
        return [{"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}]
    if message["role"] != "assistant":
        return [{"role": message["role"], "content": message["content"], "type": "message"}]
    items: list[JsonDict] = []
    if message.get("thinking"):
        summary = [{"type": "summary_text", "text": message["thinking"]}]
        items.append({"type": "reasoning", "id": f"rs_{index}", "summary": summary})
    if message.get("content") or not message.get("tool_calls"):
        text = {"type": "output_text", "text": message.get("content", ""), "annotations": []}
        item = {"type": "message", "role": "assistant", "status": "completed", "id": f"msg_{index}", "content": [text]}
        items.append(item)
    for i, call in enumerate(message.get("tool_calls", ())):
        made = {"id": f"fc_{index}_{i}", "call_id": call["id"], "status": "completed"}
        items.append({**_call(call["name"], call["arguments"]), **made})
    return items


def _call(name: str, arguments: Any) -> JsonDict:
    return {"type": "function_call", "name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}


def _expected(action: Action) -> JsonDict:
    calls = [_call(call.name, call.arguments) for call in action.tool_calls]
    if not calls:
        return {"type": "message", "content": action.text}
    return calls[0] if len(calls) == 1 else {"type": "function_call_batch", "calls": calls}
