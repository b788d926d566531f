"""Terminus-1 and Terminus-2 chats: the assistant's content is a JSON object of keystrokes, which stays text."""

from __future__ import annotations

from pivotrl.trajectories import strict_json
from pivotrl.trajectories.formats.base import Format, Parsed, describe, text_assistants
from pivotrl.trajectories.normalise import read_messages, tools_of
from pivotrl.trajectories.schema import JsonDict
from pivotrl.trajectories.terminus_text import harness_of, terminus_problem


def _matches(row: JsonDict) -> bool:
    messages = row.get("messages")
    return isinstance(messages, list) and any(_is_terminus(text) for text in text_assistants(messages))


def _is_terminus(text: str) -> bool:
    if '"commands"' not in text or '"keystrokes"' not in text:
        return False
    try:
        value, _ = strict_json.raw_decode(text, text.find("{"))
    except (strict_json.StrictJsonError, ValueError):
        return False
    return harness_of(value) is not None


def _parse(row: JsonDict) -> Parsed:
    parsed = describe(row, read_messages(row["messages"]), tools_of(row.get("tools")))
    problems = {
        str(i): f"malformed_action: {problem}"
        for i, message in enumerate(parsed.messages)
        if message["role"] == "assistant" and (problem := terminus_problem(message.get("content", "")))
    }
    if problems:
        parsed.meta["unusable_messages"] = problems
    return parsed


FORMAT = Format("terminus", _matches, _parse)
