"""Sides of benchmarks.prefix_tree that run on this package: tree, flat (the same trainer, nothing shared) and sft."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.prefix_tree_work import Setting, Shape, advantages, answer, draw, memory_megabytes, requests, timed
from pivotrl.config import Algorithm, Optimizer, Parallel, Precision
from pivotrl.policy.policy import MegatronPolicy
from pivotrl.policy.prefix_tree import Chain, PrefixTree, TokenSequence, build_tree
from pivotrl.training.objective import FlatStreams, GrpoObjective, SftObjective


def side_by_side(sequences: Sequence[TokenSequence], indices: Sequence[int], multiple_of: int = 1) -> PrefixTree:
    """Sequences in one row of tokens that share nothing: packing, as trainers without trees do it."""
    parts = [build_tree(sequences, [i]) for i in sorted(indices)]
    rows = sum(len(p.token_ids) for p in parts)
    if padding := -rows % multiple_of if rows else multiple_of:
        parts.append(build_tree(sequences, [], padding))
    starts = np.cumsum([0, *(len(p.token_ids) for p in parts)])[:-1].tolist()

    def joined(field: str, shift: bool = False) -> Any:
        return np.concatenate([getattr(p, field) + (a if shift else 0) for a, p in zip(starts, parts, strict=True)])

    return PrefixTree(
        token_ids=joined("token_ids"),
        position_ids=joined("position_ids"),
        subtree_end=joined("subtree_end", shift=True),
        chains=tuple(  # one a sequence; padding may repeat its chain
            Chain(a + c.start, a + c.end, ()) for a, p in zip(starts, parts, strict=True) for c in p.chains
        ),
        pair_row=joined("pair_row", shift=True),
        pair_token=joined("pair_token"),
        pair_sequence=joined("pair_sequence"),
        pair_offset=joined("pair_offset"),
        tokens_total=sum(p.tokens_total for p in parts),
        tokens_unique=sum(p.tokens_unique for p in parts),
    )


class FlatPolicy(MegatronPolicy):
    """The policy with sequences packed first-fit, longest first, into the micro-batch budget."""

    def _trees(self, sequences: Sequence[TokenSequence]) -> list[PrefixTree]:
        assert self.settings is not None
        bins: list[list[int]] = []
        for i in sorted(range(len(sequences)), key=lambda i: -len(sequences[i].token_ids)):
            tokens = len(sequences[i].token_ids)
            for batch in bins:
                used = sum(len(sequences[j].token_ids) for j in batch)
                if used + tokens <= self.settings.tokens_per_microbatch:
                    batch.append(i)
                    break
            else:
                bins.append([i])
        return [side_by_side(sequences, batch) for batch in bins]


def grpo(shape: Shape, vocabulary: int) -> tuple[list[TokenSequence], GrpoObjective]:
    """All actions of all pivots, with token-mean weights; strictly on-policy."""
    trunk, actions = draw(shape, vocabulary)
    sequences = [
        TokenSequence.of(trunk[:depth], a) for depth, g in zip(shape.depths(), actions, strict=True) for a in g
    ]
    count = len(sequences)
    weights = torch.full((count,), 1.0 / (count * shape.action))
    generator: Tensor = torch.full((count * shape.action,), -10.0)  # enters a metric only
    return sequences, GrpoObjective(
        algorithm=Algorithm(kl_beta=0.0, importance_correction="none"),
        streams=FlatStreams([shape.action] * count),
        advantages=torch.tensor(advantages(shape.group) * shape.pivots),
        weights=weights,
        generator=generator,
    )


def sft(shape: Shape, vocabulary: int) -> tuple[list[TokenSequence], SftObjective]:
    """The trajectory by itself, every token of it a target."""
    trunk, _ = draw(shape, vocabulary)
    return [TokenSequence(tuple(trunk), tuple(range(1, len(trunk))))], SftObjective(
        torch.full((1,), 1.0 / max(1, len(trunk) - 1))
    )


def main(side: str, setting: Setting) -> None:
    before = memory_megabytes()
    policy = (FlatPolicy if side == "flat" else MegatronPolicy).load(
        Path(setting.model),
        Parallel(),
        Precision(policy=setting.dtype),
        Optimizer(1e-6, tokens_per_microbatch=setting.tokens_per_microbatch, recompute=setting.recompute),
        max_length=8192,
        total_steps=1000,
        seed=0,
    )
    answer(imports_mb=round(before, 1))
    for shape in requests():
        sequences, objective = (sft if side == "sft" else grpo)(shape, setting.vocabulary)

        def step(sequences: Any = sequences, objective: Any = objective) -> dict[str, float]:
            report = policy.train_step(sequences, objective, 1.0)
            return {k: report[k] for k in ("grad_norm", "tokens_unique", "tokens_total")}

        timed(step)


if __name__ == "__main__":
    main(sys.argv[1], Setting(**json.loads(sys.argv[2])))
