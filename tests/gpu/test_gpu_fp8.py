"""Every FP8 recipe that the GPU at hand can run: near bf16, and it learns. Needs a GPU with Transformer Engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pivotrl import fp8
from pivotrl.config import Experts, Optimizer, Parallel, Precision
from pivotrl.errors import UserError
from pivotrl.policy.machine import this_machine, uses_transformer_engine
from pivotrl.policy.policy import MegatronPolicy
from pivotrl.policy.prefix_tree import TokenSequence
from tests.tiny_models import NAMES, on_disk, save_tiny

pytestmark = pytest.mark.skipif(not uses_transformer_engine(), reason="needs a GPU and Transformer Engine")
SIZES = {"head_dim": 64, "hidden_size": 256, "intermediate_size": 512}
HYBRID = {"mamba_num_heads": 16, "moe_latent_size": 32}  # every side of a product is a multiple of 16
SEQUENCES = [TokenSequence.of([1, 2, 3, 4], [5 + g, 6, 7]) for g in range(4)]


def load(folder: Path, precision: Precision) -> MegatronPolicy:
    return MegatronPolicy.load(folder, Parallel(), precision, Optimizer(1e-3), 64, 10, seed=0, experts=Experts())


def save(name: str, folder: Path) -> Any:
    return save_tiny(name, folder, **SIZES, **(HYBRID if name == "nemotron_h" else {}))


def descend(policy: MegatronPolicy) -> list[float]:
    return [policy.train_step(SEQUENCES, lambda p, *_: (-p.sum() / 12, {}), 1.0)["loss"] for _ in range(8)]


@pytest.mark.parametrize("name", NAMES)
def test_transformer_engine_layers_equal_hugging_face_in_float32(tmp_path: Path, name: str) -> None:
    model = save(name, tmp_path / name)
    policy = load(tmp_path / name, Precision(policy="fp32"))
    for got, s in zip(policy.logprobs(SEQUENCES, 1.0), SEQUENCES, strict=True):
        scores = model(torch.tensor([s.token_ids])).logits[0].log_softmax(-1)
        wanted = torch.stack([scores[t - 1, s.token_ids[t]] for t in s.targets])
        torch.testing.assert_close(got, wanted, atol=5e-2, rtol=0)  # TF32 products
    weights = {n: t.cpu() for n, t in policy.hf_weights()}
    for n, t in on_disk(dict(model.state_dict())).items():
        if n in weights:
            assert torch.equal(weights[n], t), n


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "nemotron_h"])
@pytest.mark.parametrize("recipe", list(fp8.RECIPES))
def test_recipe_is_near_bf16_and_learns(tmp_path: Path, name: str, recipe: str) -> None:
    save(name, tmp_path / name)
    if fp8.machine_problem(recipe, this_machine()):
        with pytest.raises(UserError, match=r"precision\.fp8"):
            load(tmp_path / name, Precision(fp8=recipe))
        return
    plain, quantised = (load(tmp_path / name, Precision(fp8=r)) for r in (None, recipe))
    for a, b in zip(plain.logprobs(SEQUENCES, 1.0), quantised.logprobs(SEQUENCES, 1.0), strict=True):
        assert (a - b).abs().mean() < 0.5
    losses = descend(quantised)
    assert losses[-1] < 0.8 * losses[0]
    assert abs(losses[-1] - descend(plain)[-1]) < 0.5


def test_only_linear_layers_are_quantised(tmp_path: Path) -> None:
    save_tiny("qwen3_moe", tmp_path / "m", **SIZES)
    recipe = next(r for r in fp8.RECIPES if fp8.machine_problem(r, this_machine()) is None)
    model = load(tmp_path / "m", Precision(fp8=recipe)).model
    linear = [n for n, m in model.named_modules() if "Linear" in type(m).__name__ and n.startswith("decoder")]
    quantised = {n.rsplit(".", 1)[-1] for n in linear}
    assert quantised == {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}
    assert not any("TE" in type(m).__name__ for m in (model.embedding.word_embeddings, model.output_layer))
