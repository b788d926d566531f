"""Out-of-domain retention: multiple choice by log-likelihood (HellaSwag shape), scored by the served policy."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pivotrl.errors import UserError
from pivotrl.evaluation.statistics import wilson
from pivotrl.rendering.chat import Renderer


class Scorer(Protocol):
    def score(self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs of each continuation's tokens after its prompt, at temperature 1."""
        ...


@dataclass(frozen=True)
class MultipleChoice:
    context: str
    endings: tuple[str, ...]
    label: int


def read_choices(path: Path, limit: int) -> list[MultipleChoice]:
    """Rows {"activity_label", "ctx", "endings", "label"}. Raises UserError naming file and line of a bad row."""
    if not path.exists():
        raise UserError(f"evaluate.ood_path={path} does not exist; give a JSONL file in HellaSwag's shape, or null")
    rows: list[MultipleChoice] = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if len(rows) == limit:
                break
            try:
                row = json.loads(line)
                label, endings = int(row["label"]), tuple(str(e) for e in row["endings"])
                context = f"{row['activity_label']}: {row['ctx']}" if row.get("activity_label") else str(row["ctx"])
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"{path}:{number}: not a multiple-choice row ({error!r}); "
                    "expected ctx, endings (list) and label (index)"
                ) from error
            if not 0 <= label < len(endings):
                raise UserError(f"{path}:{number}: label {label} is not an index into {len(endings)} endings")
            rows.append(MultipleChoice(context, endings, label))
    if not rows:
        raise UserError(f"evaluate.ood_path={path} has no row")
    return rows


def evaluate_choices(rows: Sequence[MultipleChoice], scorer: Scorer, renderer: Renderer, name: str) -> dict[str, Any]:
    """Share of rows whose right ending has the highest log-likelihood per character (the usual normalised accuracy)."""
    flat = [(row.context, " " + ending) for row in rows for ending in row.endings]
    scores = scorer.score([renderer.encode(c) for c, _ in flat], [renderer.encode(e) for _, e in flat])
    normalised = iter(math.fsum(s) / len(ending) for s, (_, ending) in zip(scores, flat, strict=True))
    right = []
    for row in rows:
        values = [next(normalised) for _ in row.endings]
        right.append(max(range(len(values)), key=values.__getitem__) == row.label)
    return {
        "name": name,
        "accuracy": sum(right) / len(right),
        "ci": list(wilson(sum(right), len(right))),
        "n": len(right),
        "per_task": {str(i): float(r) for i, r in enumerate(right)},
    }
