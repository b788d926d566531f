"""Every preset of conf/algorithm and every option of the loss against the printed formulas, action by action."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pivotrl.config import Algorithm
from pivotrl.configuration import load_config
from pivotrl.training import batch as batches
from pivotrl.training.batch import Batch
from pivotrl.training.objective import FlatStreams, GrpoObjective, dpo_terms
from tests.unit.toy_policy import batch_of

REWARDS = [[1, 0, 0, 1], [0.5, 0.5, 0.5, 0.5], [0, 0, 0, 1], [1, 1, 0, 0.25]]
LONGEST = 8  # sampling.max_new_tokens


@dataclasses.dataclass
class Given:
    """Log-probs of each action's tokens, and what they are compared with."""

    batch: Batch
    logprobs: list[Tensor]
    old: list[Tensor]
    reference: list[Tensor]

    @property
    def generator(self) -> list[Tensor]:
        return [torch.tensor(r.logprobs) for r in self.batch.rollouts]

    def group(self, i: int) -> Tensor:
        rollouts = self.batch.rollouts
        return torch.tensor([r.reward for r in rollouts if r.group == rollouts[i].group], dtype=torch.float64)

    def others(self, i: int) -> Tensor:
        me = self.batch.rollouts[i]
        rewards = [r.reward for r in self.batch.rollouts if r.group == me.group and r.id != me.id]
        return torch.tensor(rewards, dtype=torch.float64)


def given(a: Algorithm) -> Given:
    batch = batch_of(REWARDS, a)
    g = torch.Generator().manual_seed(3)
    generator = [torch.tensor(r.logprobs) for r in batch.rollouts]
    old = [x + 0.4 * torch.randn(x.shape, generator=g) for x in generator]
    now = [(x + 0.4 * torch.randn(x.shape, generator=g)).requires_grad_() for x in old]
    return Given(batch, now, old, [x + 0.5 * torch.randn(x.shape, generator=g) for x in old])


def ours(a: Algorithm, x: Given) -> Tensor:
    indices = range(len(x.batch.rollouts))
    if a.loss == "dpo":
        samples, pairs = batches.preference_samples(x.batch.rollouts, indices)
        sums = [torch.stack([v[s.index].detach().sum() for s in samples]) for v in (x.logprobs, x.reference)]
        objective: Any = batches.make_dpo_objective(samples, dpo_terms(*sums, pairs, a.dpo_beta), x.old, x.reference)
    else:
        penalties = None
        if a.kl_in == "reward":
            penalties = batches.kl_penalties(x.batch.rollouts, x.reference, a.kl_beta, a.kl_estimator)
        samples = batches.make_samples(x.batch.rollouts, indices, a, LONGEST, penalties)
        objective = batches.make_objective(samples, a, x.old, x.reference)
    cells = [(k, j) for k, s in enumerate(samples) for j in range(len(s.rollout.logprobs))]
    pairs_of: Any = type("Pairs", (), {"sequence": torch.tensor([c[0] for c in cells])})
    pairs_of.offset = torch.tensor([c[1] for c in cells])
    flat = torch.cat([x.logprobs[s.index] for s in samples])
    return objective(flat, entropy(flat), pairs_of)[0]


def entropy(logprobs: Tensor) -> Tensor:
    return -logprobs * logprobs.exp()


def agree(a: Algorithm, naive: Callable[[Given], Tensor]) -> None:
    results = []
    for loss_of in (lambda x: ours(a, x), naive):
        x = given(a)
        loss = loss_of(x)
        loss.backward()
        gradient = [torch.zeros_like(v) if v.grad is None else v.grad for v in x.logprobs]
        results.append((loss.detach(), torch.cat(gradient)))
    torch.testing.assert_close(results[0][0], results[1][0].float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-4, atol=1e-7)
    assert results[0][1].abs().max() > 1e-4


def population(x: Given, i: int) -> float:
    group = x.group(i)
    return float((x.batch.rollouts[i].reward - group.mean()) / (group.std(correction=0) + 1e-6))


def token_level(x: Given, advantage: Callable[[Given, int], float], low: float, high: float) -> list[Tensor]:
    """Clipped surrogate of every token, one tensor an action."""
    found = []
    for i, now in enumerate(x.logprobs):
        ratio, value = (now - x.old[i]).exp(), advantage(x, i)
        found.append(torch.minimum(ratio * value, ratio.clamp(1 - low, 1 + high) * value))
    return found


def token_mean(terms: list[Tensor]) -> Tensor:
    return torch.cat(terms).mean()


def sequence_mean(terms: list[Tensor]) -> Tensor:
    return torch.stack([t.mean() for t in terms]).mean()


def preset(name: str) -> Algorithm:
    return load_config([f"algorithm={name}"]).algorithm


def test_grpo() -> None:
    agree(preset("grpo"), lambda x: -token_mean(token_level(x, population, 0.2, 0.2)))


def test_grpo_as_printed() -> None:
    """Eq. 7: the ratio of the whole action, a mean over actions, and a KL term."""

    def naive(x: Given) -> Tensor:
        terms = []
        for i, now in enumerate(x.logprobs):
            w, value = (now.sum() - x.old[i].sum()).exp(), population(x, i)
            log_ratio = x.reference[i] - now
            kl = (log_ratio.exp() - log_ratio - 1).mean()
            terms.append(torch.minimum(w * value, w.clamp(0.8, 1.2) * value) - 0.01 * kl)
        return -torch.stack(terms).mean()

    agree(dataclasses.replace(preset("grpo_kl"), ratio="sequence", aggregation="sequence_mean"), naive)


def test_grpo_nvidia() -> None:
    def leave_one_out(x: Given, i: int) -> float:
        others, reward = x.others(i), x.batch.rollouts[i].reward
        if x.group(i).std() == 0:
            return 0.0
        scale = float(others.std()) + 1e-6 if others.std() > 0 else 1.0
        return float(reward - others.mean()) / scale

    def naive(x: Given) -> Tensor:
        terms = token_level(x, leave_one_out, 0.2, 0.28)
        caps = [(o - g).exp().clamp(max=5.0) for o, g in zip(x.old, x.generator, strict=True)]
        return -token_mean([t * c for t, c in zip(terms, caps, strict=True)])

    agree(preset("grpo_nvidia"), naive)


def test_dr_grpo() -> None:
    def centered(x: Given, i: int) -> float:
        return float(x.batch.rollouts[i].reward - x.group(i).mean())

    agree(
        preset("dr_grpo"),
        lambda x: -torch.stack([t.sum() / LONGEST for t in token_level(x, centered, 0.2, 0.2)]).mean(),
    )


def test_dapo() -> None:
    """The group of equal rewards is not in the denominator."""

    def naive(x: Given) -> Tensor:
        terms = token_level(x, population, 0.2, 0.28)
        return -token_mean([t for i, t in enumerate(terms) if x.group(i).std() > 0])

    agree(preset("dapo"), naive)


def test_gspo() -> None:
    def naive(x: Given) -> Tensor:
        terms = []
        for i, now in enumerate(x.logprobs):
            s, value = (now - x.old[i]).mean().exp(), population(x, i)
            terms.append(torch.minimum(s * value, s.clamp(1 - a.clip_low, 1 + a.clip_high) * value))
        return -torch.stack(terms).mean()

    a = dataclasses.replace(preset("gspo"), clip_low=0.1, clip_high=0.2)  # wide enough for these ratios
    agree(a, naive)
    assert (preset("gspo").clip_low, preset("gspo").clip_high) == (3e-4, 4e-4)


def test_cispo() -> None:
    def naive(x: Given) -> Tensor:
        terms = [
            (now - x.old[i]).exp().detach().clamp(max=1.3) * population(x, i) * now for i, now in enumerate(x.logprobs)
        ]
        return -token_mean(terms)

    agree(dataclasses.replace(preset("cispo"), clip_high=0.3), naive)


def test_dpo() -> None:
    def naive(x: Given) -> Tensor:
        implicit = [0.1 * (now.sum() - x.reference[i].sum()) for i, now in enumerate(x.logprobs)]
        by_group: dict[int, list[Tensor]] = {}
        for i, w in enumerate(x.batch.rollouts):
            for j, loser in enumerate(x.batch.rollouts):
                if w.group == loser.group and w.reward > loser.reward:
                    by_group.setdefault(w.group, []).append(-F.logsigmoid(implicit[i] - implicit[j]))
        return torch.stack([torch.stack(terms).mean() for terms in by_group.values()]).mean()

    agree(preset("dpo"), naive)


def test_dual_clip() -> None:
    def naive(x: Given) -> Tensor:
        terms = []
        for i, t in enumerate(token_level(x, population, 0.2, 0.2)):
            value = population(x, i)
            terms.append(torch.maximum(t, torch.full_like(t, 1.4 * value)) if value < 0 else t)
        return -token_mean(terms)

    agree(Algorithm(dual_clip=1.4), naive)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "unbiased"])
def test_kl_in_the_loss(estimator: str) -> None:
    def kl(x: Given, i: int) -> Tensor:
        d = x.logprobs[i] - x.reference[i]
        if estimator == "k1":
            return d
        if estimator == "k2":
            return d**2 / 2
        k3 = (-d).exp() + d - 1
        return k3 if estimator == "k3" else (x.logprobs[i] - x.old[i]).exp() * k3

    def naive(x: Given) -> Tensor:
        terms = token_level(x, population, 0.2, 0.2)
        return -sequence_mean([t - 0.3 * kl(x, i) for i, t in enumerate(terms)])

    agree(Algorithm(kl_beta=0.3, kl_estimator=estimator, aggregation="sequence_mean"), naive)


def test_kl_in_the_reward() -> None:
    def advantage(x: Given, i: int) -> float:
        me = x.batch.rollouts[i]
        penalised = {
            k: r.reward - 0.3 * float((x.generator[k] - x.reference[k]).sum())
            for k, r in enumerate(x.batch.rollouts)
            if r.group == me.group
        }
        return penalised[i] - sum(penalised.values()) / len(penalised)

    a = Algorithm(advantage="mean_only", kl_beta=0.3, kl_in="reward", kl_estimator="k1")
    agree(a, lambda x: -token_mean(token_level(x, advantage, 0.2, 0.2)))


def test_entropy_bonus() -> None:
    def naive(x: Given) -> Tensor:
        terms = token_level(x, population, 0.2, 0.2)
        return -token_mean([t + 0.05 * entropy(now) for t, now in zip(terms, x.logprobs, strict=True)])

    agree(Algorithm(entropy_bonus=0.05), naive)


@pytest.mark.parametrize("kind", ["truncated", "masked", "geometric", "limit"])
def test_importance_corrections(kind: str) -> None:
    low, high = 0.7, 1.4
    options: dict[str, Any] = {"importance_floor": low, "importance_cap": high, "importance_correction": kind}
    if kind == "geometric":
        options |= {"importance_sequence_low": 0.8, "importance_sequence_high": 1.2}
    if kind == "limit":
        options = {"sequence_mismatch_limit": 1.4}

    def naive(x: Given) -> Tensor:
        terms = []
        for i, t in enumerate(token_level(x, population, 0.2, 0.2)):
            difference = x.old[i] - x.generator[i]
            w = difference.exp()
            if kind == "truncated":
                terms.append(t * w.clamp(low, high))
            elif kind == "masked":
                terms.append(t * w * ((w >= low) & (w <= high)))
            elif kind == "geometric":
                terms.append(t * w.clamp(low, high) * float(0.8 <= difference.mean().exp() <= 1.2))
            else:
                terms.append(t * float(difference.abs().exp().mean() <= 1.4))
        return -token_mean(terms)

    agree(Algorithm(**options), naive)


def test_group_mean() -> None:
    def naive(x: Given) -> Tensor:
        groups: dict[int, list[Tensor]] = {}
        for i, t in enumerate(token_level(x, population, 0.2, 0.2)):
            groups.setdefault(x.batch.rollouts[i].group, []).append(t)
        return -torch.stack([torch.cat(terms).mean() for terms in groups.values()]).mean()

    agree(Algorithm(aggregation="group_mean"), naive)


def test_unbiased_gradient_of_the_kl() -> None:
    """Over all actions of a softmax, only k2 and "unbiased" have the gradient of KL(pi || pi_0); k1 has none."""
    from pivotrl.training.surrogate import kl_terms

    theta = torch.tensor([0.3, -0.5, 1.0, 0.1], dtype=torch.float64, requires_grad=True)
    start = torch.tensor([0.1, 0.4, 0.3, 0.2], dtype=torch.float64).log()
    policy = theta.log_softmax(0)
    (wanted,) = torch.autograd.grad((policy.exp() * (policy - start)).sum(), theta, retain_graph=True)
    for estimator, unbiased in (("k1", False), ("k2", True), ("k3", False), ("unbiased", True)):
        expected = (policy.exp().detach() * kl_terms(policy, start, estimator)).sum()  # sampling weights are constants
        (got,) = torch.autograd.grad(expected, theta, retain_graph=True)
        assert torch.allclose(got, wanted) is unbiased, estimator
        if estimator == "k1":
            assert got.abs().max() < 1e-12


def test_samples_of_older_weights_give_the_gradient_of_the_present_ones() -> None:
    """`one_step_off`: over all actions of a softmax, weighed as an older policy draws them, and corrected for it."""
    theta = torch.tensor([0.3, -0.5, 1.0, 0.1], requires_grad=True)
    older = torch.tensor([0.5, 0.1, 0.1, 0.3])
    start = torch.tensor([0.1, 0.4, 0.3, 0.2]).log()
    advantages = torch.tensor([1.0, -0.5, 2.0, 0.0])
    policy = theta.log_softmax(0)
    aim = -(policy.exp() * advantages).sum() + 0.3 * (policy.exp() * (policy - start)).sum()
    (wanted,) = torch.autograd.grad(aim, theta, retain_graph=True)

    def gradient(correction: str) -> Tensor:
        a = Algorithm(importance_correction=correction, importance_cap=100.0, kl_beta=0.3, kl_estimator="unbiased")
        streams, places = FlatStreams([1] * 4), torch.arange(4)
        objective = GrpoObjective(a, streams, advantages, older, older.log(), reference=start)
        pairs: Any = SimpleNamespace(sequence=places, offset=torch.zeros(4, dtype=torch.long), tokens=places)
        loss, _ = objective(policy, torch.zeros(4), pairs)
        return torch.autograd.grad(loss, theta, retain_graph=True)[0]

    torch.testing.assert_close(gradient("truncated"), wanted, atol=1e-6, rtol=0)
    assert (gradient("none") - wanted).abs().max() > 0.05
