"""The estimate of memory against what a training step of small models really holds, within 15 %."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from launch import memory
from pivotrl.config import Config, Optimizer, Parallel, Precision
from pivotrl.models.folder import ModelFolder
from pivotrl.policy.policy import MegatronPolicy, PairBatch
from pivotrl.policy.prefix_tree import TokenSequence
from pivotrl.policy.state import _runs
from tests.tiny_models import save_tiny

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_hidden_layers": 4,
}
EXPERTS = {"moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [0]}
HYBRID = {
    "hybrid_override_pattern": "MEM*-ME",
    "mamba_num_heads": 16,
    "mamba_head_dim": 32,
    "chunk_size": 128,
    "moe_intermediate_size": 128,
    "moe_latent_size": 96,
}
TOKENS = 600


class Saved:
    """Bytes of what autograd keeps for a backward, now and at most; storages count once, weights never."""

    def __init__(self, weights: list[Tensor]) -> None:
        self.weights = {p.untyped_storage().data_ptr() for p in weights}
        self.holders: Counter[int] = Counter()
        self.now = self.peak = 0

    def pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self.weights:
            return tensor
        return _Holder(self, tensor, storage.data_ptr(), storage.nbytes())


class _Holder:
    def __init__(self, saved: Saved, tensor: Tensor, address: int, size: int) -> None:
        self.saved, self.tensor, self.address, self.size = saved, tensor, address, size
        if saved.holders[address] == 0:
            saved.now += size
            saved.peak = max(saved.peak, saved.now)
        saved.holders[address] += 1

    def __del__(self) -> None:
        self.saved.holders[self.address] -= 1
        if self.saved.holders[self.address] == 0:
            self.saved.now -= self.size


def unpack(kept: Any) -> Tensor:
    tensor: Tensor = kept.tensor if isinstance(kept, _Holder) else kept
    return tensor


def one_step(policy: MegatronPolicy) -> int:
    """Most bytes that autograd kept in a step on a tree of 600 tokens, every one of them with a target."""
    g = torch.Generator().manual_seed(0)
    sequence = TokenSequence(tuple(torch.randint(0, 120, (TOKENS,), generator=g).tolist()), tuple(range(1, TOKENS)))

    def objective(logprobs: Tensor, entropy: Tensor, pairs: PairBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return -logprobs.mean(), {}

    saved = Saved(list(policy.model.parameters()))
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, unpack):
        policy.train_step([sequence], objective, 1.0)
    return saved.peak


@pytest.mark.parametrize(
    ("name", "precision", "recompute"),
    [
        ("llama", "fp32", False),
        ("llama", "bf16", False),
        ("qwen3", "fp32", True),
        ("qwen3_moe", "fp32", False),
        ("nemotron_h", "bf16", False),
        ("nemotron_h", "fp32", False),
    ],
)
def test_estimate_is_within_fifteen_percent(tmp_path: Path, name: str, precision: str, recompute: bool) -> None:
    own = {"qwen3_moe": EXPERTS, "nemotron_h": {"num_hidden_layers": 7, **HYBRID}}.get(name, {})
    save_tiny(name, tmp_path / "m", **{**SIZES, **own})
    settings = Optimizer(1e-3, tokens_per_microbatch=TOKENS, recompute=recompute)
    policy = MegatronPolicy.load(tmp_path / "m", Parallel(), Precision(policy=precision), settings, TOKENS, 4, seed=0)
    activations = one_step(policy)
    weights = sum(p.nbytes for p in policy.model.parameters())
    gradients = sum(
        b.grad_data.nbytes for b in (*policy.wrapped[0].buffers, *policy.wrapped[0].expert_parallel_buffers)
    )
    own = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}
    optimiser = sum(
        t.nbytes for run in _runs(policy) for t in run.state.values() if t.untyped_storage().data_ptr() not in own
    )

    cfg = Config()
    cfg.precision.policy, cfg.algorithm.optimizer = precision, settings
    cfg.model.context_length = TOKENS
    model = memory.read_model(ModelFolder(tmp_path / "m").config)
    estimate = memory.training_gib(model, cfg, 1)
    measured = {"weights": weights, "gradients": gradients, "optimiser": optimiser, "activations": activations}
    print({key: round(estimate[key] * memory.GIB / value, 3) for key, value in measured.items()})
    for key, value in measured.items():
        assert estimate[key] * memory.GIB == pytest.approx(value, rel=0.15), key


def test_kv_cache_is_that_of_hugging_face(tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path / "m", **SIZES)
    with torch.no_grad():
        cache = model(torch.zeros(1, 40, dtype=torch.long), use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    cfg = Config()
    cfg.precision.engine, cfg.model.context_length = "fp32", 40
    estimate = memory.engine_gib(memory.read_model(ModelFolder(tmp_path / "m").config), cfg)
    assert estimate["KV cache of one sequence"] * memory.GIB == pytest.approx(held)
