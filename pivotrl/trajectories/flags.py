"""Flags on turns: facts about where a turn stands in its run, for filters and for a person who looks at it.

next_error    a result of its calls is an error, as recorded (`is_error`) or by the conventions below
run_failed    the recorded reward of the trajectory is 0 or less
repeated      an earlier turn of the trajectory took the same action (calls, or text where there are none)
last          the last assistant turn of the trajectory
text_syntax   its calls were written as text of the agent's own, for which the state's instructions still ask
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from pivotrl.trajectories.schema import JsonDict

FLAGS = ("next_error", "run_failed", "repeated", "last", "text_syntax")

# How tools of the supported agents report failure: a prefix, a traceback, an exit status, or a JSON object.
_ERROR = re.compile(
    r"\s*(?:Error\b|ERROR\b|error:|Exception\b|Traceback \(most recent call last\)|\[error\]"
    r"|<returncode>(?!0</returncode>)|[\w.]*(?:Error|Exception):)"
)
_EXIT = re.compile(r"\[(?:Command finished with|The command completed with) exit code (?!0\b)-?\d+")

_encode = json.JSONEncoder(sort_keys=True).encode


def is_error(content: str) -> bool:
    """Whether a tool result reports an error. Only openly marked ones count: `error` somewhere in a page does not."""
    if _ERROR.match(content) or _EXIT.search(content[-400:]):
        return True
    head = content.lstrip()
    if not head.startswith("{") or not any(word in head[:400] for word in ('"error"', '"is_error"', '"success"')):
        return False
    try:
        value: Any = json.loads(head)
    except (ValueError, RecursionError):
        return False
    return bool(value.get("error")) or value.get("is_error") is True or value.get("success") is False


def action_key(message: JsonDict) -> str:
    """What makes two assistant messages the same action: calls without ids and text; thinking does not count."""
    if calls := message.get("tool_calls"):
        return _encode([[call["name"], call["arguments"]] for call in calls])
    return "text:" + message.get("content", "").strip()


def turn_flags(messages: Sequence[JsonDict], place: int, last: bool, seen: set[str], reward: Any) -> list[str]:
    """Flags of the turn `messages[place]`. `seen`: action keys of the earlier turns, to which this one's is added."""
    found = []
    for message in messages[place + 1 :]:
        if message["role"] != "tool":
            break
        if message.get("is_error") or is_error(message["content"]):
            found.append("next_error")
            break
    if isinstance(reward, (int, float)) and not isinstance(reward, bool) and reward <= 0:
        found.append("run_failed")
    key = action_key(messages[place])
    if key in seen:
        found.append("repeated")
    seen.add(key)
    if last:
        found.append("last")
    return found
