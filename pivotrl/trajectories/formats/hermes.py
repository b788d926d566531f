"""Chat messages whose tool calls are Hermes text inside content, with results in `<tool_response>` blocks.

Tools may be listed in the system text instead of a field; they are then taken out of it, because the chat template will
write them again.
"""

from __future__ import annotations

import re
from typing import Any

from pivotrl.trajectories import strict_json
from pivotrl.trajectories.formats.base import Format, Parsed, describe
from pivotrl.trajectories.hermes_text import parse_hermes
from pivotrl.trajectories.normalise import RowError, Unreadable, read_messages, text_of, tools_of
from pivotrl.trajectories.schema import Action, JsonDict

RESPONSE = re.compile(r"<tool_response>\n?(.*?)\n?</tool_response>", re.DOTALL)
TOOLS = re.compile(r"<tools>(\s*[\[{].*?)</tools>", re.DOTALL)
# The section that Hermes and Qwen templates write into the system text: a heading, the tools, the call format, whose
# example ends it. What follows is the user's own text again, and stays.
SECTION = re.compile(
    r"\s*(?:# Tools\n+|You are a function calling AI model\.|You may call one or more functions).*?"
    r"<tools>\s*[\[{].*?</tools>(?:.*</tool_call>)?\s*",
    re.DOTALL,
)


def is_hermes(messages: Any) -> bool:
    """Whether some assistant message writes a call as text and none has structured calls."""
    if not isinstance(messages, list):
        return False
    turns = [m for m in messages if isinstance(m, dict) and m.get("role") == "assistant"]
    return not any(m.get("tool_calls") for m in turns) and any(
        isinstance(m.get("content"), str) and "<tool_call>" in m["content"] for m in turns
    )


def structured(messages: list[JsonDict]) -> tuple[list[JsonDict], dict[str, str]]:
    """Hermes text messages -> (OpenAI chat messages, index -> why the assistant message there is no demonstration).

    A message with a malformed call stays text, as an engine whose parser fails serves it, and so does its result.
    """
    result: list[JsonDict] = []
    malformed: dict[str, str] = {}
    for i, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        try:
            content = text_of(message.get("content"), f"messages[{i}]") if role in ("assistant", "tool", "user") else ""
        except RowError as error:
            result.append(Unreadable(role, error))
            continue
        if role == "assistant" and "<tool_call>" in content:
            action = parse_hermes(content)
            if action.problems:
                malformed[str(len(result))] = f"malformed_tool_call: {', '.join(action.problems)}"
            result.append(message if action.problems else _assistant(action))
        elif role == "user" and str(len(result) - 1) in malformed:
            result.append(message)
        elif role in ("tool", "user") and content.lstrip().startswith("<tool_response>"):
            rest = RESPONSE.sub("", content).strip()
            if rest:
                told = f"messages[{i}]: text beside <tool_response>: {rest[:60]!r}"
                result.append(Unreadable("tool", RowError("malformed_tool_response", told)))
                continue
            result.extend({"role": "tool", "content": part} for part in RESPONSE.findall(content))
        else:
            result.append(message)
    return result, malformed


def _assistant(action: Action) -> JsonDict:
    message: JsonDict = {"role": "assistant", "content": action.text}
    if action.thinking:
        message["thinking"] = action.thinking
    message["tool_calls"] = [{"function": call.to_json()} for call in action.tool_calls]
    return message


def tools_in_system(messages: list[JsonDict]) -> tuple[list[JsonDict], list[JsonDict]]:
    """(messages with the tools section cut from the system text, the tools that it listed)."""
    head = messages[0] if messages and isinstance(messages[0], dict) else {}
    content = head.get("content")
    if head.get("role") != "system" or not isinstance(content, str) or not (listed := TOOLS.search(content)):
        return messages, []
    text, tools, position = listed.group(1), [], 0
    try:
        while (position := _skip_space(text, position)) < len(text):
            value, position = strict_json.raw_decode(text, position)
            tools.extend(value if isinstance(value, list) else [value])
    except strict_json.StrictJsonError as error:
        raise RowError("bad_tools", f"<tools> of the system text: {error}") from error
    cut = content
    if section := SECTION.search(content):
        around = (content[: section.start()], content[section.end() :])
        cut = "\n\n".join(text for text in around if text)
    rest = [{**head, "content": cut}] if cut.strip() else []
    return rest + messages[1:], tools


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n,":
        position += 1
    return position


def parse_messages(row: JsonDict, messages: list[JsonDict]) -> Parsed:
    given = tools_of(row.get("tools") if row.get("tools") is not None else row.get("functions"))
    try:
        cut, listed = tools_in_system(messages)
    except RowError:
        if not given:
            raise
        cut, listed = messages, []  # a text about tools, while the row lists them properly
    chat, malformed = structured(cut)
    parsed = describe(row, read_messages(chat), given or tools_of(listed))
    if malformed:
        parsed.meta["unusable_messages"] = malformed
    head = cut[0] if cut and isinstance(cut[0], dict) else {}
    if head.get("role") == "system" and isinstance(head.get("content"), str) and "<tools>" in head["content"]:
        parsed.meta["text_syntax"] = True  # a section of another wording, which the template's own will follow
    return parsed


def _matches(row: JsonDict) -> bool:
    return is_hermes(row.get("messages"))


def _parse(row: JsonDict) -> Parsed:
    return parse_messages(row, row["messages"])


FORMAT = Format("hermes", _matches, _parse)
