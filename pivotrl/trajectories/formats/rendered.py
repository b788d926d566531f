"""Already rendered ChatML text: {"text": "<|im_start|>system..."}; its calls and results are Hermes text."""

from __future__ import annotations

import re

from pivotrl.trajectories.formats import hermes
from pivotrl.trajectories.formats.base import Format, Parsed
from pivotrl.trajectories.normalise import RowError
from pivotrl.trajectories.schema import JsonDict

TURN = re.compile(r"<\|im_start\|>([^\n]*)\n(.*?)<\|im_end\|>\n?", re.DOTALL)


def _matches(row: JsonDict) -> bool:
    return isinstance(row.get("text"), str) and row["text"].lstrip().startswith("<|im_start|>")


def _parse(row: JsonDict) -> Parsed:
    rest = TURN.sub("", row["text"]).strip()
    if rest:
        raise RowError("bad_messages", f"text outside <|im_start|>...<|im_end|>: {rest[:60]!r}")
    turns = [{"role": role.strip(), "content": content} for role, content in TURN.findall(row["text"])]
    return hermes.parse_messages(row, turns)


FORMAT = Format("rendered_chatml", _matches, _parse)
