"""Where two renderings of one state part: a checker of prompts against those of an engine or of another template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

AROUND = 8  # tokens of context on each side


@dataclass(frozen=True)
class Difference:
    """The first token at which two sequences of ids differ; None where one has ended."""

    index: int
    ours: int | None
    theirs: int | None
    before: str  # text of the tokens that both share, up to `index`
    ours_text: str  # text from there on, in each
    theirs_text: str

    def __str__(self) -> str:
        return (
            f"first difference at token {self.index}: {self.ours} against {self.theirs}, "
            f"after {self.before!r}: {self.ours_text!r} against {self.theirs_text!r}"
        )


def first_difference(ours: Sequence[int], theirs: Sequence[int], tokenizer: Any) -> Difference | None:
    """None for equal sequences. `tokenizer.decode(ids)` gives the text of the report."""
    shared = min(len(ours), len(theirs))
    index = next((i for i in range(shared) if ours[i] != theirs[i]), shared)
    if index == len(ours) == len(theirs):
        return None

    def text(ids: Sequence[int], start: int, end: int) -> str:
        part = list(ids[max(start, 0) : end])
        return str(tokenizer.decode(part)) if part else ""

    return Difference(
        index,
        ours[index] if index < len(ours) else None,
        theirs[index] if index < len(theirs) else None,
        text(ours, index - AROUND, index),
        text(ours, index, index + AROUND),
        text(theirs, index, index + AROUND),
    )
