"""A policy small enough to be differentiated by hand: logits of a row are a function of its token and its depth.

It runs prefix trees as the real one does (micro-batches, data-parallel ranks), so that losses can be shown not to
depend on how a batch is cut. `batch_of` makes scored rollouts that share prefixes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pivotrl.config import Algorithm
from pivotrl.generation.engine import Completion
from pivotrl.models.dims import Dims
from pivotrl.policy.prefix_tree import PrefixTree, TokenSequence, build_tree, schedule
from pivotrl.rollouts import Rollout
from pivotrl.training.batch import Batch, make_batch
from pivotrl.trajectories.schema import Action
from pivotrl.verifiers.base import Verdict

VOCABULARY, DEPTH = 11, 40
DIMS = Dims(layers=2, hidden=8, vocab=VOCABULARY, heads=2, kv_heads=1, head_dim=4, ffn=16)


@dataclass(frozen=True)
class Pairs:
    sequence: Tensor  # [P]
    offset: Tensor  # [P]
    tokens: Tensor  # [P]


class ToyPolicy:
    """The parts of MegatronPolicy that `update` uses. `calls` counts forwards without gradient and training steps."""

    dims = DIMS
    model = SimpleNamespace(config=SimpleNamespace(moe_router_topk=2))

    def __init__(self, seed: int = 0, budget: int = 30, ranks: int = 1, rate: float = 0.1) -> None:
        g = torch.Generator().manual_seed(seed)
        self.table = torch.randn(VOCABULARY, VOCABULARY, generator=g).requires_grad_()
        self.depth = torch.randn(DEPTH, VOCABULARY, generator=g).requires_grad_()
        self.start = [p.detach().clone() for p in self.parameters()]
        self.budget, self.ranks, self.rate = budget, ranks, rate
        self.calls = {"logprobs": 0, "train_step": 0}
        self.breaks: set[int] = set()  # training steps (from 0) with a gradient that is no number

    def parameters(self) -> list[Tensor]:
        return [self.table, self.depth]

    def forward(self, tree: PrefixTree, temperature: float) -> tuple[Tensor, Tensor]:
        """(log-probs, entropies) [P] of the pairs of a tree."""
        rows = torch.from_numpy(tree.pair_row)
        at = [torch.from_numpy(x)[rows] for x in (tree.token_ids, tree.position_ids)]
        scores = ((self.table[at[0]] + self.depth[at[1]]) / temperature).log_softmax(-1)  # [P, V]
        picked = scores.gather(1, torch.from_numpy(tree.pair_token)[:, None])[:, 0]
        return picked, -(scores.exp() * scores).sum(-1)

    def microbatches(self, sequences: Sequence[TokenSequence]) -> Iterator[tuple[PrefixTree, Pairs]]:
        for plans in schedule(sequences, self.budget, self.ranks):
            for plan in plans:
                tree = build_tree(sequences, plan)
                yield (
                    tree,
                    Pairs(*(torch.from_numpy(x) for x in (tree.pair_sequence, tree.pair_offset, tree.pair_token))),
                )

    def logprobs(self, sequences: Sequence[TokenSequence], temperature: float) -> list[Tensor]:
        self.calls["logprobs"] += 1
        with torch.no_grad():
            trees = [build_tree([s]) for s in sequences]
            return [self.forward(tree, temperature)[0] for tree in trees]

    def backward(self, sequences: Sequence[TokenSequence], objective: Any, temperature: float) -> dict[str, float]:
        """Gradients into the parameters; metrics combined as the real policy does."""
        for p in self.parameters():
            p.grad = torch.zeros_like(p)
        sums: dict[str, float] = {"tokens_total": 0.0, "tokens_unique": 0.0}
        for tree, pairs in self.microbatches(sequences):
            if not len(tree.pair_row):
                continue
            loss, metrics = objective(*self.forward(tree, temperature), pairs)
            loss.backward()
            sums["tokens_total"] += tree.tokens_total
            sums["tokens_unique"] += tree.tokens_unique
            for name, value in {"loss": loss, **metrics}.items():
                now = float(value.detach())
                before = sums.get(name)
                sums[name] = now if before is None else max(before, now) if name.endswith("_max") else before + now
        return sums

    def train_step(self, sequences: Sequence[TokenSequence], objective: Any, temperature: float) -> dict[str, float]:
        report = self.backward(sequences, objective, temperature)
        norm = float(torch.cat([p.grad.flatten() for p in self.parameters()]).norm())
        if self.calls["train_step"] in self.breaks:
            norm = float("nan")
        self.calls["train_step"] += 1
        skipped = norm != norm or report["loss"] != report["loss"]
        if not skipped:
            with torch.no_grad():
                for p in self.parameters():
                    p -= self.rate * p.grad
        return {**report, "grad_norm": norm, "learning_rate": self.rate, "skipped": float(skipped)}

    @contextmanager
    def reference(self) -> Iterator[None]:
        trained = [p.data for p in self.parameters()]
        for p, initial in zip(self.parameters(), self.start, strict=True):
            p.data = initial
        yield
        for p, data in zip(self.parameters(), trained, strict=True):
            p.data = data


def rollout(turn: str, index: int, tokens: Sequence[int], reward: float | None, **changes: Any) -> Rollout:
    logprobs = changes.get("logprobs", tuple(-0.1 * (1 + t % 7) - 0.05 * index for t in tokens))
    completion = Completion(tuple(tokens), tuple(logprobs), changes.get("finish", "stop"), changes.get("version", 0))
    action = Action(text="x", problems=tuple(changes.get("problems", ())))
    return Rollout(turn, index, 5, completion, action, Verdict(reward, "match" if reward else "other"))


def state(prompt: Sequence[int]) -> Any:
    return SimpleNamespace(prompt_ids=tuple(prompt))


def batch_of(rewards: Sequence[Sequence[float | None]], algorithm: Algorithm | None = None, seed: int = 5) -> Batch:
    """Groups of random actions of 2 to 6 tokens, one for each list of rewards; prompts share a prefix."""
    g = torch.Generator().manual_seed(seed)

    def draw(n: int) -> list[int]:
        return torch.randint(0, VOCABULARY, (n,), generator=g).tolist()

    system = draw(4)
    states = [state(system + draw(2 + i)) for i in range(len(rewards))]
    groups = [
        [rollout(f"t#{k}", i, draw(2 + (3 * i + k) % 5), reward) for i, reward in enumerate(row)]
        for k, row in enumerate(rewards)
    ]
    return make_batch(states, groups, algorithm or Algorithm())
