"""Per-token terms of the policy losses: ratios, surrogates, KL estimates, importance weights. Pure torch.

Shapes: P target tokens of one micro-batch, the tokens of one action always among them together. `Actions` says which
token is of which action, for what is decided per action (sequence-level ratios and masks).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pivotrl.config import Algorithm

LOG_RATIO_LIMIT = 20.0  # exp stays finite in float32, and a product with a mask is 0, not NaN (field report B10)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp with its argument held within +-LOG_RATIO_LIMIT; NaN stays NaN, so that a broken step shows."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


@dataclass(frozen=True)
class Actions:
    """The actions of a micro-batch: `index[k]` of token k, `counts` tokens of each."""

    index: Tensor  # [P] int64 in [0, A)
    counts: Tensor  # [A] int64

    @classmethod
    def of(cls, sequence: Tensor, lengths: Tensor) -> Actions:
        """Args: sequence [P], the number of each token's sequence; lengths [N], target tokens of every sequence.

        Raises RuntimeError where a micro-batch holds a part of an action only.
        """
        numbers, index, counts = sequence.unique(return_inverse=True, return_counts=True)
        if not torch.equal(counts, lengths.to(counts)[numbers]):
            raise RuntimeError("a micro-batch holds only part of an action, so nothing per action can be computed")
        return cls(index, counts)

    def sum(self, values: Tensor) -> Tensor:
        """[P] -> [P]: each token gets the sum over its action."""
        return values.new_zeros(len(self.counts)).index_add(0, self.index, values)[self.index]

    def mean(self, values: Tensor) -> Tensor:
        return self.sum(values) / self.counts[self.index]


def policy_ratio(log_ratio: Tensor, level: str, actions: Actions) -> Tensor:
    """pi_theta / pi_old [P]: of the token, of the whole action (method.md 1.3), or its geometric mean (GSPO)."""
    if level == "sequence":
        log_ratio = actions.sum(log_ratio)
    elif level == "geometric":
        log_ratio = actions.mean(log_ratio)
    elif level != "token":
        raise ValueError(f"unknown ratio {level!r}")
    return bounded_exp(log_ratio)


@dataclass(frozen=True)
class Surrogate:
    """What is maximised, and where a bound decided it (the gradient is cut there, but for CISPO). All [P]."""

    value: Tensor
    low: Tensor  # bool
    high: Tensor  # bool
    dual: Tensor  # bool


def surrogate(logprobs: Tensor, ratio: Tensor, advantage: Tensor, a: Algorithm) -> Surrogate:
    """The clipped surrogate, min(w A, clip(w) A) with an optional dual clip, or CISPO's sg(clip(w)) A log pi."""
    clipped = ratio.clamp(1.0 - a.clip_low, 1.0 + a.clip_high)
    below, above = ratio < 1.0 - a.clip_low, ratio > 1.0 + a.clip_high
    if a.loss == "cispo":
        moves = advantage != 0
        return Surrogate(clipped.detach() * advantage * logprobs, below & moves, above & moves, torch.zeros_like(below))
    value = torch.minimum(ratio * advantage, clipped * advantage)
    dual = torch.zeros_like(below)
    if a.dual_clip is not None:
        dual = (advantage < 0) & (ratio > a.dual_clip)
        value = torch.where(advantage < 0, torch.maximum(value, a.dual_clip * advantage), value)
    return Surrogate(value, below & (advantage < 0), above & (advantage > 0), dual)


def kl_terms(logprobs: Tensor, reference: Tensor, estimator: str, old: Tensor | None = None) -> Tensor:
    """Per-token estimate [P] of KL(pi || pi_0) from samples of pi (k1, k2, k3: Schulman 2020).

    Under samples of pi the gradient of k1 is zero on average and that of k3 is that of the other KL, KL(pi_0 || pi);
    those of k2 and "unbiased" are that of KL(pi || pi_0). "unbiased" is k3 times pi / pi_old, so that its value too
    holds under samples of an older policy; `old` None means that pi is the policy that sampled.
    """
    log_ratio = (reference - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    k3 = log_ratio.exp() - log_ratio - 1.0
    if estimator == "k3":
        return k3
    if estimator == "unbiased":
        return bounded_exp(logprobs - (logprobs.detach() if old is None else old)) * k3
    raise ValueError(f"unknown KL estimator {estimator!r}")


@dataclass(frozen=True)
class Correction:
    """Importance weights of the trainer's policy against the generator that sampled. All [P], without gradient."""

    raw: Tensor  # trainer / generator
    weight: Tensor  # what multiplies the surrogate
    keep: Tensor  # bool: False takes a token out of the loss (its weight stays in the denominator)


def importance(log_ratio: Tensor, a: Algorithm, actions: Actions) -> Correction:
    """Correction for log_ratio = log pi_old (trainer) - log pi (generator), [P]."""
    raw = bounded_exp(log_ratio)
    out = torch.zeros_like(raw, dtype=torch.bool)  # comparisons with NaN are False: it stays in the loss, and shows
    weight = torch.ones_like(raw)
    kind = a.importance_correction
    if kind in ("truncated", "geometric"):
        weight = raw.clamp(a.importance_floor, a.importance_cap)
    if kind == "masked":
        out = (raw < a.importance_floor) | (raw > a.importance_cap)
        weight = raw
    elif kind == "geometric":
        mean = bounded_exp(actions.mean(log_ratio))
        out = (mean < a.importance_sequence_low) | (mean > a.importance_sequence_high)
    elif kind not in ("none", "truncated"):
        raise ValueError(f"unknown importance correction {kind!r}")
    if a.sequence_mismatch_limit is not None:
        out = out | (actions.mean(log_ratio.abs().exp()) > a.sequence_mismatch_limit)
    return Correction(raw, weight, ~out)
