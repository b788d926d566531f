from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from pivotrl.training.objective import FlatStreams, GrpoObjective, SftObjective, kl_terms, token_weights


@dataclass
class Pairs:
    sequence: Tensor  # [P]
    offset: Tensor  # [P]


def all_pairs(lengths: list[int], order: list[int] | None = None) -> Pairs:
    cells = [(i, j) for i in (order or range(len(lengths))) for j in range(lengths[i])]
    return Pairs(torch.tensor([c[0] for c in cells]), torch.tensor([c[1] for c in cells]))


def objective(lengths, advantages, aggregation="token_mean", **changes) -> GrpoObjective:
    torch.manual_seed(0)
    total = sum(lengths)
    settings = {
        "streams": FlatStreams(lengths),
        "advantages": torch.tensor(advantages),
        "weights": torch.tensor(token_weights(lengths, aggregation)),
        "generator": -torch.rand(total),
        "old": None,
        "reference": None,
        "clip_low": 0.2,
        "clip_high": 0.2,
        "kl_beta": 0.0,
        "kl_estimator": "k3",
        "importance_cap": None,
    }
    return GrpoObjective(**(settings | changes))


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


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum"])
def test_gradient_does_not_depend_on_micro_batches_or_order(aggregation):
    # field report C1: 16 valid tokens in sequences of 10 and 6
    lengths, adv = [10, 6, 3], [1.0, -0.5, 0.25]
    goal = objective(lengths, adv, aggregation, old=-torch.rand(19), reference=-torch.rand(19), kl_beta=0.1)
    whole = gradient(goal, lengths, [[0, 1, 2]])
    assert whole.abs().sum() > 0
    for splits in ([[0], [1], [2]], [[2, 1, 0]], [[1], [2, 0]]):
        torch.testing.assert_close(gradient(goal, lengths, splits), whole, rtol=0, atol=1e-7)


def test_weights_hold_the_denominator():
    assert token_weights([10, 6], "token_mean") == [1 / 16] * 2
    assert token_weights([10, 6], "sequence_mean") == [1 / 20, 1 / 12]
    assert token_weights([10, 6], "sequence_sum") == [1 / 2] * 2


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
    assert metrics["clipped_tokens"] == 2


def test_far_ratios_stay_finite():
    # field report B10: a log ratio of 1000 must not become inf * 0
    current = torch.tensor([0.0], requires_grad=True)
    goal = objective([1], [-1.0], old=torch.tensor([-1000.0]), generator=torch.tensor([-1000.0]), importance_cap=5.0)
    loss, _ = goal(current, torch.zeros(1), all_pairs([1]))
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(current.grad).all()


def test_truncated_importance_weights_are_capped():
    goal = objective([2], [1.0], generator=torch.tensor([-3.0, -1.0]), importance_cap=5.0)
    current = torch.tensor([-1.0, -1.0], requires_grad=True)  # ratios e^2 = 7.4 and 1
    loss, _ = goal(current, torch.zeros(2), all_pairs([2]))
    loss.backward()
    torch.testing.assert_close(current.grad, -torch.tensor([5.0, 1.0]) / 2)


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
