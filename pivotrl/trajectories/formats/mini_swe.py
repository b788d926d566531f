"""mini-swe-agent `.traj.json`: {"messages", "info", "trajectory_format"}, or the bare list of messages.

The text version writes one command in a fenced block; its result is the next user message. The command is read as a
call of `bash`; the system text still asks for text, so such turns get the flag `text_syntax`. `mini_swe_text` leaves
all text as the model wrote and saw it.
"""

from __future__ import annotations

import re
from functools import partial

from pivotrl.trajectories.formats.base import BASH_TOOL, Format, Parsed, bash_call, describe, text_assistants
from pivotrl.trajectories.normalise import RowError, Unreadable, read_messages, text_of, tools_of
from pivotrl.trajectories.schema import JsonDict

BLOCK = re.compile(r"```(?:mswea_bash_command|bash)\s*\n(.*?)\n```", re.DOTALL)


def _is_named(row: JsonDict) -> bool:
    return str(row.get("trajectory_format", "")).startswith("mini-swe-agent")


def _matches(row: JsonDict) -> bool:
    if not isinstance(row.get("messages"), list):
        return False
    return _is_named(row) or any("```mswea_bash_command" in text for text in text_assistants(row["messages"]))


def _parse(row: JsonDict, as_calls: bool = True) -> Parsed:
    messages: list[JsonDict] = []
    unusable: dict[str, str] = {}
    called = uses_text = False
    for i, message in enumerate(row["messages"]):
        if not isinstance(message, dict):
            messages.append(Unreadable(None, RowError("bad_messages", f"messages[{i}] is not an object")))
            continue
        role = message.get("role")
        if role == "exit":  # the agent's own mark at the end of a run; no model sees it
            continue
        if role == "assistant" and not message.get("tool_calls"):
            try:
                content = text_of(message.get("content"), f"messages[{i}]")
            except RowError as error:
                messages.append(Unreadable(role, error))
                continue
            blocks = list(BLOCK.finditer(content))
            usable = len(blocks) == 1 and not content[blocks[0].end() :].strip()
            called = usable and as_calls
            if called:
                uses_text = True
                text = content[: blocks[0].start()].rstrip("\n")
                message = {**message, "content": text, "tool_calls": [bash_call(blocks[0].group(1))]}
            elif not usable:  # the agent asks again, and so nothing is to be learned from it
                unusable[str(len(messages))] = "text_after_call" if blocks else "no_call"
        elif role == "user" and called:
            message, called = {"role": "tool", "content": message.get("content")}, False
        messages.append(message)
    parsed = describe(row, read_messages(messages), tools_of([BASH_TOOL] if uses_text else row.get("tools")))
    if uses_text:
        parsed.meta["text_syntax"] = True
    if unusable:
        parsed.meta["unusable_messages"] = unusable
    return parsed


FORMAT = Format("mini_swe", _matches, _parse)
TEXT = Format("mini_swe_text", _matches, partial(_parse, as_calls=False), detected=False)
