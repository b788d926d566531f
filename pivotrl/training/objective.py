"""The losses: policy gradient with its options, DPO on pairs of a group, SFT. Pure torch; knows no engine, no layout.

A loss is a sum over target tokens of `weight * term`. The weights, made once from the *global* batch of an optimiser
step, hold its one denominator: micro-batches, packing, order, data parallelism and prefix sharing cannot change it
(design idea 3). Metrics are sums over tokens (`..._sum`) or maxima (`..._max`), so they reduce exactly, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from pivotrl.config import Algorithm
from pivotrl.training.gate import WORST_TOKENS, TokenGap, worst_tokens
from pivotrl.training.surrogate import Actions, importance, kl_terms, policy_ratio, surrogate

if TYPE_CHECKING:
    from pivotrl.policy.policy import PairBatch

AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "constant_length", "group_mean")


def token_weights(
    lengths: Sequence[int], aggregation: str, groups: Sequence[int] | None = None, constant: int | None = None
) -> list[float]:
    """The weight of each token of a sequence of `lengths[i]` target tokens, over the whole batch of one step.

    token_mean: 1 / all tokens (DAPO); sequence_mean: 1 / (sequences * length), GRPO as printed; sequence_sum:
    1 / sequences; constant_length: 1 / (sequences * constant), Dr.GRPO; group_mean: 1 / (groups * tokens of the group).
    `lengths` (> 0) are those of every sequence that counts in the denominator, `groups[i]` is the group's id.
    """
    count, total = len(lengths), sum(lengths)
    if aggregation == "token_mean":
        return [1.0 / total] * count
    if aggregation == "sequence_mean":
        return [1.0 / (count * length) for length in lengths]
    if aggregation == "sequence_sum":
        return [1.0 / count] * count
    if aggregation == "constant_length":
        if constant is None:
            raise ValueError("constant_length needs the constant")
        return [1.0 / (count * constant)] * count
    if aggregation == "group_mean":
        if groups is None:
            raise ValueError("group_mean needs the group of every sequence")
        tokens: dict[int, int] = {}
        for group, length in zip(groups, lengths, strict=True):
            tokens[group] = tokens.get(group, 0) + length
        return [1.0 / (len(tokens) * tokens[group]) for group in groups]
    raise ValueError(f"unknown aggregation {aggregation!r}")


class FlatStreams:
    """Per-token values of every sequence, laid end to end; looked up for the (sequence, offset) pairs of a tree."""

    def __init__(self, lengths: Sequence[int]):
        self.lengths = torch.tensor(lengths, dtype=torch.long)  # [N]
        self.starts = self.lengths.cumsum(0) - self.lengths  # [N]

    @staticmethod
    def flatten(rows: Sequence[Sequence[float]]) -> Tensor:
        return torch.tensor([value for row in rows for value in row], dtype=torch.float32)  # [all tokens]

    def positions(self, pairs: PairBatch) -> Tensor:
        return self.starts.to(pairs.sequence.device)[pairs.sequence] + pairs.offset  # [P]


def _token_metrics(current: Tensor, entropy: Tensor, mismatch: Tensor) -> dict[str, Tensor]:
    """Of fixed definition (field report B13), by token; `mismatch` is trainer - engine, on the weights that sampled."""
    return {
        "target_tokens": torch.ones_like(current).sum(),
        "entropy_sum": entropy.detach().sum(),
        "mismatch_abs_sum": mismatch.abs().sum(),
        "mismatch_max": mismatch.abs().max(),
        "mismatch_k3_sum": kl_terms(torch.zeros_like(mismatch), mismatch, "k3").sum(),
    }


class Gaps:
    """The tokens of each micro-batch on which trainer and engine differ most, for the message of the mismatch gate."""

    def __init__(self) -> None:
        self._rows: list[tuple[Tensor, ...]] = []  # left on the device: to read them would wait for it

    def note(self, pairs: PairBatch, trainer: Tensor, engine: Tensor) -> None:
        """Log-probs [P] of a micro-batch, on the weights that sampled."""
        worst = (trainer - engine).abs().topk(min(WORST_TOKENS, len(trainer))).indices
        self._rows.append(tuple(t[worst] for t in (pairs.sequence, pairs.offset, trainer, engine)))

    def worst(self, names: Sequence[str]) -> tuple[TokenGap, ...]:
        """The largest of this rank so far, largest first; `names` are those of the sequences."""
        rows = [row for group in self._rows for row in zip(*(t.tolist() for t in group), strict=True)]
        return worst_tokens(TokenGap(names[i], offset, t, e) for i, offset, t, e in rows)


@dataclass
class SftObjective:
    """Negative log-likelihood of the demonstrated actions, one weight a sequence."""

    weights: Tensor  # [N]

    def __call__(self, logprobs: Tensor, entropy: Tensor, pairs: PairBatch) -> tuple[Tensor, dict[str, Tensor]]:
        weight = self.weights.to(logprobs.device)[pairs.sequence]  # [P]
        loss = -(weight * logprobs).sum()
        metrics = {"target_tokens": torch.ones_like(logprobs).sum(), "entropy_sum": entropy.detach().sum()}
        return loss, metrics


@dataclass
class GrpoObjective:
    """Surrogate, KL to pi_0 and entropy bonus, as the options of `algorithm` compose them (docs/algorithms.md).

    Shapes: N sequences, T target tokens of all of them laid end to end (`streams`).
    """

    algorithm: Algorithm
    streams: FlatStreams
    advantages: Tensor  # [N]
    weights: Tensor  # [N]
    generator: Tensor  # [T] log-probs under the engine that sampled
    old: Tensor | None = None  # [T] trainer's, before this batch's first update; None: strictly on-policy (ratio 1)
    reference: Tensor | None = None  # [T] log-probs under pi_0; needed for a KL term, measured where given
    gaps: Gaps = field(default_factory=Gaps, repr=False, compare=False)

    def __call__(self, logprobs: Tensor, entropy: Tensor, pairs: PairBatch) -> tuple[Tensor, dict[str, Tensor]]:
        a, device = self.algorithm, logprobs.device
        at = self.streams.positions(pairs)  # [P]
        advantage = self.advantages.to(device)[pairs.sequence]
        weight = self.weights.to(device)[pairs.sequence]
        actions = Actions.of(pairs.sequence, self.streams.lengths.to(device))
        current = logprobs.detach()
        old = self.old.to(device)[at] if self.old is not None else current
        engine = self.generator.to(device)[at]
        mismatch = old - engine
        self.gaps.note(pairs, old, engine)
        correction = importance(mismatch, a, actions)
        ratio = policy_ratio(logprobs - old, a.ratio, actions)
        s = surrogate(logprobs, ratio, advantage, a)
        term = -s.value * correction.weight
        if a.entropy_bonus:
            term = term - a.entropy_bonus * entropy
        metrics = _token_metrics(current, entropy, mismatch)
        metrics |= {
            "clip_low_fraction_sum": (s.low & correction.keep).float().sum(),
            "clip_high_fraction_sum": (s.high & correction.keep).float().sum(),
            "importance_sum": correction.raw.sum(),
            "importance_square_sum": correction.raw.square().sum(),
            "importance_max": correction.raw.max(),
        }
        if a.dual_clip is not None:
            metrics["dual_clip_fraction_sum"] = (s.dual & correction.keep).float().sum()
        if a.importance_correction != "none" or a.sequence_mismatch_limit is not None:
            effective = correction.weight * correction.keep
            metrics["importance_effective_sum"] = effective.sum()
            metrics["importance_effective_max"] = effective.max()
            metrics["importance_clamped_sum"] = (correction.keep & (correction.weight != correction.raw)).float().sum()
            metrics["importance_masked_sum"] = (~correction.keep).float().sum()
        if self.old is not None:
            metrics["update_kl_sum"] = kl_terms(current, old, "k3").sum()
        if self.reference is not None:
            reference = self.reference.to(device)[at]
            metrics["kl_sum"] = kl_terms(current, reference, "k3").sum()
            if a.kl_beta > 0 and a.kl_in == "loss":
                kl = kl_terms(logprobs, reference, a.kl_estimator, old)
                if a.kl_estimator == "unbiased":  # over the policy that sampled, as the surrogate
                    kl = kl * correction.weight
                term = term + a.kl_beta * kl
                metrics["kl_term_sum"] = kl.detach().sum()
        loss = (weight * torch.where(correction.keep, term, 0.0)).sum()
        return loss, metrics


@dataclass(frozen=True)
class Preference:
    """Of a group: `winner` scored above `loser`. Numbers of sequences, and the pair's share of the loss."""

    winner: int
    loser: int
    weight: float


def preferences(rewards: Sequence[float], groups: Sequence[int]) -> list[Preference]:
    """Every pair of unlike reward within a group. Mixed groups weigh alike: G/2 successes make the most pairs."""
    members: dict[int, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    by_group = [[(w, x) for w in rows for x in rows if rewards[w] > rewards[x]] for rows in members.values()]
    mixed = [pairs for pairs in by_group if pairs]
    return [Preference(w, x, 1.0 / (len(mixed) * len(pairs))) for pairs in mixed for w, x in pairs]


@dataclass(frozen=True)
class DpoTerms:
    """The DPO loss as a function of each action's log-prob, at the present weights."""

    shares: Tensor  # [N] parts of the loss; they sum to it
    slopes: Tensor  # [N] d loss / d log-prob of the action
    accuracy: float  # share of pairs whose implicit reward has the right order
    margin: float  # mean difference of the implicit rewards


def dpo_terms(logprobs: Tensor, reference: Tensor, pairs: Sequence[Preference], beta: float) -> DpoTerms:
    """-log sigmoid(beta (log pi/pi_0 (winner) - log pi/pi_0 (loser))), weighted (arXiv 2305.18290).

    Args: logprobs, reference [N], sums over the tokens of each action. Raises ValueError without a pair.
    """
    if not pairs:
        raise ValueError("dpo_terms: no pair")
    winners, losers = (torch.tensor(x) for x in ([p.winner for p in pairs], [p.loser for p in pairs]))
    weights = torch.tensor([p.weight for p in pairs], dtype=torch.float64)
    implicit = beta * (logprobs.double() - reference.double())
    margins = implicit[winners] - implicit[losers]
    losses = -weights * F.logsigmoid(margins)
    slope = -beta * weights * torch.sigmoid(-margins)  # of the winner; the loser's is its negative
    zeros = torch.zeros(len(logprobs), dtype=torch.float64)
    return DpoTerms(
        shares=zeros.index_add(0, winners, losses).float(),
        slopes=zeros.index_add(0, winners, slope).index_add(0, losers, -slope).float(),
        accuracy=float((weights * (margins > 0)).sum() / weights.sum()),
        margin=float((weights * margins).sum() / weights.sum()),
    )


@dataclass
class DpoObjective:
    """DPO whose pairs may lie in different micro-batches and ranks.

    The loss couples two actions. Its slopes are taken from log-probs at the present weights, computed beforehand;
    with these the loss is linear in the log-probs, and its gradient here is exactly that of the pairs.
    """

    streams: FlatStreams
    terms: DpoTerms
    reference: Tensor  # [T]
    generator: Tensor  # [T] as in GrpoObjective, likewise `old`
    old: Tensor | None = None
    gaps: Gaps = field(default_factory=Gaps, repr=False, compare=False)

    def __call__(self, logprobs: Tensor, entropy: Tensor, pairs: PairBatch) -> tuple[Tensor, dict[str, Tensor]]:
        current, device = logprobs.detach(), logprobs.device
        share = (self.terms.shares / self.streams.lengths).to(device)[pairs.sequence]  # [P]
        slope = self.terms.slopes.to(device)[pairs.sequence]
        loss = (share + slope * (logprobs - current)).sum()
        at = self.streams.positions(pairs)
        old = self.old.to(device)[at] if self.old is not None else current
        engine = self.generator.to(device)[at]
        self.gaps.note(pairs, old, engine)
        metrics = _token_metrics(current, entropy, old - engine)
        return loss, metrics | {"kl_sum": kl_terms(current, self.reference.to(device)[at], "k3").sum()}
