"""The policy against Hugging Face in float32: log-probs, all gradients, weights out and in; sharing changes nothing."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pivotrl.config import Experts, Optimizer, Parallel, Precision
from pivotrl.errors import UserError
from pivotrl.models.folder import ModelFolder
from pivotrl.models.mapping import local_shard
from pivotrl.models.registry import family_for
from pivotrl.policy import prefix_tree
from pivotrl.policy.model import transformer_config
from pivotrl.policy.policy import MegatronPolicy, PairBatch
from pivotrl.policy.prefix_tree import TokenSequence, build_tree
from pivotrl.policy.weights import place_of
from tests.tiny_models import NAMES, on_disk, save_tiny

Folders = dict[str, tuple[Path, Any]]
TEMPERATURE = 0.7
NO_CLIP = 1e9


def load(folder: Path, **changes: Any) -> MegatronPolicy:
    settings = Optimizer(**{"learning_rate": 1e-3, "tokens_per_microbatch": 4096, "clip_grad": NO_CLIP, **changes})
    return MegatronPolicy.load(
        folder, Parallel(), Precision(policy="fp32"), settings, 64, 10, seed=0, keep_reference=True
    )


def batch() -> list[TokenSequence]:
    """Two states sharing a system prompt, three completions each, one completion twice, and an SFT-like chain."""
    g = torch.Generator().manual_seed(1)

    def draw(n: int) -> list[int]:
        return torch.randint(0, 128, (n,), generator=g).tolist()

    system = draw(5)
    sequences = [TokenSequence.of(p, draw(3 + i)) for p in (system + draw(4), system + draw(6)) for i in range(3)]
    chain = system + draw(20)
    return [*sequences, sequences[2], TokenSequence(tuple(chain), (7, 8, 9, 15, 16, 24))]


def reference_logprobs(model: Any, sequence: TokenSequence) -> Tensor:
    scores = (model(torch.tensor([sequence.token_ids])).logits[0] / TEMPERATURE).log_softmax(-1)
    return torch.stack([scores[t - 1, sequence.token_ids[t]] for t in sequence.targets])


def weighted(logprobs: Tensor, entropy: Tensor, pairs: PairBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """An objective with another weight on every pair, so that a mixed-up pair shows."""
    weight = 0.1 + pairs.sequence * 0.3 + pairs.offset * 0.05
    return -(weight * logprobs).sum() / 90.0 - 0.001 * entropy.sum(), {"entropy": entropy.sum()}


def reference_loss(model: Any, sequences: list[TokenSequence]) -> Tensor:
    loss = torch.zeros(())
    for i, s in enumerate(sequences):
        scores = (model(torch.tensor([s.token_ids])).logits[0] / TEMPERATURE).log_softmax(-1)
        for k, t in enumerate(s.targets):
            row = scores[t - 1]
            loss = loss - (0.1 + i * 0.3 + k * 0.05) * row[s.token_ids[t]] / 90.0 + 0.001 * (row.exp() * row).sum()
    return loss


def gradients(policy: MegatronPolicy) -> dict[str, Tensor]:
    return {n: p.main_grad.clone() for n, p in policy.model.named_parameters()}


@pytest.mark.parametrize("name", NAMES)
def test_logprobs_and_all_gradients_equal_hugging_face(tiny_folders: Folders, name: str) -> None:
    folder, model = tiny_folders[name]
    sequences = batch()
    policy = load(folder)
    for got, s in zip(policy.logprobs(sequences, TEMPERATURE), sequences, strict=True):
        torch.testing.assert_close(got, reference_logprobs(model, s), atol=1e-5, rtol=0)
    report = policy.train_step(sequences, weighted, TEMPERATURE)
    model.zero_grad()
    loss = reference_loss(model, sequences)
    loss.backward()
    assert report["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert report["tokens_unique"] < report["tokens_total"]
    source = on_disk({n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()})
    for n, grad in gradients(policy).items():
        wanted = local_shard(n, policy.table, policy.dims, place_of(policy.model), source.__getitem__)
        torch.testing.assert_close(grad, wanted, atol=1e-6, rtol=1e-5, msg=lambda m, n=n: f"{n}: {m}")


@pytest.mark.parametrize("name", NAMES)
def test_sharing_and_cutting_change_nothing(tiny_folders: Folders, name: str) -> None:
    """One tree, small micro-batches with recomputed layers, one sequence at a time: the same in every respect."""
    folder, _ = tiny_folders[name]
    sequences = batch()
    results = []
    for budget, recompute in ((4096, False), (30, True), (1, False)):
        policy = load(folder, tokens_per_microbatch=budget, recompute=recompute)
        logprobs = policy.logprobs(sequences, TEMPERATURE)
        results.append((policy.train_step(sequences, weighted, TEMPERATURE), gradients(policy), logprobs))
    assert results[0][0]["tokens_unique"] < results[2][0]["tokens_unique"] == results[2][0]["tokens_total"]
    for report, grads, logprobs in results[1:]:
        assert report["loss"] == pytest.approx(results[0][0]["loss"], rel=1e-5)
        for n, g in grads.items():
            torch.testing.assert_close(g, results[0][1][n], atol=1e-6, rtol=1e-5)
        for a, b in zip(logprobs, results[0][2], strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_wrong_positions_are_noticed(tiny_folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with row numbers as positions (not depths) the comparison above would fail."""
    folder, _ = tiny_folders["llama"]
    sequences = batch()
    policy = load(folder)
    right = policy.logprobs(sequences, TEMPERATURE)

    def numbered(*args: Any, **kwargs: Any) -> prefix_tree.PrefixTree:
        tree = build_tree(*args, **kwargs)
        return dataclasses.replace(tree, position_ids=tree.position_ids * 0 + range(len(tree.position_ids)))

    monkeypatch.setattr("pivotrl.policy.policy.build_tree", numbered)
    wrong = policy.logprobs(sequences, TEMPERATURE)
    assert max((a - b).abs().max().item() for a, b in zip(right, wrong, strict=True)) > 1e-2


def test_loss_falls_and_reference_stays(tiny_folders: Folders) -> None:
    folder, _ = tiny_folders["qwen3_moe"]
    sequences = batch()
    policy = load(folder, learning_rate=1e-2, schedule="linear", warmup_steps=2)
    initial = policy.logprobs(sequences, TEMPERATURE)
    reports = [policy.train_step(sequences, weighted, TEMPERATURE) for _ in range(6)]
    assert reports[-1]["loss"] < 0.5 * reports[0]["loss"]
    assert [round(r["learning_rate"], 6) for r in reports[:3]] == [0.003333, 0.006667, 0.01]
    trained = policy.logprobs(sequences, TEMPERATURE)
    with policy.reference():
        for a, b in zip(policy.logprobs(sequences, TEMPERATURE), initial, strict=True):
            assert torch.equal(a, b)
    for a, b in zip(policy.logprobs(sequences, TEMPERATURE), trained, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_weights_go_out_as_they_came_in(tiny_folders: Folders, name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder, model = tiny_folders[name]
    policy = load(folder)
    source = on_disk(dict(model.state_dict()))
    if policy.dims.tied:
        del source["lm_head.weight"]
    weights = dict(policy.hf_weights())
    assert set(weights) == set(source)
    assert all(torch.equal(weights[n], source[n]) for n in source)
    sequences = batch()
    policy.train_step(sequences, weighted, TEMPERATURE)
    policy.save_hf(tmp_path / "out", folder)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").eval()
    assert again.dtype == torch.float32
    with torch.no_grad():
        for got, s in zip(policy.logprobs(sequences, TEMPERATURE), sequences, strict=True):
            torch.testing.assert_close(got, reference_logprobs(again, s), atol=1e-5, rtol=0)


def test_sharded_export_has_an_index(tiny_folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, model = tiny_folders["qwen3_moe"]
    monkeypatch.setattr("pivotrl.policy.weights.SHARD_BYTES", 100_000)
    load(folder).save_hf(tmp_path / "out", folder)
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 1
    again = load(tmp_path / "out")
    for n, t in again.hf_weights():
        assert torch.equal(t, on_disk(dict(model.state_dict()))[n])


def test_non_finite_loss_leaves_the_weights(tiny_folders: Folders) -> None:
    folder, _ = tiny_folders["llama"]
    policy = load(folder)
    before = {n: t.clone() for n, t in policy.hf_weights()}

    def broken(logprobs: Tensor, entropy: Tensor, pairs: PairBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return logprobs.sum() * math.nan, {}

    assert policy.train_step(batch(), broken, TEMPERATURE)["skipped"] == 1.0
    assert all(torch.equal(t, before[n]) for n, t in policy.hf_weights())
    assert policy.train_step(batch(), weighted, TEMPERATURE)["skipped"] == 0.0
    assert not all(torch.equal(t, before[n]) for n, t in policy.hf_weights())


def test_bf16_stays_near_float32(tiny_folders: Folders) -> None:
    folder, _ = tiny_folders["qwen3"]
    sequences = batch()
    policy = MegatronPolicy.load(folder, Parallel(), Precision(policy="bf16"), Optimizer(1e-2), 64, 10, seed=0)
    exact = load(folder).logprobs(sequences, TEMPERATURE)
    near = policy.logprobs(sequences, TEMPERATURE)
    assert max((a - b).abs().max().item() for a, b in zip(exact, near, strict=True)) < 0.3
    losses = [policy.train_step(sequences, weighted, TEMPERATURE)["loss"] for _ in range(6)]
    assert losses[-1] < 0.5 * losses[0]
    assert all(t.dtype == torch.bfloat16 for _, t in policy.hf_weights())


@pytest.mark.parametrize(
    ("parallel", "key"),
    [(Parallel(tensor=2), "2"), (Parallel(context=2), "context = 2"), (Parallel(expert=2), "expert")],
)
def test_impossible_layouts_are_refused(tiny_folders: Folders, parallel: Parallel, key: str) -> None:
    with pytest.raises(UserError, match=key):
        MegatronPolicy.load(tiny_folders["llama"][0], parallel, Precision(policy="fp32"), None, 64, 1, seed=0)


def test_a_hybrid_keeps_biases_of_the_choice_and_layers_that_it_does_not_run(tmp_path: Path) -> None:
    """In bf16 the bias stays float32, through wrapping, training and export; `mtp` tensors are carried over."""
    save_tiny("nemotron_h", tmp_path / "in")
    bias = "backbone.layers.1.mixer.gate.e_score_correction_bias"
    file = tmp_path / "in" / "model.safetensors"
    held = load_file(file) | {bias: torch.full((8,), 1 / 3), "mtp.layers.0.enorm.weight": torch.rand(64)}
    save_file(held, file, {"format": "pt"})
    policy = MegatronPolicy.load(
        tmp_path / "in", Parallel(), Precision(policy="bf16"), Optimizer(1e-2), 64, 10, seed=0, keep_reference=True
    )
    routers = [layer.mlp.router for layer in policy.model.decoder.layers if hasattr(layer.mlp, "router")]
    losses = [policy.train_step(batch(), weighted, TEMPERATURE)["loss"] for _ in range(4)]
    assert losses[-1] < losses[0]
    assert torch.equal(routers[0].expert_bias, held[bias]) and len(routers) == 2
    assert dict(policy.hf_weights())[bias].dtype == torch.float32
    policy.save_hf(tmp_path / "out", tmp_path / "in")
    out = load_file(tmp_path / "out" / "model.safetensors")
    assert set(out) == set(held)
    for name in (bias, "mtp.layers.0.enorm.weight"):
        assert torch.equal(out[name], held[name]) and out[name].dtype == torch.float32
    assert out["backbone.embeddings.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("parallel", "experts", "said"),
    [
        (Parallel(), Experts(aux_loss=0.1), "experts.aux_loss.*balanced by their bias"),
        (Parallel(tensor=4, sequence=True), None, "parallel.tensor: the model has 2 key-value heads"),
        (Parallel(context=3), None, "tensor x context: the model has 8 Mamba heads"),
    ],
)
def test_layouts_that_a_hybrid_cannot_have_are_refused(
    tiny_folders: Folders, parallel: Parallel, experts: Experts | None, said: str
) -> None:
    config = ModelFolder(tiny_folders["nemotron_h"][0]).config
    family = family_for(config)
    with pytest.raises(UserError, match=said):
        transformer_config(
            family.to_megatron_kwargs(config), family.dims(config), parallel, torch.float32, False, experts
        )
