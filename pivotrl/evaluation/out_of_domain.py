"""Out-of-domain retention: unrelated questions, scored by the served policy (kinds: evaluation/questions.py)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pivotrl.evaluation.questions import ExactAnswer, Instructions, MultipleChoice, QuestionSet, answered, kept
from pivotrl.evaluation.statistics import wilson
from pivotrl.generation.engine import Engine, Sampling
from pivotrl.rendering.chat import Renderer
from pivotrl.trajectories.thinking import split_thinking_text


class Scorer(Protocol):
    def score(self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs of each continuation's tokens after its prompt, at temperature 1."""
        ...


class ScoringEngine(Engine, Scorer, Protocol):
    """What generates answers and scores texts."""


def joined(found: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Accuracy over the questions of all sets, with its interval, and of each set under "sets"; of one set, its own."""
    if len(found) == 1:
        return next(iter(found.values()))
    per_task = {f"{name}/{i}": v for name, one in found.items() for i, v in one["per_task"].items()}
    right = [v == 1.0 for v in per_task.values()]
    return {
        "name": ", ".join(found),
        "accuracy": sum(right) / len(right),
        "ci": list(wilson(sum(right), len(right))),
        "n": len(right),
        "per_task": per_task,
        "sets": {name: {k: v for k, v in one.items() if k != "per_task"} for name, one in found.items()},
    }


def evaluate_set(
    questions: QuestionSet, engine: ScoringEngine, renderer: Renderer, max_new_tokens: int, context_length: int
) -> dict[str, Any]:
    """Accuracy on a set, with its interval and each question's outcome under "per_task"."""
    if questions.kind == "choice":
        rows = [row for row in questions.rows if isinstance(row, MultipleChoice)]
        return evaluate_choices(rows, engine, renderer, questions.name)
    return _generated(questions, engine, renderer, max_new_tokens, context_length)


def evaluate_choices(rows: Sequence[MultipleChoice], scorer: Scorer, renderer: Renderer, name: str) -> dict[str, Any]:
    """Share of rows whose right ending has the highest log-likelihood per character (the usual normalised accuracy)."""
    flat = [(row.context, " " + ending) for row in rows for ending in row.endings]
    scores = scorer.score([renderer.encode(c) for c, _ in flat], [renderer.encode(e) for _, e in flat])
    normalised = iter(math.fsum(s) / len(ending) for s, (_, ending) in zip(scores, flat, strict=True))
    right = []
    for row in rows:
        values = [next(normalised) for _ in row.endings]
        right.append(max(range(len(values)), key=values.__getitem__) == row.label)
    return _accuracy(name, right)


def _generated(
    questions: QuestionSet, engine: ScoringEngine, renderer: Renderer, max_new_tokens: int, context_length: int
) -> dict[str, Any]:
    """Greedy answers to the questions as a user asks them; those beyond the context are left out and counted."""
    rows = [row for row in questions.rows if isinstance(row, ExactAnswer | Instructions)]
    prompts = [renderer.prompt_ids([{"role": "user", "content": row.prompt}], []) for row in rows]
    fitting = [i for i, prompt in enumerate(prompts) if len(prompt) + max_new_tokens <= context_length]
    greedy = Sampling(temperature=0.0, max_new_tokens=max_new_tokens)
    groups = engine.generate([prompts[i] for i in fitting], greedy, 1, [0] * len(fitting)) if fitting else []
    right, followed, wanted, cut = [], 0, 0, 0
    for i, (completion,) in zip(fitting, groups, strict=True):
        row, text = rows[i], _answer(renderer, completion.token_ids)
        cut += completion.finish_reason == "length"
        if isinstance(row, Instructions):
            done, count = kept(text, row)
            followed, wanted = followed + done, wanted + count
            right.append(done == count)
        else:
            right.append(answered(text, row.answer))
    result = _accuracy(questions.name, right)
    result |= {"truncated": cut, "left_out": questions.left_out + len(rows) - len(fitting)}
    if wanted:
        result["instructions_followed"] = followed / wanted
    return result


def _answer(renderer: Renderer, ids: Sequence[int]) -> str:
    """What follows the thinking: nothing where that was cut, whatever number it happens to name."""
    return split_thinking_text(renderer.whole_text(ids))[1].strip()


def _accuracy(name: str, right: Sequence[bool]) -> dict[str, Any]:
    return {
        "name": name,
        "accuracy": sum(right) / len(right) if right else None,
        "ci": list(wilson(sum(right), len(right))),
        "n": len(right),
        "per_task": {str(i): float(r) for i, r in enumerate(right)},
    }
