"""A real policy gives its memory back and takes it again, to the bit; training goes on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from pivotrl.config import Optimizer, Parallel, Precision
from pivotrl.policy.policy import MegatronPolicy, PairBatch
from pivotrl.policy.prefix_tree import TokenSequence
from tests.tiny_models import save_tiny

SEQUENCES = [TokenSequence.of([1, 2, 3, 4], [5 + i, 9, 11]) for i in range(3)]


def objective(logprobs: Tensor, entropy: Tensor, pairs: PairBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return -logprobs.sum() / 9.0, {}


def load(folder: Path, precision: str, cpu_offload: bool = False) -> MegatronPolicy:
    settings = Optimizer(learning_rate=1e-3, cpu_offload=cpu_offload)
    return MegatronPolicy.load(folder, Parallel(), Precision(policy=precision), settings, 64, 200, seed=0)


def state(policy: MegatronPolicy) -> dict[str, Tensor]:
    """All that a step depends on and leaves behind, by name."""
    found = {f"parameter {n}": p.data for n, p in policy.model.named_parameters()}
    found |= {f"gradient {n}": p.main_grad for n, p in policy.model.named_parameters()}
    found |= {f"optimizer {i}": t for i, t in enumerate(policy.memory._states())}
    return found


@pytest.mark.parametrize(("name", "precision"), [("llama", "fp32"), ("qwen3_moe", "bf16")])
def test_fifty_cycles_change_no_bit_and_leak_nothing(tmp_path: Path, name: str, precision: str) -> None:
    save_tiny(name, tmp_path / name)
    policy, undisturbed = load(tmp_path / name, precision), load(tmp_path / name, precision)
    for p in (policy, undisturbed):
        p.train_step(SEQUENCES, objective, 1.0)
    before = {n: t.clone() for n, t in state(policy).items()}
    assert sum(n.startswith("optimizer") for n in before) > 2
    buffers = []
    for _ in range(50):
        freed = policy.memory.release("gradients", "optimizer")
        assert freed and not any(p.main_grad.untyped_storage().nbytes() for p in policy.model.parameters())
        logprobs = policy.logprobs(SEQUENCES[:1], 1.0) if len(buffers) == 1 else None  # parameters are still here
        freed += policy.memory.release("parameters")
        assert not any(p.untyped_storage().nbytes() for p in policy.model.parameters())
        assert policy.memory.restore("parameters", "gradients", "optimizer") == freed
        buffers.append(sum(b.numel() for s in policy.memory._stashes.values() for b in s._buffers))
        if logprobs is not None:
            assert torch.equal(policy.logprobs(SEQUENCES[:1], 1.0)[0], logprobs[0])
    assert len(set(buffers)) == 1
    for n, tensor in state(policy).items():
        assert torch.equal(tensor.view(torch.uint8), before[n].view(torch.uint8)), n
    policy.memory.release("gradients", keep_gradients=False)
    policy.memory.restore("gradients")
    for _ in range(2):
        assert policy.train_step(SEQUENCES, objective, 1.0) == undisturbed.train_step(SEQUENCES, objective, 1.0)
    for (n, a), (_, b) in zip(policy.hf_weights(), undisturbed.hf_weights(), strict=True):
        assert torch.equal(a, b), n


@pytest.mark.parametrize(("name", "precision"), [("llama", "fp32"), ("qwen3_moe", "bf16")])
def test_states_that_live_on_the_host_change_no_bit(tmp_path: Path, name: str, precision: str) -> None:
    save_tiny(name, tmp_path / name)
    away, here = load(tmp_path / name, precision, cpu_offload=True), load(tmp_path / name, precision)
    held: list[int] = []

    def watched(logprobs: Tensor, entropy: Tensor, pairs: PairBatch) -> tuple[Tensor, dict[str, Tensor]]:
        held.append(sum(t.untyped_storage().nbytes() for t in away.memory._states()))  # beside the activations
        return objective(logprobs, entropy, pairs)

    for _ in range(3):
        assert away.train_step(SEQUENCES, watched, 1.0) == here.train_step(SEQUENCES, objective, 1.0)
        away.memory.restore("parameters", "gradients", "optimizer")  # the engine's turn is over: it stays away
    assert held == [0, 0, 0]
    with away.memory.resident():  # to be saved
        assert sum(t.untyped_storage().nbytes() for t in away.memory._states()) > 0
        for a, b in zip(away.memory._states(), here.memory._states(), strict=True):
            assert torch.equal(a, b)
    assert away.memory.released == ["optimizer"]
    for (n, a), (_, b) in zip(away.hf_weights(), here.hf_weights(), strict=True):
        assert torch.equal(a, b), n
