"""Measures drift with the evaluation's engine: what pi_0 said once, scored by every policy (evaluation/drift.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pivotrl.config import Config
from pivotrl.evaluation.drift import kl_to_start, order_preserved, split_by_verdict
from pivotrl.evaluation.out_of_domain import ScoringEngine
from pivotrl.evaluation.questions import MultipleChoice, QuestionSet
from pivotrl.local_rollouts import seed_for
from pivotrl.profiling.sampled import read_sampled
from pivotrl.setup import Workbench

Scored = list[list[float]]


class DriftProbe:
    """Built while the engine holds pi_0: samples its answers to unrelated prompts and scores all that is compared."""

    def __init__(
        self, cfg: Config, run_dir: Path, bench: Workbench, engine: ScoringEngine, sets: Sequence[QuestionSet]
    ) -> None:
        self.engine, self.bench = engine, bench
        self.limit, self.room = cfg.evaluate.drift, cfg.model.context_length
        self.unrelated = self._unrelated(sets, cfg.seed)
        self.choices = self._choices(sets)
        self.rollouts = read_sampled(run_dir, bench.renderer, 4 * self.limit, cfg.seed)
        self.start = {name: self._score(pairs) for name, pairs in self._texts().items()}

    def measure(self) -> dict[str, Any]:
        """KL to pi_0 per token, and how candidates kept their order, for the policy that the engine holds now."""
        ours = {name: self._score(pairs) for name, pairs in self._texts().items()}
        result: dict[str, Any] = {}
        for name in ("unrelated", "in_domain"):
            if ours[name]:
                result[f"kl_{name}"] = kl_to_start(ours[name], self.start[name])
        if self.choices:
            sums = [(math.fsum(a), math.fsum(b)) for a, b in zip(ours["choices"], self.start["choices"], strict=True)]
            groups: dict[int, list[tuple[float, float]]] = {}
            for (group, _, _), pair in zip(self.choices, sums, strict=True):
                groups.setdefault(group, []).append(pair)
            result["order_choices"] = order_preserved(groups.values())
        candidates = (
            (r.turn_id, r.token_ids, r.reward == 1.0, math.fsum(a), math.fsum(b))
            for r, a, b in zip(self.rollouts, ours["in_domain"], self.start["in_domain"], strict=True)
            if r.reward in (0.0, 1.0)
        )
        for name, cells in split_by_verdict(candidates).items():
            result[f"order_{name}"] = order_preserved(cells)
        return result

    def _texts(self) -> dict[str, list[tuple[Sequence[int], Sequence[int]]]]:
        """(prompt, continuation) of everything that is scored."""
        return {
            "unrelated": list(self.unrelated),
            "choices": [(prompt, ending) for _, prompt, ending in self.choices],
            "in_domain": [(r.prompt_ids, r.token_ids) for r in self.rollouts],
        }

    def _score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Scored:
        return self.engine.score([p for p, _ in pairs], [c for _, c in pairs]) if pairs else []

    def _unrelated(self, sets: Sequence[QuestionSet], seed: int) -> list[tuple[Sequence[int], Sequence[int]]]:
        """Prompts of all sets in turn, and what pi_0 sampled for each."""
        columns = [[_prompt(row) for row in s.rows[: self.limit]] for s in sets]
        texts = [column[i] for i in range(self.limit) for column in columns if i < len(column)][: self.limit]
        sampling = replace(self.bench.sampling, temperature=1.0, top_p=1.0, top_k=0)
        prompts = [self.bench.renderer.prompt_ids([{"role": "user", "content": text}], []) for text in texts]
        prompts = [p for p in prompts if len(p) + sampling.max_new_tokens < self.room]
        seeds = [seed_for(seed, "drift", i) for i in range(len(prompts))]
        groups = self.engine.generate(prompts, sampling, 1, seeds) if prompts else []
        return [(p, c.token_ids) for p, (c,) in zip(prompts, groups, strict=True)]

    def _choices(self, sets: Sequence[QuestionSet]) -> list[tuple[int, list[int], list[int]]]:
        """(question, prompt, ending) of every ending of the first multiple-choice questions."""
        encode = self.bench.renderer.encode
        rows = [row for s in sets for row in s.rows if isinstance(row, MultipleChoice)][: self.limit]
        return [(i, encode(row.context), encode(f" {ending}")) for i, row in enumerate(rows) for ending in row.endings]


def _prompt(row: Any) -> str:
    return row.context if isinstance(row, MultipleChoice) else row.prompt
