"""The losses: clipped policy gradient with KL to pi_0, and SFT. Pure torch; knows no engine and no parallel layout.

A loss is a sum over target tokens of `weight * term`. The weights, made once from the *global* batch, hold its one
denominator: micro-batches, packing, order, data parallelism and prefix sharing cannot change it (design idea 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pivotrl.policy.policy import PairBatch

LOG_RATIO_LIMIT = 20.0  # exp stays finite in float32; such a token is clipped anyway


def token_weights(lengths: Sequence[int], aggregation: str) -> list[float]:
    """The weight of each token of a sequence of `lengths[i]` target tokens, over the whole batch of one step.

    token_mean: 1 / all tokens (DAPO, token level); sequence_mean: 1 / (sequences * length), GRPO as printed;
    sequence_sum: 1 / sequences. `lengths` are those of every sequence that counts in the denominator.
    """
    count, total = len(lengths), sum(lengths)
    if aggregation == "token_mean":
        return [1.0 / total] * count
    if aggregation == "sequence_mean":
        return [1.0 / (count * length) for length in lengths]
    if aggregation == "sequence_sum":
        return [1.0 / count] * count
    raise ValueError(f"unknown aggregation {aggregation!r}")


def kl_terms(logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """Per-token estimate of KL(pi || pi_0) from samples of pi (k1, k2, k3: Schulman 2020). Shapes [P]."""
    log_ratio = (reference - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    if estimator == "k3":
        return log_ratio.exp() - log_ratio - 1.0
    raise ValueError(f"unknown KL estimator {estimator!r}")


class FlatStreams:
    """Per-token values of every sequence, laid end to end; looked up for the (sequence, offset) pairs of a tree."""

    def __init__(self, lengths: Sequence[int]):
        starts = torch.zeros(len(lengths), dtype=torch.long)
        starts[1:] = torch.tensor(lengths[:-1], dtype=torch.long).cumsum(0) if len(lengths) > 1 else starts[1:]
        self.starts = starts  # [N]

    @staticmethod
    def flatten(rows: Sequence[Sequence[float]]) -> Tensor:
        return torch.tensor([value for row in rows for value in row], dtype=torch.float32)  # [all tokens]

    def positions(self, pairs: PairBatch) -> Tensor:
        return self.starts.to(pairs.sequence.device)[pairs.sequence] + pairs.offset  # [P]


@dataclass
class SftObjective:
    """Mean negative log-likelihood of the demonstrated actions, one weight a sequence."""

    weights: Tensor  # [N]

    def __call__(self, logprobs: Tensor, entropy: Tensor, pairs: PairBatch) -> tuple[Tensor, dict[str, Tensor]]:
        weight = self.weights.to(logprobs.device)[pairs.sequence]  # [P]
        loss = -(weight * logprobs).sum()
        return loss, {"target_tokens": torch.ones_like(logprobs).sum()}


@dataclass
class GrpoObjective:
    """Clipped surrogate of method.md 1.3 (eq. 7), token-level ratios.

    Shapes: N sequences, T target tokens of all of them laid end to end (`streams`).
    """

    streams: FlatStreams
    advantages: Tensor  # [N]
    weights: Tensor  # [N]
    generator: Tensor  # [T] log-probs under the engine that sampled
    old: Tensor | None  # [T] trainer's log-probs before this batch's first update; None: strictly on-policy (ratio 1)
    reference: Tensor | None  # [T] log-probs under pi_0; None when kl_beta is 0
    clip_low: float
    clip_high: float
    kl_beta: float
    kl_estimator: str
    importance_cap: float | None  # truncated importance sampling against the generator; None: off

    def __call__(self, logprobs: Tensor, entropy: Tensor, pairs: PairBatch) -> tuple[Tensor, dict[str, Tensor]]:
        at = self.streams.positions(pairs)  # [P]
        advantage = self.advantages[pairs.sequence]
        weight = self.weights[pairs.sequence]
        current = logprobs.detach()
        old = self.old[at] if self.old is not None else current
        ratio = (logprobs - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        clipped = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        surrogate = torch.minimum(ratio * advantage, clipped * advantage)
        generator = self.generator[at]
        mismatch = current - generator
        if self.importance_cap is not None:
            truncated = (old - generator).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=self.importance_cap)
            surrogate = surrogate * truncated
        loss = -(weight * surrogate).sum()
        metrics = {
            "target_tokens": torch.ones_like(current).sum(),
            "clipped_tokens": (ratio.detach() * advantage > clipped.detach() * advantage).float().sum(),
            "entropy_sum": entropy.detach().sum(),
            "mismatch_abs_sum": mismatch.abs().sum(),
            "mismatch_k3_sum": (mismatch.exp() - mismatch - 1.0).sum(),
        }
        if self.reference is not None:
            kl = kl_terms(logprobs, self.reference[at], self.kl_estimator)
            loss = loss + self.kl_beta * (weight * kl).sum()
            metrics["kl_sum"] = kl.detach().sum()
        return loss, metrics
