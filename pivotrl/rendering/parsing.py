"""Action formats: how completions write tool calls. Each is a pair of inverse functions, registered by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pivotrl.errors import UserError
from pivotrl.trajectories.function_xml import format_function_xml, parse_function_xml
from pivotrl.trajectories.hermes_text import format_hermes, parse_hermes
from pivotrl.trajectories.llama_json import format_llama_json, parse_llama_json
from pivotrl.trajectories.normalise import RowError, arguments_of, assistant_message
from pivotrl.trajectories.schema import Action, JsonDict, ToolCall
from pivotrl.trajectories.terminus_text import format_terminus_text, parse_terminus_text


@dataclass(frozen=True)
class ActionFormat:
    """`parse(text, tools)` is total and mends nothing; `parse(format(action), tools) == action` where the text holds no
    markup. `tools` are those of the state: only their schemas say which values of an untyped grammar are no strings."""

    name: str
    parse: Callable[[str, Sequence[JsonDict]], Action]
    format: Callable[[Action], str]


def _hermes(text: str, tools: Sequence[JsonDict]) -> Action:
    return parse_hermes(text)


#: Names as vLLM calls its tool parsers; terminus is content that a harness reads.
ACTION_FORMATS: dict[str, ActionFormat] = {
    item.name: item
    for item in (
        ActionFormat("hermes", _hermes, format_hermes),
        ActionFormat("qwen3_coder", parse_function_xml, format_function_xml),
        ActionFormat("llama3_json", parse_llama_json, format_llama_json),
        ActionFormat("terminus", parse_terminus_text, format_terminus_text),
    )
}


def get_action_format(name: str) -> ActionFormat:
    """Raises `UserError` for an unknown name."""
    if name not in ACTION_FORMATS:
        raise UserError(f"domain.action_format={name!r} is unknown. Known: {', '.join(ACTION_FORMATS)}.")
    return ACTION_FORMATS[name]


def parse_action(text: str, action_format: str = "hermes", tools: Sequence[JsonDict] = ()) -> Action:
    """Completion text (without its stop token) -> Action. Never raises for any text."""
    return get_action_format(action_format).parse(text, tools)


def format_action(action: Action, action_format: str = "hermes") -> str:
    """The text of a well-formed action. Raises `ValueError` for one with problems."""
    if action.problems:
        raise ValueError(f"an action with problems has no text: {action.problems}")
    return get_action_format(action_format).format(action)


def action_from_message(message: JsonDict) -> Action:
    """A served assistant message (OpenAI chat shape) -> Action; total, with `problems` like `parse_action`.

    Optional fields make no difference (field report G14). Each malformed call is one problem, and the others stay.
    """
    calls: list[ToolCall] = []
    problems: list[str] = []
    raw: Any = message.get("tool_calls") or []
    if message.get("function_call") is not None:
        raw = [*raw, message["function_call"]] if isinstance(raw, list) else raw
    if not isinstance(raw, list):
        raw = []
        problems.append("bad_tool_calls")
    for call in raw:
        function = call.get("function", call) if isinstance(call, dict) else None
        try:
            if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
                raise RowError("missing_name", "")
            calls.append(ToolCall(function["name"], arguments_of(function.get("arguments"), "")))
        except RowError as error:
            problems.append(error.reason)
    try:
        spoken = assistant_message({**message, "tool_calls": None, "function_call": None}, "message")
        text, thinking = spoken.get("content", ""), spoken.get("thinking", "")
    except RowError as error:
        text, thinking = "", ""
        problems.append(error.reason)
    return Action(text, thinking, tuple(calls), tuple(problems))
