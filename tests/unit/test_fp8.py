"""FP8 as arithmetic: which machine runs which recipe, how many rows, which sizes, what megatron-core is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pivotrl import fp8
from pivotrl.config import Parallel, Precision
from pivotrl.fp8 import Machine
from pivotrl.models.dims import Dims
from pivotrl.models.mapping import Place, global_name

HOPPER = Machine((9, 0), (2, 9), (12, 9))
BLACKWELL = Machine((10, 0), (2, 9), (13, 0))
DIMS = Dims(
    layers=48, hidden=2048, vocab=151936, heads=32, kv_heads=4, head_dim=128, ffn=6144, moe_ffn=768, experts=128
)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_hopper_runs_all_but_mxfp8(recipe: str) -> None:
    assert fp8.machine_problem(recipe, HOPPER) is None
    assert fp8.machine_problem(recipe, BLACKWELL) is None
    assert fp8.machine_problem("mxfp8", BLACKWELL) is None


@pytest.mark.parametrize(
    ("recipe", "machine", "message"),
    [
        ("blockwise", Machine(None, (2, 9), None), "needs an NVIDIA GPU"),
        ("delayed", replace(HOPPER, engine=None), "needs Transformer Engine 1.11 or newer: pip install"),
        ("blockwise", replace(HOPPER, engine=(2, 2)), "needs Transformer Engine 2.3, 2.2 is installed"),
        ("tensorwise", replace(HOPPER, capability=(8, 0)), r"this one has 8.0 \(it can: none\)"),
        ("blockwise", replace(HOPPER, capability=(8, 9)), r"it can: delayed, tensorwise\)"),
        ("mxfp8", HOPPER, "10.0 or newer, below 12.0; this one has 9.0"),
        ("mxfp8", replace(BLACKWELL, capability=(12, 0)), "it can: delayed, tensorwise, blockwise"),
        ("blockwise", replace(HOPPER, cuda=(12, 4)), "needs CUDA 12.9, torch was built for 12.4"),
    ],
)
def test_what_cannot_run_says_why(recipe: str, machine: Machine, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(fp8.machine_problem(recipe, machine))


@pytest.mark.parametrize(
    ("parallel", "recipe", "rows"),
    [
        (Parallel(), None, 1),
        (Parallel(tensor=4, sequence=True), None, 4),
        (Parallel(context=2), None, 32),
        (Parallel(tensor=3, sequence=True, context=2), None, 96),
        (Parallel(), "delayed", 16),
        (Parallel(tensor=4), "mxfp8", 32),  # every rank has all rows
        (Parallel(tensor=4, sequence=True), "mxfp8", 128),
        (Parallel(tensor=2, sequence=True, context=4), "blockwise", 128),
    ],
)
def test_rows_are_multiples_on_every_rank(parallel: Parallel, recipe: str | None, rows: int) -> None:
    assert fp8.row_multiple(parallel, recipe) == rows
    own = rows // parallel.context // (parallel.tensor if parallel.sequence else 1)
    assert own % (fp8.RECIPES[recipe].multiple if recipe else 1) == 0


def test_sizes() -> None:
    dims = replace(DIMS, kinds=("moe",) * 48)
    assert list(fp8.size_problems("mxfp8", dims, Parallel(tensor=4))) == []
    found = list(fp8.size_problems("mxfp8", dims, Parallel(expert_tensor=16)))
    assert len(found) == 1 and "expert width / parallel.expert_tensor is 48" in found[0]
    assert len(list(fp8.size_problems("delayed", replace(dims, hidden=2050), Parallel()))) == 1


def test_settings_are_megatrons() -> None:
    from megatron.core.transformer import TransformerConfig

    for recipe in fp8.RECIPES:
        precision = Precision(fp8=recipe, fp8_last_layers_bf16=0 if recipe == "delayed" else 2)
        assert list(fp8.conflicts(precision, 48, Parallel(pipeline=4))) == []
        config = TransformerConfig(num_layers=8, hidden_size=64, num_attention_heads=4, **fp8.settings(precision))
        assert config.fp8_recipe == recipe
        assert config.num_layers_at_end_in_bf16 == (1 if recipe == "delayed" else 2)
    assert fp8.settings(Precision()) == {}


def test_conflicts() -> None:
    assert "do nothing" in next(fp8.conflicts(Precision(fp8_first_layers_bf16=1), 48, Parallel()))
    assert "another recipe" in next(fp8.conflicts(Precision(fp8="delayed", fp8_last_layers_bf16=1), 48, Parallel()))
    wide = Precision(fp8="mxfp8", fp8_first_layers_bf16=13)
    assert "at most the 12 layers" in next(fp8.conflicts(wide, 48, Parallel(pipeline=4)))


@pytest.mark.parametrize(
    ("fused", "name"),
    [
        ("decoder.layers.1.self_attention.linear_qkv.layer_norm_weight", "decoder.layers.5.input_layernorm.weight"),
        ("decoder.layers.1.mlp.linear_fc1.layer_norm_weight", "decoder.layers.5.pre_mlp_layernorm.weight"),
        (
            "decoder.layers.1.mlp.experts.linear_fc2.weight3",
            "decoder.layers.5.mlp.experts.local_experts.11.linear_fc2.weight",
        ),
        ("decoder.layers.1.mlp.linear_fc1.weight", "decoder.layers.5.mlp.linear_fc1.weight"),
    ],
)
def test_names_of_transformer_engines_modules(fused: str, name: str) -> None:
    dims = Dims(8, 8, 8, 1, 1, 8, 8, experts=16)
    assert global_name(fused, Place(ep_rank=2, ep_size=4, layer_offset=4), dims) == name
