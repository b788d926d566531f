"""Four gloo processes give what Hugging Face gives, in every layout that they can have (one launch)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pivotrl.policy.prefix_tree import TokenSequence
from tests.parallel.layouts import AUX_LOSS, DESCENT, DESCENT_STEPS, TEMPERATURE, batch, pair_weight, replayed
from tests.tiny_models import balance_loss, on_disk, save_tiny, told_experts

SCRIPT = Path(__file__).with_name("layouts.py")
ROOT = SCRIPT.parents[2]


def logprobs(model: Any, sequences: list[TokenSequence]) -> list[Tensor]:
    found = []
    for s in sequences:
        with told_experts(model, s.experts):
            scores = (model(torch.tensor([s.token_ids])).logits[0] / TEMPERATURE).log_softmax(-1)
        found.append(torch.stack([scores[t - 1, s.token_ids[t]] for t in s.targets]))
    return found


def loss_of(found: list[Tensor]) -> Tensor:
    terms = [(pair_weight(i, torch.arange(len(row))) * row).sum() for i, row in enumerate(found)]
    return -torch.stack(terms).sum()


def reference(model: Any) -> dict[str, Any]:
    """Log-probs, gradients under the names of the files, and the losses of a few steps of torch's own AdamW."""
    found = logprobs(model, batch())
    loss_of(found).backward()
    tied = model.config.tie_word_embeddings
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if not (tied and n == "lm_head.weight")}
    result = {"logprobs": [t.detach() for t in found], "gradients": on_disk(gradients), "losses": []}
    kind = model.config.model_type
    if kind in ("qwen3_moe", "nemotron_h"):
        with torch.no_grad():
            result["replayed"] = logprobs(model, replayed(kind))
    if kind == "qwen3_moe":
        model.zero_grad()
        balance = AUX_LOSS * balance_loss(model, batch())
        balance.backward()
        own = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        result |= {"balanced": on_disk(own), "aux_loss": balance.item()}
    adam = torch.optim.AdamW(
        model.parameters(), DESCENT.learning_rate, (DESCENT.beta1, DESCENT.beta2), DESCENT.epsilon, weight_decay=0.0
    )
    for _ in range(DESCENT_STEPS):
        adam.zero_grad()
        loss = loss_of(logprobs(model, batch()))
        loss.backward()
        adam.step()
        result["losses"].append(loss.item())
    return result


@pytest.mark.parallel
def test_layouts_of_four_processes_equal_hugging_face(tmp_path: Path) -> None:
    models = {
        # odd: does not divide over two ranks
        "llama": save_tiny("llama", tmp_path / "llama", vocab_size=121, num_hidden_layers=4),
        "qwen3_moe": save_tiny("qwen3_moe", tmp_path / "qwen3_moe", num_hidden_layers=4),
        "nemotron_h": save_tiny("nemotron_h", tmp_path / "nemotron_h"),
    }
    for name, model in models.items():
        torch.save(reference(model), tmp_path / f"{name}.reference")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command += [str(SCRIPT), str(tmp_path)]
    result = subprocess.run(command, env=environment, timeout=900, capture_output=True, text=True, check=False)
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr[-4000:]
