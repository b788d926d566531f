"""Assistant turns of the shared terminal and software-engineering trajectories, read as plainly as the tests need."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from pivotrl.trajectories.schema import Action, ToolCall, Turn

DATA = Path(os.environ.get("PIVOTRL_SHARED", "../shared")) / "data"
_XML_CALL = re.compile(r"<function=([\w-]+)>\n?(.*?)</function>", re.DOTALL)
_XML_PARAMETER = re.compile(r"<parameter=([\w-]+)>(.*?)</parameter>", re.DOTALL)


def turn(
    demonstration: Action, messages: list[dict[str, Any]] | None = None, domain: str = "terminal", name: str = "t"
) -> Turn:
    return Turn(f"{name}#0", name, name, 0, domain, "train", messages or [], [], demonstration)


def call(tool: str, **arguments: Any) -> Action:
    return Action(tool_calls=(ToolCall(tool, arguments),))


def _action(message: dict[str, Any]) -> Action:
    calls = [
        ToolCall(c["function"]["name"], _decoded(c["function"]["arguments"])) for c in message.get("tool_calls") or ()
    ]
    text = message.get("content") or ""
    for name, body in _XML_CALL.findall(text):
        calls.append(ToolCall(name, dict(_XML_PARAMETER.findall(body))))
    return Action(text=text, tool_calls=tuple(calls))


def _decoded(arguments: Any) -> Any:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def _messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Chat messages of a row; of a Responses row, one assistant message per function call."""
    if "messages" in row:
        return list(row["messages"])
    items = [*row["responses_create_params"]["input"], *row["response"]["output"]]
    messages: list[dict[str, Any]] = []
    for item in items:
        if item.get("type") == "function_call":
            messages.append({"role": "assistant", "tool_calls": [{"function": item}]})
        elif item.get("type") == "function_call_output":
            messages.append({"role": "tool", "content": item["output"]})
        elif item.get("role"):
            content = item["content"]
            text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
            messages.append({"role": item["role"], "content": text})
    return messages


def _turns(path: Path) -> Iterator[Turn]:
    for i, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        state: list[dict[str, Any]] = []
        for message in _messages(json.loads(line)):
            if message["role"] == "assistant":
                action = _action(message)
                if action.text or action.tool_calls:
                    yield turn(action, list(state), path.parent.name, f"{path.stem}:{i}:{len(state)}")
                calls = [{"id": "", "name": c.name, "arguments": c.arguments} for c in action.tool_calls]
                state.append({"role": "assistant", "content": action.text, "tool_calls": calls})
            else:
                state.append(message)


@lru_cache
def recorded_turns() -> tuple[Turn, ...]:
    """All turns, () where the shared data is absent."""
    paths = sorted([*(DATA / "terminal").glob("*.jsonl"), *(DATA / "swe").glob("*.jsonl")])
    return tuple(turn for path in paths for turn in _turns(path))


def terminus(*keystrokes: str, complete: bool = False, **more: Any) -> Action:
    commands = [{"keystrokes": k, "duration": 0.1} for k in keystrokes]
    return Action(
        text=json.dumps({"analysis": "a", "plan": "p", "commands": commands, "task_complete": complete, **more})
    )
