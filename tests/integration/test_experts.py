"""Routers in RL: replayed choices against Hugging Face told the same, frozen routers, load, double precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pivotrl.config import Experts, Optimizer, Parallel, Precision
from pivotrl.errors import UserError
from pivotrl.models.mapping import local_shard
from pivotrl.policy.policy import MegatronPolicy, PairBatch
from pivotrl.policy.prefix_tree import Ints, TokenSequence, build_tree
from pivotrl.policy.weights import place_of
from tests.tiny_models import balance_loss, on_disk, save_tiny, told_experts

LAYERS, K, EXPERTS = 2, 2, 8  # of the tiny model: its first of three layers is dense
ROUTER = "decoder.layers.1.mlp.router.weight"


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("moe")
    return folder, save_tiny("qwen3_moe", folder)


def load(folder: Path, experts: Experts | None = None, **changes: Any) -> MegatronPolicy:
    settings = Optimizer(**{"learning_rate": 1e-3, "clip_grad": 1e9, "weight_decay": 0.01, **changes})
    return MegatronPolicy.load(
        folder, Parallel(), Precision(policy="fp32"), settings, 64, 10, 0, keep_reference=True, experts=experts
    )


def draw_experts(tokens: int, seed: int) -> Ints:
    scores = np.random.default_rng(seed).random((tokens, LAYERS, EXPERTS))
    return scores.argsort(-1)[..., :K].astype(np.int64)


def batch(replayed: bool) -> list[TokenSequence]:
    """Three actions of one state, whose prompt tokens were routed alike (computed once), and another state."""
    g = torch.Generator().manual_seed(5)

    def draw(n: int) -> list[int]:
        return torch.randint(0, 128, (n,), generator=g).tolist()

    state, trunk = draw(9), draw_experts(9, 0)
    found = []
    for i in range(3):
        own = np.concatenate([trunk, draw_experts(3 + i, 1 + i)])[: 9 + 3 + i - i % 2]  # with and without the last
        found.append(TokenSequence.of(state, draw(3 + i), own if replayed else None))
    return [*found, TokenSequence.of(draw(7), draw(4), draw_experts(11, 9) if replayed else None)]


def objective(logprobs: Tensor, entropy: Tensor, pairs: PairBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return -((0.1 + pairs.sequence * 0.3 + pairs.offset * 0.05) * logprobs).sum() / 20.0, {}


def reference_logprobs(model: Any, s: TokenSequence) -> Tensor:
    """Hugging Face's, whose routers are told `s.experts`; the last token, which predicts nothing, goes anywhere."""
    with told_experts(model, s.experts):
        scores = model(torch.tensor([s.token_ids])).logits[0].log_softmax(-1)
    return torch.stack([scores[t - 1, s.token_ids[t]] for t in s.targets])


@pytest.mark.parametrize("recompute", [False, True])
def test_replay_equals_hugging_face_told_the_same(moe: tuple[Path, Any], recompute: bool) -> None:
    folder, model = moe
    sequences = batch(replayed=True)
    policy = load(folder, recompute=recompute)
    wanted = [reference_logprobs(model, s) for s in sequences]
    for got, want in zip(policy.logprobs(sequences, 1.0), wanted, strict=True):
        torch.testing.assert_close(got, want, atol=5e-6, rtol=0)
    own = policy.logprobs(batch(replayed=False), 1.0)
    assert max((a - b).abs().max() for a, b in zip(own, wanted, strict=True)) > 0.01  # the choices matter
    with policy.reference():  # the choices are those of the trained policy
        for a, b in zip(policy.logprobs(sequences, 1.0), own, strict=True):
            assert torch.equal(a, b)

    weights = [0.1 + i * 0.3 + torch.arange(len(w)) * 0.05 for i, w in enumerate(wanted)]
    loss = -torch.stack([(a * b).sum() for a, b in zip(weights, wanted, strict=True)]).sum() / 20.0
    model.zero_grad()
    loss.backward()
    source = on_disk({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    report = policy.train_step(sequences, objective, 1.0)
    assert report["loss"] == pytest.approx(loss.item(), abs=1e-6)
    for n, p in policy.model.named_parameters():
        want = local_shard(n, policy.table, policy.dims, place_of(policy.model), source.__getitem__)
        torch.testing.assert_close(p.main_grad, want, atol=1e-6, rtol=0, msg=lambda m, n=n: f"{n}: {m}")
    assert dict(policy.model.named_parameters())[ROUTER].main_grad.abs().max() > 1e-4  # it reaches the router
    assert 1.0 <= report["expert_load"] <= report["expert_load_max"] <= EXPERTS / K


def test_a_shared_row_takes_the_choices_of_the_first_sequence() -> None:
    a, b = draw_experts(4, 1), draw_experts(3, 2)
    sequences = [
        TokenSequence((5, 6, 9), (2,), b),
        TokenSequence((5, 6, 7, 8), (3,), a),
        TokenSequence((5, 6, 8), (2,)),
    ]
    tree = build_tree(sequences, multiple_of=8)
    assert tree.experts is not None
    rows = {(int(t), int(p)): e for t, p, e in zip(tree.token_ids, tree.position_ids, tree.experts, strict=True)}
    for position, token in enumerate((5, 6, 7, 8)):  # the first in lexicographic order
        assert (rows[token, position] == a[position]).all()
    assert (rows[9, 2] == b[2]).all()
    assert (rows[8, 2] == -1).all()  # of a sequence without choices
    assert (tree.experts[tree.tokens_unique :] == tree.experts[[0, 1]]).all()  # padding repeats the first chain
    assert build_tree([TokenSequence((1, 2), (1,))]).experts is None


def test_wrong_choices_are_refused(moe: tuple[Path, Any]) -> None:
    with pytest.raises(UserError, match=r"routed experts \[3, 2, 2\] of a sequence of 5 tokens"):
        TokenSequence.of([1, 2], [3, 4, 5], draw_experts(3, 0))
    policy = load(moe[0])
    for wrong in (draw_experts(5, 0)[:, :1], draw_experts(5, 0) + EXPERTS):
        with pytest.raises(UserError, match="the model has 2 layers with experts"):
            policy.logprobs([TokenSequence.of([1, 2], [3, 4, 5], wrong)], 1.0)
    with pytest.raises(UserError, match="differ"):
        build_tree([TokenSequence.of([1], [n, 4], draw_experts(3, 0)[:, : n - 1]) for n in (2, 3)])


def test_a_frozen_router_stays(moe: tuple[Path, Any]) -> None:
    policy = load(moe[0], Experts(train_router=False))
    before = {n: p.detach().clone() for n, p in policy.model.named_parameters()}
    policy.train_step(batch(replayed=False), objective, 1.0)
    moved = {n for n, p in policy.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved and not any("router" in n for n in moved)
    assert {n for n in before if "router" not in n and "experts" not in n} <= moved
    names = {n for n, _ in policy.hf_weights()}
    assert "model.layers.1.mlp.gate.weight" in names  # it is served and written like any other


def test_load_is_counted_once_per_row(moe: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for recompute in (False, True):
        policy = load(moe[0], recompute=recompute)
        sequences = batch(replayed=True)
        tree = build_tree(sequences)
        assert tree.experts is not None
        taken: list[list[int]] = []

        def keep(device: torch.device, policy: MegatronPolicy = policy, taken: list[list[int]] = taken) -> dict:
            taken.extend(r.load.tolist() for r in policy.routers.mine)
            return {}

        monkeypatch.setattr(policy.routers, "take_load", keep)
        policy.train_step(sequences, objective, 1.0)
        assert [sum(counts) for counts in taken] == [K * tree.tokens_unique] * LAYERS
        for place, counts in enumerate(taken):
            counted = np.bincount(tree.experts[:, place][tree.experts[:, place] >= 0], minlength=EXPERTS)
            assert (np.array(counts) >= counted).all()


def test_router_scores_in_double_precision(moe: tuple[Path, Any]) -> None:
    policy, double = load(moe[0]), load(moe[0], Experts(router_dtype="fp64"))
    assert double.model.config.moe_router_dtype == "fp64"
    got = double.logprobs(batch(replayed=False), 1.0)
    for a, b in zip(got, policy.logprobs(batch(replayed=False), 1.0), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
    assert double.train_step(batch(replayed=False), objective, 1.0)["skipped"] == 0


@pytest.mark.parametrize("recompute", [False, True])
def test_load_balancing_loss_and_its_gradient(moe: tuple[Path, Any], recompute: bool) -> None:
    folder, model = moe
    sequences, coefficient = batch(replayed=False), 0.5
    reports, grads = [], []
    for experts in (Experts(), Experts(aux_loss=coefficient)):
        policy = load(folder, experts, recompute=recompute)
        reports.append(policy.train_step(sequences, objective, 1.0))
        grads.append({n: p.main_grad.clone() for n, p in policy.model.named_parameters()})
    model.zero_grad()
    loss = balance_loss(model, sequences)
    loss.backward()
    assert "aux_loss" not in reports[0]
    assert reports[1]["aux_loss"] == pytest.approx(coefficient * loss.item(), abs=1e-6)
    assert reports[1]["loss"] == reports[0]["loss"]  # that of the objective
    assert loss.item() > LAYERS + 0.01  # 1 a layer would be even
    source = on_disk({n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()})
    for n, before in grads[0].items():
        want = local_shard(n, policy.table, policy.dims, place_of(policy.model), source.__getitem__)
        torch.testing.assert_close(grads[1][n] - before, coefficient * want, atol=1e-6, rtol=0, msg=n)
    assert (grads[1][ROUTER] - grads[0][ROUTER]).abs().max() > 1e-4


def test_load_balancing_evens_the_load(moe: tuple[Path, Any]) -> None:
    def nothing(logprobs: Tensor, entropy: Tensor, pairs: PairBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return logprobs.sum() * 0.0, {}

    policy = load(moe[0], Experts(aux_loss=1.0), learning_rate=3e-3, weight_decay=0.0)
    reports = [policy.train_step(batch(replayed=False), nothing, 1.0) for _ in range(25)]
    assert reports[-1]["aux_loss"] < reports[0]["aux_loss"] - 0.02
    assert reports[-1]["expert_load"] < reports[0]["expert_load"]
