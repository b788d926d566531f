"""WebDancer samples: Hermes text whose first user turn holds the tools, the call format and, last, the question.

`task` names the kind of data, not the task; every row is a task of its own.
"""

from __future__ import annotations

import re
from typing import Any

from pivotrl.trajectories.formats import hermes
from pivotrl.trajectories.formats.base import Format, Parsed
from pivotrl.trajectories.schema import JsonDict

PREAMBLE = re.compile(r"\AA conversation between User and Assistant\..*?<tools>.*?</tools>.*\n\nUser: ?", re.DOTALL)


def _matches(row: JsonDict) -> bool:
    messages = row.get("messages")
    if not isinstance(messages, list) or "functions" not in row:
        return False
    return any(_has_text(m) and PREAMBLE.match(m["content"]) for m in messages[:2])


def _has_text(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("content"), str)


def _parse(row: JsonDict) -> Parsed:
    messages: list[JsonDict] = [
        {**m, "content": PREAMBLE.sub("", m["content"])} if i < 2 and _has_text(m) else m
        for i, m in enumerate(row["messages"])
    ]
    parsed = hermes.parse_messages(row, messages)
    parsed.task_id = None
    if "answer" in row:
        parsed.meta.setdefault("answer", row["answer"])
    return parsed


FORMAT = Format("webdancer", _matches, _parse)
