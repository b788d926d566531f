from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from pivotrl.config import Algorithm
from pivotrl.training.objective import (
    AGGREGATIONS,
    FlatStreams,
    GrpoObjective,
    SftObjective,
    dpo_terms,
    preferences,
    token_weights,
)
from pivotrl.training.surrogate import kl_terms


@dataclass
class Pairs:
    sequence: Tensor  # [P]
    offset: Tensor  # [P]


def all_pairs(lengths: list[int], order: list[int] | None = None) -> Pairs:
    cells = [(i, j) for i in (order or range(len(lengths))) for j in range(lengths[i])]
    return Pairs(torch.tensor([c[0] for c in cells]), torch.tensor([c[1] for c in cells]))


def objective(lengths, advantages, **changes) -> GrpoObjective:
    torch.manual_seed(0)
    streams = {name: changes.pop(name, None) for name in ("old", "reference", "generator")}
    a = Algorithm(**changes)
    return GrpoObjective(
        algorithm=a,
        streams=FlatStreams(lengths),
        advantages=torch.tensor(advantages),
        weights=torch.tensor(token_weights(lengths, a.aggregation, list(range(len(lengths))), 8)),
        generator=-torch.rand(sum(lengths)) if streams["generator"] is None else streams["generator"],
        old=streams["old"],
        reference=streams["reference"],
    )


def gradient(goal, lengths, splits: list[list[int]]) -> Tensor:
    """d loss / d log-prob of every token, when sequences are computed in these micro-batches."""
    torch.manual_seed(1)
    flat = (-torch.rand(sum(lengths))).requires_grad_()
    for part in splits:
        pairs = all_pairs(lengths, part)
        at = goal.streams.positions(pairs)
        loss, _ = goal(flat[at], torch.zeros(len(at)), pairs)
        loss.backward()
    assert flat.grad is not None
    return flat.grad


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradient_does_not_depend_on_micro_batches_or_order(aggregation):
    # field report C1: 16 valid tokens in sequences of 10 and 6
    lengths, adv = [10, 6, 3], [1.0, -0.5, 0.25]
    streams = {"old": -torch.rand(19), "reference": -torch.rand(19)}
    goal = objective(lengths, adv, aggregation=aggregation, kl_beta=0.1, **streams)
    whole = gradient(goal, lengths, [[0, 1, 2]])
    assert whole.abs().sum() > 0
    for splits in ([[0], [1], [2]], [[2, 1, 0]], [[1], [2, 0]]):
        torch.testing.assert_close(gradient(goal, lengths, splits), whole, rtol=0, atol=1e-7)


def test_weights_hold_the_denominator():
    assert token_weights([10, 6], "token_mean") == [1 / 16] * 2
    assert token_weights([10, 6], "sequence_mean") == [1 / 20, 1 / 12]
    assert token_weights([10, 6], "sequence_sum") == [1 / 2] * 2
    assert token_weights([10, 6], "constant_length", constant=20) == [1 / 40] * 2
    assert token_weights([10, 6, 4], "group_mean", groups=[7, 3, 7]) == [1 / 28, 1 / 12, 1 / 28]


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "group_mean"])
def test_means_are_means(aggregation):
    lengths = [10, 6, 4, 1]
    weights = token_weights(lengths, aggregation, groups=[0, 1, 0, 1])
    assert sum(w * n for w, n in zip(weights, lengths, strict=True)) == pytest.approx(1.0)


def test_on_policy_gradient_is_the_policy_gradient():
    lengths = [2, 1]
    goal = objective(lengths, [2.0, -1.0])
    torch.testing.assert_close(gradient(goal, lengths, [[0, 1]]), -torch.tensor([2.0, 2.0, -1.0]) / 3)


def test_equal_rewards_have_exactly_zero_gradient():
    assert torch.equal(gradient(objective([4, 4], [0.0, 0.0]), [4, 4], [[0, 1]]), torch.zeros(8))


def test_clipping_stops_the_gradient_on_the_far_side_only():
    old = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    current = torch.tensor([-0.5, -0.5, -1.5, -1.5], requires_grad=True)  # ratios 1.65, 1.65, 0.61, 0.61
    goal = objective([1] * 4, [1.0, -1.0, 1.0, -1.0], old=old)
    loss, metrics = goal(current, torch.zeros(4), all_pairs([1] * 4))
    loss.backward()
    assert [bool(g) for g in current.grad] == [False, True, True, False]
    assert (metrics["clip_low_fraction_sum"], metrics["clip_high_fraction_sum"]) == (1, 1)


@pytest.mark.parametrize("kind", ["none", "truncated", "masked", "geometric"])
def test_far_ratios_stay_finite(kind):
    # field report B10: a log ratio of 1000 must not become inf * 0
    current = torch.tensor([0.0], requires_grad=True)
    far = {"old": torch.tensor([-1000.0]), "generator": torch.tensor([-3000.0])}
    goal = objective([1], [-1.0], importance_correction=kind, **far)
    loss, metrics = goal(current, torch.zeros(1), all_pairs([1]))
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(current.grad).all()
    if kind in ("masked", "geometric"):
        assert (loss.item(), current.grad.item(), metrics["importance_masked_sum"].item()) == (0.0, 0.0, 1.0)


def test_tokens_are_clamped_where_their_mean_is_one():
    # field report B10: ratios [10, 0.1] have a geometric mean of 1
    generator = torch.tensor([-math.log(10.0), math.log(10.0)]) - 1.0
    goal = objective(
        [2], [1.0], generator=generator, importance_correction="geometric", importance_cap=5.0, importance_floor=0.5
    )
    current = torch.tensor([-1.0, -1.0], requires_grad=True)
    loss, metrics = goal(current, torch.zeros(2), all_pairs([2]))
    loss.backward()
    torch.testing.assert_close(current.grad, -torch.tensor([5.0, 0.5]) / 2)
    assert (metrics["importance_masked_sum"], metrics["importance_clamped_sum"]) == (0, 2)


def test_truncated_importance_weights_are_capped_and_both_sides_are_reported():
    generator = torch.tensor([-3.0, -1.0])
    goal = objective([2], [1.0], generator=generator, importance_correction="truncated")
    current = torch.tensor([-1.0, -1.0], requires_grad=True)  # ratios e^2 = 7.4 and 1
    loss, metrics = goal(current, torch.zeros(2), all_pairs([2]))
    loss.backward()
    torch.testing.assert_close(current.grad, -torch.tensor([5.0, 1.0]) / 2)
    raw = math.exp(2.0)
    assert metrics["importance_sum"].item() == pytest.approx(raw + 1, rel=1e-6)
    assert metrics["importance_max"].item() == pytest.approx(raw, rel=1e-6)
    assert (metrics["importance_effective_sum"], metrics["importance_clamped_sum"]) == (6, 1)


def test_mismatch_by_hand():
    # field report B13: fixed definitions, by token
    goal = objective([3], [1.0], generator=torch.tensor([-1.0, -2.0, -3.0]))
    _, metrics = goal(torch.tensor([-1.1, -1.5, -3.0]), torch.zeros(3), all_pairs([3]))
    assert metrics["mismatch_abs_sum"].item() == pytest.approx(0.6, abs=1e-6)
    assert metrics["mismatch_max"].item() == pytest.approx(0.5, abs=1e-6)
    k3 = (math.exp(-0.1) + 0.1 - 1) + (math.exp(0.5) - 0.5 - 1)
    assert metrics["mismatch_k3_sum"].item() == pytest.approx(k3, abs=1e-6)


def test_mismatch_is_of_the_weights_that_sampled():
    # after an update the policy has moved, and that is no mismatch
    same = torch.tensor([-1.0, -2.0])
    goal = objective([2], [1.0], generator=same, old=same)
    _, metrics = goal(same + 0.3, torch.zeros(2), all_pairs([2]))
    assert metrics["mismatch_abs_sum"] == 0
    assert metrics["update_kl_sum"] > 0


def test_a_broken_log_prob_shows():
    current = torch.tensor([float("nan"), -1.0], requires_grad=True)
    for kind in ("none", "truncated", "masked", "geometric"):
        loss, _ = objective([2], [1.0], importance_correction=kind)(current, torch.zeros(2), all_pairs([2]))
        (gradient,) = torch.autograd.grad(loss, current)
        assert not (torch.isfinite(loss) and torch.isfinite(gradient).all()), kind


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    current = torch.tensor([-0.5], requires_grad=True)
    old = torch.tensor([-2.0])  # ratio e^1.5 = 4.5
    for loss_name, expected in (("clip", 0.0), ("cispo", -1.2)):
        goal = objective([1], [1.0], old=old, loss=loss_name)
        loss, metrics = goal(current, torch.zeros(1), all_pairs([1]))
        (gradient,) = torch.autograd.grad(loss, current)
        assert gradient.item() == pytest.approx(expected)
        assert metrics["clip_high_fraction_sum"] == 1


def test_preferences_weigh_groups_alike():
    pairs = preferences([1, 0, 0, 0.5, 0.5, 1, 0], [0, 0, 0, 1, 1, 2, 2])
    assert [(p.winner, p.loser, p.weight) for p in pairs] == [(0, 1, 0.25), (0, 2, 0.25), (5, 6, 0.5)]
    with pytest.raises(ValueError, match="no pair"):
        dpo_terms(torch.zeros(2), torch.zeros(2), [], 0.1)


def test_kl_estimators():
    logprobs, reference = torch.tensor([-1.0]), torch.tensor([-1.5])
    assert kl_terms(logprobs, reference, "k1").item() == pytest.approx(0.5)
    assert kl_terms(logprobs, reference, "k2").item() == pytest.approx(0.125)
    assert kl_terms(logprobs, reference, "k3").item() == pytest.approx(0.1065, abs=1e-4)
    assert kl_terms(logprobs, logprobs, "k3").item() == 0.0


def test_sft_is_the_mean_negative_log_likelihood():
    logprobs = torch.tensor([-1.0, -2.0, -3.0])
    loss, metrics = SftObjective(torch.full((2,), 1 / 3))(logprobs, torch.zeros(3), all_pairs([2, 1]))
    assert loss.item() == pytest.approx(2.0)
    assert metrics["target_tokens"] == 3
