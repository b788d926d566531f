"""One denominator: loss, gradient and metrics do not depend on micro-batches, ranks, order, or sharing of prefixes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pivotrl.config import Algorithm
from pivotrl.training import batch as batches
from pivotrl.training.advantages import RULES
from pivotrl.training.batch import Batch
from pivotrl.training.objective import AGGREGATIONS, SftObjective, dpo_terms, token_weights
from tests.unit.toy_policy import ToyPolicy, batch_of

REWARDS = [[1, 0, 0, 1], [0.5, 0.5, 0.5, 0.5], [0, 0, 0, 1, None], [1, 1, 0, 0.25]]
OPTIONS: dict[str, dict[str, Any]] = {
    "clip": {"clip_high": 0.28, "dual_clip": 1.5},
    "geometric ratio": {"ratio": "geometric", "clip_low": 0.05, "clip_high": 0.05},
    "cispo": {"loss": "cispo", "clip_low": 1.0, "clip_high": 0.5},
    "kl and entropy": {"kl_beta": 0.1, "kl_estimator": "unbiased", "entropy_bonus": 0.01},
    "geometric correction": {
        "importance_correction": "geometric",
        "importance_cap": 1.2,
        "importance_sequence_low": 0.85,
        "importance_sequence_high": 1.15,
    },
    "dropped groups": {"drop_uniform_groups": True, "kl_beta": 0.1, "importance_correction": "masked"},
}


def streams(batch: Batch, policy: ToyPolicy, shift: float, seed: int) -> list[Tensor]:
    """Log-probs near the policy's, as of an older one."""
    g = torch.Generator().manual_seed(seed)
    now = policy.logprobs([r.sequence for r in batch.rollouts], 0.9)
    return [x + shift * torch.randn(x.shape, generator=g) for x in now]


def run(batch: Batch, a: Algorithm, order: list[int], budget: int, ranks: int) -> tuple[list[Tensor], dict[str, float]]:
    policy = ToyPolicy(budget=budget, ranks=ranks)
    old, reference = streams(batch, policy, 0.3, 1), streams(batch, policy, 0.5, 2)
    samples = batches.make_samples(batch.rollouts, order, a, max_new_tokens=8)
    objective = batches.make_objective(samples, a, old, reference)
    generator = streams(batch, policy, 0.3, 3)
    objective.generator = torch.cat([generator[s.index] for s in samples])
    report = policy.backward([s.rollout.sequence for s in samples], objective, 0.9)
    return [p.grad.clone() for p in policy.parameters()], report


def cuts(count: int) -> list[tuple[list[int], int, int]]:
    """(order, unique tokens of a micro-batch, ranks): a tree of everything, sequences alone, and between."""
    given = list(range(count))
    mixed = [i for k in range(3) for i in given[k::3]]
    return [(given, 1, 1), (given[::-1], 25, 1), (mixed, 18, 2), (mixed[::-1], 40, 3)]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_nothing_depends_on_the_cut(aggregation: str, option: str) -> None:  # field report C1
    for rule in sorted(RULES):
        a = Algorithm(advantage=rule, aggregation=aggregation, **OPTIONS[option])
        batch = batch_of(REWARDS, a)
        whole, report = run(batch, a, list(range(len(batch.rollouts))), 10_000, 1)
        assert sum(g.abs().sum() for g in whole) > 0
        for order, budget, ranks in cuts(len(batch.rollouts)):
            got, other = run(batch, a, order, budget, ranks)
            for x, y in zip(got, whole, strict=True):
                torch.testing.assert_close(x, y, rtol=0, atol=1e-6)
            for name in report:
                if name != "tokens_unique":  # what a cut may change
                    assert other[name] == pytest.approx(report[name], rel=1e-5, abs=1e-6), (rule, name)


def test_the_whole_action_as_printed_does_not_depend_on_the_cut() -> None:
    a = Algorithm(ratio="sequence", aggregation="sequence_mean")
    batch = batch_of(REWARDS, a)
    whole, _ = run(batch, a, list(range(len(batch.rollouts))), 10_000, 1)
    for order, budget, ranks in cuts(len(batch.rollouts)):
        for x, y in zip(run(batch, a, order, budget, ranks)[0], whole, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-6)


def test_a_denominator_of_the_micro_batch_would_be_noticed() -> None:
    """The negative control: weights from each part of the batch give another gradient."""
    a = Algorithm()
    batch = batch_of(REWARDS, a)
    half = len(batch.rollouts) // 2
    whole, _ = run(batch, a, list(range(len(batch.rollouts))), 10_000, 1)
    parts = [run(batch, a, part, 10_000, 1)[0] for part in ([*range(half)], [*range(half, len(batch.rollouts))])]
    assert (parts[0][0] + parts[1][0] - whole[0]).abs().max() > 1e-3


def test_dpo_pairs_may_lie_in_different_micro_batches() -> None:
    batch = batch_of(REWARDS)
    results = []
    for order, budget, ranks in [(list(range(len(batch.rollouts))), 10_000, 1), *cuts(len(batch.rollouts))]:
        policy = ToyPolicy(budget=budget, ranks=ranks)
        reference = streams(batch, policy, 0.5, 2)
        samples, pairs = batches.preference_samples(batch.rollouts, order)
        now = policy.logprobs([s.rollout.sequence for s in samples], 0.9)
        sums = [torch.stack([x.sum() for x in rows]) for rows in (now, [reference[s.index] for s in samples])]
        objective = batches.make_dpo_objective(samples, dpo_terms(*sums, pairs, 0.1), None, reference)
        report = policy.backward([s.rollout.sequence for s in samples], objective, 0.9)
        results.append(([p.grad.clone() for p in policy.parameters()], report["loss"]))
    for gradients, loss in results[1:]:
        assert loss == pytest.approx(results[0][1], rel=1e-5)
        for x, y in zip(gradients, results[0][0], strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-6)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_sft_does_not_depend_on_the_cut(aggregation: str) -> None:
    sequences = [r.sequence for r in batch_of(REWARDS).rollouts]
    objective = SftObjective(torch.tensor(token_weights([len(s.targets) for s in sequences], aggregation)))
    results = []
    for budget, ranks in ((10_000, 1), (1, 1), (20, 2), (30, 3)):
        policy = ToyPolicy(budget=budget, ranks=ranks)
        results.append((policy.backward(sequences, objective, 1.0)["loss"], policy.table.grad.clone()))
    for loss, gradient in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-5)
        torch.testing.assert_close(gradient, results[0][1], rtol=0, atol=1e-6)


def test_part_of_an_action_is_refused() -> None:
    a = Algorithm(ratio="geometric")
    batch = batch_of([[1, 0]], a)
    samples = batches.make_samples(batch.rollouts, [0, 1], a, 8)
    objective = batches.make_objective(samples, a, None, None)
    pairs: Any = type("Pairs", (), {"sequence": torch.tensor([0]), "offset": torch.tensor([0])})
    with pytest.raises(RuntimeError, match="only part of an action"):
        objective(torch.tensor([-1.0]), torch.zeros(1), pairs)
