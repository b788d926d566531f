"""Refits of engines that serve FP8 in blocks: values and scales, parts of ranks, what the checks see."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from pivotrl.errors import UserError
from pivotrl.generation.quantised import Quantiser
from pivotrl.generation.refit_verify import RefitVerifier
from pivotrl.generation.vllm_refit import is_finite
from pivotrl.models import block_fp8
from pivotrl.models.fp8_folder import fp8_copy
from pivotrl.models.mapping import plan
from pivotrl.models.registry import family_for
from tests.checkpoint_makers import CONFIGS, read_all, save_hf

NAME = "up_proj.weight"


@settings(max_examples=15)
@given(ranks=st.sampled_from([1, 2, 4]), axis=st.sampled_from([0, 1]), odd=st.integers(0, 127))
def test_the_parts_of_all_ranks_are_the_whole_quantised(ranks: int, axis: int, odd: int) -> None:
    shape = [128 * ranks, 128 * ranks]
    shape[1 - axis] += odd
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(odd))
    shapes = {NAME: tuple(shape), NAME + block_fp8.SCALE: block_fp8.scale_shape((shape[0], shape[1]))}
    quantiser = Quantiser(shapes)
    whole = dict(quantiser.split(NAME, weight))
    for rank in range(ranks):
        box = tuple((128 * rank, 128 * (rank + 1)) if i == axis else (0, n) for i, n in enumerate(shape))
        scale_box = quantiser.scale_boxes({NAME: box}, shapes)[NAME + block_fp8.SCALE]
        assert scale_box is not None
        part = dict(quantiser.split(NAME, weight[tuple(slice(*b) for b in box)]))
        for name, at in ((NAME, box), (NAME + block_fp8.SCALE, scale_box)):
            want = whole[name][tuple(slice(*b) for b in at)].contiguous()
            assert torch.equal(part[name].view(torch.uint8), want.view(torch.uint8))


def test_a_rank_must_not_cut_a_block() -> None:
    shapes = {NAME: (192, 128), NAME + block_fp8.SCALE: (2, 1)}
    with pytest.raises(UserError, match=r"tensor_parallel: .*up_proj.weight cuts an FP8 block of 128"):
        Quantiser(shapes).scale_boxes({NAME: ((0, 96), (0, 128))}, shapes)


class Served(nn.Module):
    """One FP8 linear layer as vLLM serves it."""

    def __init__(self, values: torch.Tensor, scales: torch.Tensor) -> None:
        super().__init__()
        self.up_proj = nn.Module()
        self.up_proj.register_parameter("weight", nn.Parameter(values, requires_grad=False))
        self.up_proj.register_parameter("weight_scale_inv", nn.Parameter(scales, requires_grad=False))


@pytest.mark.parametrize("fault", ["none", "reordered", "stale value", "stale scale", "widened"])
def test_what_the_check_sees(fault: str) -> None:
    quantiser = Quantiser({NAME: (256, 128), NAME + block_fp8.SCALE: (2, 1)})
    torch.manual_seed(3)
    weight = torch.randn(256, 128)
    verifier = RefitVerifier([NAME], torch.bfloat16, 0)
    for name, part in quantiser.split(NAME, weight):
        verifier.sent(name, part)
    values, scales = block_fp8.quantise(NAME, weight)
    if fault == "reordered":  # a kernel's own layout
        values = values.view(torch.uint8).flatten().flip(0).view(256, 128).view(block_fp8.FP8)
    elif fault == "stale value":
        values.view(torch.uint8)[3, 3] ^= 1
    elif fault == "stale scale":
        scales[1] *= 1 + 1e-6
    elif fault == "widened":
        values = values.to(torch.bfloat16)
    report = verifier.compare(Served(values, scales))
    wrong = {"stale value": [NAME], "stale scale": [NAME + block_fp8.SCALE]}.get(fault, [])
    assert report.different == wrong
    assert report.unverified == ([NAME] if fault == "widened" else [])


def test_a_nan_among_fp8_values_is_seen() -> None:
    values = torch.zeros(4, 4).to(block_fp8.FP8)
    assert is_finite(values)
    for byte in (0x7F, 0xFF):
        values.view(torch.uint8)[2, 1] = byte
        assert not is_finite(values)


def test_the_engine_s_copy_is_made_once_and_anew_for_other_weights(tmp_path: Path) -> None:
    source = save_hf(CONFIGS["moe"], tmp_path / "hf", torch.bfloat16)
    made = fp8_copy(tmp_path / "hf", tmp_path / "run" / "engine_fp8")
    stored, config = read_all(made), json.loads((made / "config.json").read_text())
    family = family_for(config)
    names = {n for e in plan(family.rules, family.dims(config)).values() if block_fp8.quantised(e) for n in e.hf}
    assert names and set(stored) == set(source) | {n + block_fp8.SCALE for n in names}
    for name, tensor in source.items():
        if name in names:
            values, scales = block_fp8.quantise(name, tensor)
            assert torch.equal(values.view(torch.uint8), stored[name].view(torch.uint8))
            assert torch.equal(scales, stored[name + block_fp8.SCALE])
        else:
            assert torch.equal(stored[name], tensor)
    assert Quantiser.of(made, {}) is not None and Quantiser.of(tmp_path / "hf", {}) is None
    before = (made / "config.json").stat().st_mtime_ns
    fp8_copy(tmp_path / "hf", made)
    assert (made / "config.json").stat().st_mtime_ns == before
    weights = next((tmp_path / "hf").glob("*.safetensors"))
    os.utime(weights, ns=(1, 1))
    fp8_copy(tmp_path / "hf", made)
    assert (made / "config.json").stat().st_mtime_ns != before
    assert fp8_copy(made, tmp_path / "again") == made and not (tmp_path / "again").exists()
    assert load_file(next(made.glob("*.safetensors")))
