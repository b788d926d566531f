"""Chat rows whose calls are `<function=...>` text (SWE-smith, OpenHands without function calling).

The tools are the ones that the system text lists; that section of it is cut, as for Hermes text.
"""

from __future__ import annotations

import re

from pivotrl.trajectories.formats.base import Format, Parsed, describe, text_assistants
from pivotrl.trajectories.function_xml import parse_function_xml
from pivotrl.trajectories.normalise import RowError, Unreadable, read_messages, text_of, tools_of
from pivotrl.trajectories.schema import Action, JsonDict

FUNCTION = re.compile(
    r"---- BEGIN FUNCTION #\d+: (\S+) ----\nDescription: (.*?)\n---- END FUNCTION #\d+ ----", re.DOTALL
)
PARAMETER = re.compile(
    r"^  \(\d+\) (\S+) \((\w+), (required|optional)\): (.*?)(?=\n  \(\d+\) |\Z)", re.DOTALL | re.MULTILINE
)
ALLOWED = re.compile(r"\nAllowed values: \[(.*?)\]\Z", re.DOTALL)
SECTION = re.compile(
    r"\s*You have access to the following functions:\s*---- BEGIN FUNCTION.*?<IMPORTANT>.*?</IMPORTANT>\s*\Z", re.DOTALL
)
RESULT = re.compile(r"\A(?:OBSERVATION:\n|EXECUTION RESULT of \[[^\]\n]*\]:\n)")


def _matches(row: JsonDict) -> bool:
    messages = row.get("messages")
    return isinstance(messages, list) and any("<function=" in text for text in text_assistants(messages))


def tools_in_text(text: str) -> list[JsonDict]:
    """The tools that a system text describes between BEGIN FUNCTION and END FUNCTION."""
    tools = []
    for name, body in FUNCTION.findall(text):
        description, _, listed = body.partition("\nParameters:\n")
        properties: JsonDict = {}
        required = []
        for key, kind, need, about in PARAMETER.findall(listed):
            allowed = ALLOWED.search(about)
            properties[key] = {"type": kind, "description": ALLOWED.sub("", about)}
            if allowed:
                properties[key]["enum"] = re.findall(r"`([^`]*)`", allowed.group(1))
            if need == "required":
                required.append(key)
        about = description.removesuffix("No parameters are required for this function.").strip()
        schema = {"type": "object", "properties": properties, "required": required}
        tools.append({"name": name, "description": about, "parameters": schema})
    return tools


def _parse(row: JsonDict) -> Parsed:
    messages: list[JsonDict] = list(row["messages"])
    tools = tools_of(row.get("tools"))
    head = messages[0] if messages and isinstance(messages[0], dict) else {}
    cut = ""
    if head.get("role") == "system" and isinstance(head.get("content"), str):
        tools = tools or tools_of(tools_in_text(head["content"]))
        cut = SECTION.sub("", head["content"])
        messages = ([{**head, "content": cut}] if cut.strip() else []) + messages[1:]
    result: list[JsonDict] = []
    malformed: dict[str, str] = {}
    called = False
    for i, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        try:
            content = text_of(message.get("content"), f"messages[{i}]") if role in ("assistant", "user") else ""
        except RowError as error:
            result.append(Unreadable(role, error))
            continue
        if role == "assistant":
            action = parse_function_xml(content, tools)
            if action.problems:  # stays text, and so does its result
                malformed[str(i)] = f"malformed_tool_call: {', '.join(action.problems)}"
            message = message if action.problems else _assistant(action)
            called = bool(message.get("tool_calls"))
        elif role == "user" and called:
            message, called = {"role": "tool", "content": RESULT.sub("", content)}, False
        result.append(message)
    parsed = describe(row, read_messages(result), tools)
    if malformed:
        parsed.meta["unusable_messages"] = malformed
    if "BEGIN FUNCTION" in cut or "<function=" in cut:
        parsed.meta["text_syntax"] = True  # a section of another wording, which the template's own will follow
    return parsed


def _assistant(action: Action) -> JsonDict:
    message: JsonDict = {"role": "assistant", "content": action.text.rstrip("\n") if action.tool_calls else action.text}
    if action.thinking:
        message["thinking"] = action.thinking
    if action.tool_calls:
        message["tool_calls"] = [{"function": call.to_json()} for call in action.tool_calls]
    return message


FORMAT = Format("function_xml", _matches, _parse)
