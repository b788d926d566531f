"""Scaled positions and biases of the attention against Hugging Face in float32: log-probs, all gradients, export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pivotrl.config import Optimizer, Parallel, Precision
from pivotrl.errors import UserError
from pivotrl.models.mapping import local_shard
from pivotrl.policy.policy import MegatronPolicy, PairBatch
from pivotrl.policy.prefix_tree import TokenSequence
from pivotrl.policy.weights import place_of
from tests.tiny_models import on_disk, save_tiny

THETA = {"rope_theta": 1e4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, **THETA}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **THETA}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("llama", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 16}}),
    "yarn": ("qwen3", {"rope_parameters": YARN}),
    "linear, biases": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, **THETA}, "attention_bias": True},
    ),
    "dynamic, biases of Qwen2": ("qwen2", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, **THETA}}),
    "yarn, biases, experts": (
        "qwen3_moe",
        {"rope_parameters": {**YARN, "attention_factor": 0.8}, "attention_bias": True},
    ),
}


def batch() -> list[TokenSequence]:
    g = torch.Generator().manual_seed(4)

    def draw(n: int) -> list[int]:
        return torch.randint(0, 128, (n,), generator=g).tolist()

    state = draw(30)  # beyond the positions of the pretraining
    return [TokenSequence.of(state + draw(2), draw(4 + i)) for i in range(3)]


def objective(logprobs: Tensor, entropy: Tensor, pairs: PairBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return -((0.1 + pairs.sequence * 0.3 + pairs.offset * 0.05) * logprobs).sum() / 20.0, {}


def wanted_logprobs(model: Any, s: TokenSequence) -> Tensor:
    scores = model(torch.tensor([s.token_ids])).logits[0].log_softmax(-1)
    return torch.stack([scores[t - 1, s.token_ids[t]] for t in s.targets])


def load(folder: Path, length: int = 64) -> MegatronPolicy:
    return MegatronPolicy.load(
        folder, Parallel(), Precision(policy="fp32"), Optimizer(1e-2, clip_grad=1e9), length, 4, 0
    )


@pytest.mark.parametrize("case", CASES)
def test_equal_to_hugging_face(tmp_path: Path, case: str) -> None:
    from transformers import AutoModelForCausalLM

    name, changes = CASES[case]
    model = save_tiny(name, tmp_path / "m", **changes)
    policy = load(tmp_path / "m")
    wanted = [wanted_logprobs(model, s) for s in batch()]
    for got, want in zip(policy.logprobs(batch(), 1.0), wanted, strict=True):
        torch.testing.assert_close(got, want, atol=5e-6, rtol=0)
    weights = [0.1 + i * 0.3 + torch.arange(len(w)) * 0.05 for i, w in enumerate(wanted)]
    (-torch.stack([(a * b).sum() for a, b in zip(weights, wanted, strict=True)]).sum() / 20.0).backward()
    policy.train_step(batch(), objective, 1.0)
    source = on_disk({n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()})
    names = [n for n, _ in policy.model.named_parameters()]
    for n, p in policy.model.named_parameters():
        want = local_shard(n, policy.table, policy.dims, place_of(policy.model), source.__getitem__)
        torch.testing.assert_close(p.main_grad, want, atol=1e-6, rtol=0, msg=lambda m, n=n: f"{n}: {m}")
    assert any("linear_qkv.bias" in n for n in names) == ("biases" in case)
    assert any("linear_proj.bias" in n for n in names) == ("biases" in case and name != "qwen2")
    policy.save_hf(tmp_path / "out", tmp_path / "m")  # config and every tensor go out as they came in
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").eval()
    with torch.no_grad():
        for got, s in zip(policy.logprobs(batch(), 1.0), batch(), strict=True):
            torch.testing.assert_close(got, wanted_logprobs(again, s), atol=1e-5, rtol=0)


def test_scaling_left_out_would_be_noticed(tmp_path: Path) -> None:
    """Negative control: the same weights without the scaling give other log-probs."""
    scaled = save_tiny("qwen3", tmp_path / "m", rope_parameters=YARN)
    plain = load(tmp_path / "m")
    plain.model.rope = type(plain.model.rope)(1e4)
    apart = [
        (a - wanted_logprobs(scaled, s)).abs().max() for a, s in zip(plain.logprobs(batch(), 1.0), batch(), strict=True)
    ]
    assert max(apart) > 0.01


def test_dynamic_scaling_beyond_its_positions_is_refused(tmp_path: Path) -> None:
    save_tiny("qwen2", tmp_path / "m", **CASES["dynamic, biases of Qwen2"][1], max_position_embeddings=64)
    with pytest.raises(UserError, match="rope type 'dynamic'"):
        load(tmp_path / "m", length=65)


@pytest.mark.engine
def test_the_engine_follows_training(tmp_path: Path) -> None:
    """vLLM computes the same positions and biases, before a step and, refitted, after it."""
    pytest.importorskip("vllm")
    from pivotrl.config import Generation
    from pivotrl.generation.engine import Sampling
    from pivotrl.generation.vllm_engine import VllmEngine

    changes = {"rope_parameters": YARN, "attention_bias": True, "head_dim": 32, "max_position_embeddings": 64}
    for name in ("llama", "qwen3"):
        save_tiny(name, tmp_path / name, **changes, initializer_range=0.2)
    with pytest.raises(UserError, match=r"has no model\.layers\.0\.self_attn\.o_proj\.bias \(2 biases\)"):
        VllmEngine(tmp_path / "qwen3", Generation(max_sequences=8), "fp32", 64, 0, [])
    policy = load(tmp_path / "llama")
    engine = VllmEngine(tmp_path / "llama", Generation(max_sequences=8), "fp32", 64, 0, [])
    prompts = [list(batch()[0].token_ids[:length]) for length in (8, 32)]

    def apart() -> float:
        groups = engine.generate(prompts, Sampling(temperature=1.0, max_new_tokens=8), 2, [1, 2])
        pairs = [(p, c) for p, group in zip(prompts, groups, strict=True) for c in group]
        ours = policy.logprobs([TokenSequence.of(p, c.token_ids) for p, c in pairs], 1.0)
        return max((a - torch.tensor(c.logprobs)).abs().max().item() for a, (_, c) in zip(ours, pairs, strict=True))

    try:
        assert apart() < 1e-4
        policy.train_step(batch(), objective, 1.0)
        assert apart() > 1e-3  # the engine has still the old weights
        engine.refit(policy.weights_for(engine.layout), 1)
        assert apart() < 1e-4
    finally:
        engine.close()
