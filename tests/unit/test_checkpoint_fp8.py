"""FP8 in blocks: scales are right, config says what was quantised, and what was read back is near what went in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from checkpoint_tools import convert, verify
from checkpoint_tools.convert import hf_to_megatron, megatron_to_hf
from pivotrl.errors import UserError
from pivotrl.models import block_fp8
from tests.checkpoint_makers import CONFIGS, read_all, save_hf
from tests.true_configs import QWEN3_30B_A3B


@settings(max_examples=25)
@given(rows=st.integers(1, 300), columns=st.integers(1, 300), scale=st.floats(-30, 30), seed=st.integers(0, 99))
def test_every_block_has_its_own_scale(rows: int, columns: int, scale: float, seed: int) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 10**scale
    values, scales = block_fp8.quantise("w", weight)
    assert values.dtype == torch.float8_e4m3fn and values.shape == weight.shape
    assert tuple(scales.shape) == (-(-rows // 128), -(-columns // 128)) and scales.dtype == torch.float32
    back = block_fp8.dequantise(values, scales, (128, 128), torch.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            largest = weight[at].abs().max()
            torch.testing.assert_close(scales[i, j], largest / 448, rtol=1e-6, atol=1e-38)
            assert values[at].float().abs().max() == 448
            # 3 bits of mantissa, and below 2^-6 of scale steps of 2^-9
            bound = weight[at].abs() * 2**-4 + scales[i, j] * 2**-10
            assert ((back[at] - weight[at]).abs() <= bound * (1 + 1e-5)).all()


def test_zeros_and_what_is_not_finite() -> None:
    values, scales = block_fp8.quantise("w", torch.zeros(130, 5))
    assert not values.float().any() and scales.eq(1).all()
    for bad in (float("nan"), float("inf")):
        with pytest.raises(UserError, match=r"w: holds NaN"):
            block_fp8.quantise("w", torch.tensor([[1.0, bad]]))


def test_export_and_import(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save_hf(CONFIGS["moe"], tmp_path / "hf", torch.bfloat16)
    hf_to_megatron(tmp_path / "hf", tmp_path / "megatron")
    command = ["megatron-to-hf", str(tmp_path / "megatron"), str(tmp_path / "fp8"), "--dtype", "fp8"]
    assert convert.main([*command, "--shard-size", "5KB"]) == 0
    stored = read_all(tmp_path / "fp8")
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    gates = [f"model.layers.{i}.mlp.gate" for i in range(4)]
    assert config == {
        **CONFIGS["moe"],
        "dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": [*gates, "lm_head"],
        },
    }
    quantised = {n.removesuffix("_scale_inv") for n in stored if n.endswith("_scale_inv")}
    assert quantised == {n for n in source if n.endswith("proj.weight")}
    assert set(stored) == set(source) | {n + "_scale_inv" for n in quantised}
    for name, value in stored.items():
        if name in quantised:
            assert value.dtype == torch.float8_e4m3fn
            back = block_fp8.dequantise(value, stored[name + "_scale_inv"], (128, 128), torch.float32)
            torch.testing.assert_close(back, source[name].float(), rtol=2**-4, atol=0)
        elif name in source:
            assert torch.equal(value, source[name])
    # back again: read as the dtype of config.json, and its config says nothing of FP8 any more
    hf_to_megatron(tmp_path / "fp8", tmp_path / "again")
    megatron_to_hf(tmp_path / "again", tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    assert verify.verify(tmp_path / "fp8", tmp_path / "plain").same(0.0)
    far = verify.verify(tmp_path / "fp8", tmp_path / "megatron")
    assert not far.same(0.0) and set(far.differences) <= quantised
    assert convert.main([*command, "--force", "--source", str(tmp_path / "fp8")]) == 0
    assert set(read_all(tmp_path / "fp8")) == set(stored)
    capsys.readouterr()


@pytest.mark.parametrize("damage", ["scale absent", "scale misshapen", "other method"])
def test_damaged_fp8_folders_are_named(damage: str, tmp_path: Path) -> None:
    save_hf(CONFIGS["llama"], tmp_path / "hf")
    hf_to_megatron(tmp_path / "hf", tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "fp8", dtype=block_fp8.FP8)
    file, name = tmp_path / "fp8" / "model.safetensors", "model.layers.1.mlp.up_proj.weight_scale_inv"
    tensors = load_file(file)
    if damage == "scale absent":
        del tensors[name]
    elif damage == "scale misshapen":
        tensors[name] = torch.ones(3, 1)
    else:
        config = json.loads((tmp_path / "fp8" / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "awq", "bits": 4}
        (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    save_file(tensors, file)
    with pytest.raises(UserError, match="'awq'" if damage == "other method" else name):
        hf_to_megatron(tmp_path / "fp8", tmp_path / "m")


def test_what_is_quantised_in_the_true_model(tmp_path: Path) -> None:
    """As Qwen3-30B-A3B-FP8 has it: all projections, neither routers nor head, embedding or norms."""
    from tests.checkpoint_makers import model_of

    model = model_of(QWEN3_30B_A3B, tmp_path)
    names = {n for e in model.table.values() if block_fp8.quantised(e) for n in e.hf}
    assert names == {n for e in model.table.values() for n in e.hf if n.endswith("_proj.weight")}
    kept = block_fp8.config_of(model.table.values())["modules_to_not_convert"]
    assert kept == [*(f"model.layers.{i}.mlp.gate" for i in range(48)), "lm_head"]
