"""What a format is: a test of a decoded row, and its reading into a `Parsed` row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pivotrl.trajectories.normalise import RowError
from pivotrl.trajectories.schema import Defect, JsonDict

ID_KEYS = ("id", "trajectory_id", "traj_id", "uuid", "conversation_id", "session_id")
TASK_KEYS = ("task_id", "task", "instance_id", "task_name", "base_id")


@dataclass
class Parsed:
    """A row in the schema's message shape, before the reader gives it an id and a source."""

    messages: list[JsonDict]
    tools: list[JsonDict]
    id: str | None = None
    task_id: str | None = None
    domain: str = ""
    meta: JsonDict = field(default_factory=dict)
    defect: Defect | None = None


@dataclass(frozen=True)
class Format:
    """`matches` is cheap and looks at keys and types only; `parse` may raise `RowError`.

    `expand`: the rows inside a row that is a whole file of runs, or None for one that is not.
    """

    name: str
    matches: Callable[[JsonDict], bool]
    parse: Callable[[JsonDict], Parsed]
    expand: Callable[[JsonDict], list[JsonDict] | None] | None = None
    detected: bool = True  # False: only by `trajectories.format=NAME`


#: The tool of agents whose action is one shell command written as text.
BASH_TOOL: JsonDict = {
    "name": "bash",
    "description": "Run a command in the shell.",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}


def bash_call(command: str) -> JsonDict:
    return {"function": {"name": "bash", "arguments": {"command": command}}}


def text_assistants(messages: list[Any]) -> list[str]:
    """Contents of the assistant messages, where none has structured calls (otherwise empty)."""
    turns = [m for m in messages if isinstance(m, dict) and m.get("role") == "assistant"]
    if any(m.get("tool_calls") for m in turns):
        return []
    return [m["content"] for m in turns if isinstance(m.get("content"), str)]


def describe(row: JsonDict, messages: tuple[list[JsonDict], Defect | None], tools: list[JsonDict]) -> Parsed:
    """Id, task, domain and meta, which all formats keep in the same few places. `messages`: of `read_messages`."""
    meta: JsonDict = {}
    for key in ("metadata", "meta"):
        if isinstance(row.get(key), dict):
            meta.update(row[key])
    if "reward" in row and "reward" not in meta:
        meta["reward"] = row["reward"]
    elif isinstance(row.get("resolved"), bool) and "reward" not in meta:
        meta["reward"] = float(row["resolved"])
    identity = next((row[key] for key in ID_KEYS if _is_name(row.get(key))), None)
    if identity is None and row.get("id") is not None:
        raise RowError("bad_id", f"id is a {type(row['id']).__name__}")
    task = next((scope[key] for scope in (meta, row) for key in TASK_KEYS if _is_name(scope.get(key))), None)
    domain = row.get("domain", meta.get("domain"))
    return Parsed(
        messages=messages[0],
        tools=tools,
        id=None if identity is None else str(identity),
        task_id=None if task is None else str(task),
        domain=domain if isinstance(domain, str) else "",
        meta=meta,
        defect=messages[1],
    )


def _is_name(value: Any) -> bool:
    return (isinstance(value, str) and value != "") or (isinstance(value, int) and not isinstance(value, bool))
