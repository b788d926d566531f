"""Groups of rollouts -> the sequences and the objective of one step. Pure but for tensors; group ids, never strides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pivotrl.config import Algorithm
from pivotrl.local_rollouts import State
from pivotrl.policy.prefix_tree import TokenSequence
from pivotrl.rollouts import Rollout
from pivotrl.training.advantages import advantages
from pivotrl.training.objective import FlatStreams, GrpoObjective, token_weights


@dataclass(frozen=True)
class Sample:
    """One scored rollout with its advantage and its share of the loss."""

    sequence: TokenSequence
    logprobs: tuple[float, ...]  # of the generator
    advantage: float
    weight: float  # of each of its target tokens


@dataclass(frozen=True)
class Batch:
    samples: list[Sample]
    metrics: dict[str, float]


def _group_metrics(groups: Sequence[Sequence[Rollout]]) -> dict[str, float]:
    rollouts = [r for group in groups for r in group]
    rewards = [[r.verdict.reward for r in group if r.verdict.reward is not None] for group in groups]
    scored = [group for group in rewards if group]
    flat = [r for group in scored for r in group]
    stds = [float(torch.tensor(group, dtype=torch.float64).std(correction=0)) for group in scored]
    count = len(rollouts)
    return {
        "reward": sum(flat) / len(flat) if flat else float("nan"),
        "group_std": sum(stds) / len(stds) if stds else float("nan"),
        "mixed_groups": sum(max(g) > min(g) for g in scored) / len(groups),
        "unscorable": sum(r.verdict.reward is None for r in rollouts) / count,
        "truncated": sum(r.completion.finish_reason == "length" for r in rollouts) / count,
        "malformed": sum(bool(r.action.problems) for r in rollouts) / count,
        "completion_tokens": sum(len(r.completion.token_ids) for r in rollouts) / count,
    }


def make_batch(states: Sequence[State], groups: Sequence[Sequence[Rollout]], algorithm: Algorithm) -> Batch:
    """Samples of one step from `groups[i]`, the rollouts of `states[i]`.

    Unscorable rollouts are left out, of the denominator too. Rollouts of all-equal groups have advantage 0: they count
    in the denominator, and are not computed when there is no KL term: their gradient is exactly 0 (Proposition 3.1).
    """
    scored: list[tuple[State, Rollout, float]] = []
    for state, group in zip(states, groups, strict=True):
        values = advantages([r.verdict.reward for r in group], algorithm.advantage, algorithm.std_epsilon)
        scored += [(state, r, a) for r, a in zip(group, values, strict=True) if a is not None]
    lengths = [len(r.completion.token_ids) for _, r, _ in scored]
    weights = token_weights(lengths, algorithm.aggregation) if lengths else []
    samples = [
        Sample(TokenSequence.of(state.prompt_ids, r.completion.token_ids), r.completion.logprobs, advantage, weight)
        for (state, r, advantage), weight in zip(scored, weights, strict=True)
        if advantage != 0.0 or algorithm.kl_beta > 0
    ]
    return Batch(samples, _group_metrics(groups))


def make_objective(
    samples: Sequence[Sample], algorithm: Algorithm, old: list[Tensor] | None, reference: list[Tensor] | None
) -> GrpoObjective:
    """The objective over `samples`; `old` and `reference` are per-sample log-probs of the target tokens."""
    lengths = [len(s.sequence.targets) for s in samples]
    return GrpoObjective(
        streams=FlatStreams(lengths),
        advantages=torch.tensor([s.advantage for s in samples], dtype=torch.float32),
        weights=torch.tensor([s.weight for s in samples], dtype=torch.float32),
        generator=FlatStreams.flatten([s.logprobs for s in samples]),
        old=torch.cat(old) if old is not None else None,
        reference=torch.cat(reference) if reference is not None else None,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        kl_beta=algorithm.kl_beta,
        kl_estimator=algorithm.kl_estimator,
        importance_cap=algorithm.importance_cap if algorithm.importance_correction == "truncated" else None,
    )
