"""The objects that flow through the stack: trajectory, turn, action (method.md 1.1).

Messages are kept in one shape, OpenAI chat, with `arguments` decoded to an object:
    {"role": "system" | "user", "content": str}
    {"role": "assistant", "content": str, "thinking": str, "tool_calls": [{"id": str, "name": str, "arguments": dict}]}
    {"role": "tool", "tool_call_id": str, "name": str, "content": str, "is_error": True}
Absent parts are left out of an assistant message (no empty `tool_calls`, no null `content`). `is_error` is there where
the source recorded the failure of a call; no template sees it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

JsonDict = dict[str, Any]


@dataclass(frozen=True)
class ToolCall:
    """One call: `name` and decoded `arguments` (a JSON object)."""

    name: str
    arguments: JsonDict

    def to_json(self) -> JsonDict:
        return {"name": self.name, "arguments": self.arguments}


@dataclass(frozen=True)
class Action:
    """One assistant turn, parsed and never repaired.

    `problems` lists what was malformed in the text it was parsed from (an unclosed tag, arguments that are no JSON...);
    an action with problems is never equivalent to a demonstration.
    """

    text: str = ""
    thinking: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()

    def to_json(self) -> JsonDict:
        row: JsonDict = {"text": self.text, "tool_calls": [call.to_json() for call in self.tool_calls]}
        if self.thinking:
            row["thinking"] = self.thinking
        if self.problems:
            row["problems"] = list(self.problems)
        return row

    @classmethod
    def from_json(cls, row: JsonDict) -> Action:
        return cls(
            text=row.get("text", ""),
            thinking=row.get("thinking", ""),
            tool_calls=tuple(ToolCall(c["name"], c["arguments"]) for c in row.get("tool_calls", ())),
            problems=tuple(row.get("problems", ())),
        )


@dataclass(frozen=True)
class Defect:
    """Where a record breaks. What is before it stands; from there on no state can be trusted, so no turn is made."""

    reason: str  # machine name, as of skips
    detail: str
    turns: int  # assistant turns from there on


@dataclass(frozen=True)
class Trajectory:
    """A whole recorded run, in the message shape of this module; up to its defect, where it has one."""

    id: str
    domain: str
    messages: list[JsonDict]
    tools: list[JsonDict]  # OpenAI: {"type": "function", "function": {"name", "description", "parameters"}}
    task_id: str  # splits are by task: runs of one task never sit on both sides
    meta: JsonDict = field(default_factory=dict)
    source: str = ""  # "file:line"
    defect: Defect | None = None


@dataclass(frozen=True)
class Turn:
    """One model-call boundary (s_t, a*_t): the state before an assistant turn and the demonstrated action."""

    id: str  # "<trajectory id>#<depth>"
    trajectory_id: str
    task_id: str
    depth: int  # index of this assistant turn among the assistant turns of its trajectory, from 0
    domain: str
    split: str  # "warmup" | "train" | "validation"
    messages: list[JsonDict]  # the state: every message before the action
    tools: list[JsonDict]
    demonstration: Action
    source: str = ""  # "file:line"
    flags: list[str] = field(default_factory=list)  # names of `trajectories.flags`

    def to_json(self) -> JsonDict:
        # Not `asdict`: it would copy the whole state deeply for every turn.
        row = {item.name: getattr(self, item.name) for item in fields(self)}
        return {**row, "demonstration": self.demonstration.to_json()}

    @classmethod
    def from_json(cls, row: JsonDict) -> Turn:
        return cls(**{**row, "demonstration": Action.from_json(row["demonstration"])})
