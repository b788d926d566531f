"""The update of one training step: what pi_0 and the old policy say, then one optimiser step a mini-batch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from pivotrl.config import Algorithm, Config
from pivotrl.training import batch as batches
from pivotrl.training.batch import Batch, Sample, Scored
from pivotrl.training.gate import Mismatch, TokenGap, require_agreement, worst_tokens
from pivotrl.training.metrics import StepSums
from pivotrl.training.nonfinite import NonFiniteSteps, suspects
from pivotrl.training.objective import Gaps, dpo_terms
from pivotrl.training.theory_metrics import group_theory, reference_theory
from pivotrl.training.throughput import Work, memory

if TYPE_CHECKING:
    from pivotrl.policy.policy import MegatronPolicy, Objective


def optimizer_steps(a: Algorithm) -> int:
    """Optimiser steps of one training step."""
    return a.epochs * a.minibatches


def needs_reference(a: Algorithm) -> bool:
    """Whether pi_0's weights are kept."""
    return a.kl_beta > 0 or a.loss == "dpo" or a.reference_every > 0


def _reference_now(a: Algorithm, step: int) -> bool:
    return a.kl_beta > 0 or a.loss == "dpo" or (a.reference_every > 0 and step % a.reference_every == 0)


@dataclass
class _Updater:
    """One call of `update`: the batch and what is gathered while it is worked off."""

    policy: MegatronPolicy
    rollouts: Sequence[Scored]
    cfg: Config
    step: int
    nonfinite: NonFiniteSteps
    work: Work
    sums: StepSums = field(default_factory=StepSums)
    seconds: dict[str, float] = field(default_factory=dict)
    old: list[Tensor] | None = None
    reference: list[Tensor] | None = None
    gaps: list[tuple[Gaps, list[str]]] = field(default_factory=list)  # of each optimiser step, with its rollouts

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        clock = time.monotonic()
        yield
        key = f"seconds_{name}"
        self.seconds[key] = self.seconds.get(key, 0.0) + time.monotonic() - clock

    def logprobs(self, rollouts: Sequence[Scored], phase: str) -> list[Tensor]:
        sequences = [r.sequence for r in rollouts]
        with self.phase(phase):
            found = self.policy.logprobs(sequences, self.cfg.sampling.temperature)
        self.work.forward(sequences)
        return found

    def train(self, samples: Sequence[Sample], objective: Objective, streams: Sequence[Sequence[Tensor]]) -> None:
        """One optimiser step; a non-finite one is counted with its samples (`streams[k][i]` is of sample i)."""
        sequences = [s.rollout.sequence for s in samples]
        with self.phase("train"):
            stats = self.policy.train_step(sequences, objective, self.cfg.sampling.temperature)
        self.work.train(stats["tokens_unique"], stats["target_tokens"])
        self.sums.add(stats)
        if stats["skipped"]:
            ids = [s.rollout.id for s in samples]
            now = self.logprobs([s.rollout for s in samples], "train")
            self.nonfinite.record(self.step, stats, ids, suspects(ids, [now, *streams]))

    def policy_gradient(self, indices: Sequence[int], penalties: Sequence[float] | None) -> None:
        a = self.cfg.algorithm
        samples = batches.make_samples(self.rollouts, indices, a, self.cfg.sampling.max_new_tokens, penalties)
        if samples:
            objective = batches.make_objective(samples, a, self.old, self.reference)
            given = [stream for stream in (self.old, self.reference) if stream is not None]
            self.train(samples, objective, [[stream[s.index] for s in samples] for stream in given])
            self.gaps.append((objective.gaps, [s.rollout.id for s in samples]))

    def require_agreement(self, metrics: dict[str, float], limit: float) -> None:
        """Every rank calls it with the same metrics; the worst tokens of all of them are shown."""
        worst: list[TokenGap] = []
        if not metrics["mismatch_abs"] <= limit:
            worst += [gap for gaps, names in self.gaps for gap in gaps.worst(names)]
            if dist.is_initialized() and dist.get_world_size() > 1:
                everyone: list[list[TokenGap]] = [[] for _ in range(dist.get_world_size())]
                dist.all_gather_object(everyone, worst)
                worst = list(dict.fromkeys(gap for gaps in everyone for gap in gaps))
        found = Mismatch(metrics["mismatch_abs"], metrics["mismatch_max"], worst_tokens(worst))
        require_agreement(found, limit, f"at step {self.step}")

    def dpo(self, indices: Sequence[int]) -> None:
        samples, pairs = batches.preference_samples(self.rollouts, indices)
        if not pairs:
            return
        assert self.reference is not None
        reference = [self.reference[s.index] for s in samples]
        now = self.logprobs([s.rollout for s in samples], "old")
        sums = [torch.stack([x.sum() for x in rows]) for rows in (now, reference)]
        terms = dpo_terms(sums[0], sums[1], pairs, self.cfg.algorithm.dpo_beta)
        objective = batches.make_dpo_objective(samples, terms, self.old, self.reference)
        self.train(samples, objective, [now, reference])
        self.gaps.append((objective.gaps, [s.rollout.id for s in samples]))
        self.sums.note("dpo_accuracy", terms.accuracy)
        self.sums.note("dpo_margin", terms.margin)
        self.sums.note("dpo_pairs", float(len(pairs)))


def update(
    policy: MegatronPolicy,
    batch: Batch,
    cfg: Config,
    step: int,
    nonfinite: NonFiniteSteps,
    mismatch_limit: float | None = None,
) -> tuple[dict[str, float], bool]:
    """Train on a batch, and say whether the weights changed. Every rank calls it with the same batch.

    With one optimiser step a batch the old log-probs are the current ones: no second forward. `optimizer_steps` of the
    metrics counts steps that were taken; it is 0 (`skipped` = 1) where no rollout had any signal, and a schedule does
    not move then. `nonfinite` counts steps that were computed and not taken.
    Raises NonFiniteError when there were too many of those, and MismatchError where trainer and engine, with the
    weights that sampled, differ by more than `mismatch_limit` on average.
    """
    a, rollouts = cfg.algorithm, batch.rollouts
    u = _Updater(policy, rollouts, cfg, step, nonfinite, Work.of(policy))
    metrics = group_theory(rollouts)
    penalties = None
    if rollouts and _reference_now(a, step):
        with policy.reference():
            u.reference = u.logprobs(rollouts, "reference")
        metrics |= reference_theory(rollouts, [float(t.sum()) for t in u.reference], a.kl_beta)
        if a.kl_beta > 0 and a.kl_in == "reward":
            penalties = batches.kl_penalties(rollouts, u.reference, a.kl_beta, a.kl_estimator)
            metrics["kl_reward"] = -sum(penalties) / len(penalties)
    if optimizer_steps(a) > 1 and rollouts:
        u.old = u.logprobs(rollouts, "old")
    for epoch in range(a.epochs):
        for indices in batches.minibatches(rollouts, a.minibatches, cfg.seed, step, epoch):
            if a.loss == "dpo":
                u.dpo(indices)
            else:
                u.policy_gradient(indices, penalties)
    metrics |= u.sums.finish() | u.seconds | memory()
    if mismatch_limit is not None and "mismatch_abs" in metrics and not metrics["nonfinite"]:
        u.require_agreement(metrics, mismatch_limit)
    metrics |= u.work.mfu(sum(u.seconds.values()), cfg.precision)
    if (seconds := u.seconds.get("seconds_train", 0.0)) > 0:
        metrics["train_tokens_per_second"] = metrics["tokens_unique"] / seconds
    return metrics, u.sums.taken > 0
