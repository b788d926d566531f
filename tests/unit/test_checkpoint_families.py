"""A family is one file; the hybrid of Nemotron-3 is one, complete by name and shape without weights."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_tools import inspect
from checkpoint_tools.convert import hf_to_megatron, megatron_to_hf
from checkpoint_tools.keys import default_style, sizes
from pivotrl.errors import UserError
from pivotrl.models import families, registry
from pivotrl.models.mapping import merge, pack, split, unpack
from tests.checkpoint_makers import BASE, CONFIGS, equal, model_of, read_all, save_hf, tensors_of
from tests.true_configs import NEMOTRON_3_SUPER, TRUE

TOY = '''
"""A decoder with one norm a layer and a head of its own."""

from dataclasses import replace

from pivotrl.models.dims import dense_dims, megatron_kwargs
from pivotrl.models.families import llama
from pivotrl.models.mapping import Rule

ARCHITECTURES = ("ToyForCausalLM",)
IGNORED = ()
RULES = (
    *llama.EMBEDDING_AND_HEAD,
    Rule("decoder.layers.{layer}.input_layernorm.weight", ("toy.{layer}.norm",), (("hidden",),)),
    Rule("decoder.layers.{layer}.mlp.linear_fc2.weight", ("toy.{layer}.down",), (("hidden", "bottleneck"),), axis=1),
)


def dims(config):
    return replace(dense_dims(config), extra=(("bottleneck", config["bottleneck"]),))


def to_megatron_kwargs(config):
    return megatron_kwargs(config, dims(config))
'''


def test_a_family_is_added_by_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is then known to the registry, and so to training, refit and conversion."""
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "toy.py").write_text(TOY)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path / "more")])
    monkeypatch.setattr(registry, "FAMILIES", registry.discover())
    try:
        config = {**BASE, "architectures": ["ToyForCausalLM"], "bottleneck": 12}
        wanted = save_hf(config, tmp_path / "hf")
        assert tuple(wanted["toy.2.down"].shape) == (8, 12)
        hf_to_megatron(tmp_path / "hf", tmp_path / "megatron")
        megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
        assert equal(read_all(tmp_path / "back"), wanted)
    finally:
        sys.modules.pop("pivotrl.models.families.toy", None)


def test_nemotron_3_super_is_complete_by_name_and_shape(tmp_path: Path) -> None:
    """transformers' own model of that config, on meta tensors, has these names (under its own prefix) and shapes."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    model = model_of(NEMOTRON_3_SUPER, tmp_path)
    ours = {n: s for e in model.table.values() for n, s in zip(e.hf, e.shapes, strict=True)}
    with torch.device("meta"):
        theirs = NemotronHForCausalLM(NemotronHConfig(**NEMOTRON_3_SUPER)).state_dict()
    wanted: dict[str, tuple[int, ...]] = {}
    for name, tensor in theirs.items():
        name = "backbone." + name.removeprefix("model.") if name.startswith("model.") else name
        if ".experts." in name and "shared" not in name:  # fused in memory, one tensor an expert in files
            base, _, projection = name.rpartition(".")
            wanted.update({f"{base}.{e}.{projection}.weight": tuple(tensor.shape[1:]) for e in range(512)})
        else:
            wanted[name] = tuple(tensor.shape)
    assert {n: s for n, s in ours.items() if not n.startswith("mtp.")} == wanted
    # the block for one further token: attention with what joins embedding and state before it, then experts
    further = {n for n in ours if n.startswith("mtp.")}
    first = {"enorm", "hnorm", "eh_proj", "norm", *(f"mixer.{x}_proj" for x in "qkvo")}
    assert {n for n in further if n.startswith("mtp.layers.0.")} == {f"mtp.layers.0.{n}.weight" for n in first}
    assert len(further) == len(first) + 2 + 2 + 2 + 2 + 2 * 512  # norms, router, latent, shared, routed experts
    assert 120e9 < sum(math.prod(s) for s in wanted.values()) < 121e9


def test_nemotron_3_super_in_megatron(tmp_path: Path) -> None:
    """Names of megatron-core's hybrid model (mamba_mixer.py, moe_layer.py), experts and sections as it stores them."""
    model = model_of(NEMOTRON_3_SUPER, tmp_path)
    written = sizes(model.table, model.dims, default_style(model.dims))
    total = sum(math.prod(s) for e in model.table.values() for s in e.shapes)
    assert sum(math.prod(s) for s in written.values()) == total
    layer = {k.removeprefix("decoder.layers.0."): s for k, s in written.items() if k.startswith("decoder.layers.0.")}
    inner, states = 8192, 1024
    assert layer == {
        "mixer.in_proj.layer_norm_weight": (4096,),
        "mixer.A_log": (128,),
        "mixer.D": (128,),
        "mixer.dt_bias": (128,),
        "mixer.in_proj.weight.z": (inner, 4096),
        "mixer.in_proj.weight.x": (inner, 4096),
        "mixer.in_proj.weight.B": (states, 4096),
        "mixer.in_proj.weight.C": (states, 4096),
        "mixer.in_proj.weight.dt": (128, 4096),
        **{f"mixer.conv1d.weight.{k}": (n, 1, 4) for k, n in (("x", inner), ("B", states), ("C", states))},
        **{f"mixer.conv1d.bias.{k}": (n,) for k, n in (("x", inner), ("B", states), ("C", states))},
        "mixer.norm.weight": (inner,),
        "mixer.out_proj.weight": (4096, inner),
    }
    assert {k.partition("layers.1.")[2]: s for k, s in written.items() if k.startswith("decoder.layers.1.")} == {
        "pre_mlp_layernorm.weight": (4096,),
        "mlp.router.weight": (512, 4096),
        "mlp.router.expert_bias": (512,),
        "mlp.fc1_latent_proj.weight": (1024, 4096),
        "mlp.fc2_latent_proj.weight": (4096, 1024),
        "mlp.experts.experts.linear_fc1.weight": (512, 2688, 1024),
        "mlp.experts.experts.linear_fc2.weight": (512, 1024, 2688),
        "mlp.shared_experts.linear_fc1.weight": (5376, 4096),
        "mlp.shared_experts.linear_fc2.weight": (4096, 5376),
    }
    assert {k.partition("layers.7.")[2]: s for k, s in written.items() if k.startswith("decoder.layers.7.")} == {
        "self_attention.linear_qkv.layer_norm_weight": (4096,),
        "self_attention.linear_qkv.weight": (4096 + 2 * 256, 4096),
        "self_attention.linear_proj.weight": (4096, 4096),
    }


@pytest.mark.parametrize("name", [*TRUE, "nemotron_3_super"])
def test_inspect_shows_both_sides_of_a_config(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = NEMOTRON_3_SUPER if name == "nemotron_3_super" else TRUE[name][0]
    model = model_of(config, tmp_path)
    assert inspect.main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "without weights" in text and "in Megatron:" in text and "word_embeddings.weight" in text
    facts = inspect.describe(tmp_path)
    assert facts["parameters"] == sum(math.prod(s) for e in model.table.values() for s in e.shapes)
    assert sum(math.prod(s) for _, s in facts["megatron"].values()) == facts["parameters"]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_sections_are_split_each_for_itself(size: int, tmp_path: Path) -> None:
    """z, x, B, C and dt of in_proj: each rank has its part of every one, and they come back in order."""
    model = model_of(CONFIGS["hybrid moe"], tmp_path)
    made = tensors_of(model)
    for entry in model.table.values():
        full = pack(entry, [made[n] for n in entry.hf], model.dims)
        shards = [split(entry, full, rank, size) for rank in range(size)]
        assert dict(unpack(entry, merge(entry, shards), model.dims)).keys() == set(entry.hf)
        assert torch.equal(merge(entry, shards), full)
    entry = model.table["decoder.layers.0.mixer.in_proj.weight"]
    rows = torch.arange(entry.shapes[0][0])[:, None].expand(entry.shapes[0])
    z, dt = entry.sections[0][1] // size, entry.sections[-1][1] // size
    last = split(entry, rows, size - 1, size)[:, 0]
    assert last[0] == entry.sections[0][1] - z and last[-1] == len(rows) - 1 and last[-dt] == len(rows) - dt


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hybrid_override_pattern": "MEX-"}, "unknown layers"),
        ({"hybrid_override_pattern": "ME*"}, "num_hidden_layers is 4"),
        ({"hybrid_override_pattern": None}, "neither"),
        ({"use_bias": True}, "use_bias"),
        ({"mamba_num_heads": None}, "mamba_num_heads"),
    ],
)
def test_hybrid_configs_that_make_no_sense(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        model_of({**CONFIGS["hybrid moe"], **change}, tmp_path)


def test_layers_by_word_are_those_by_letter(tmp_path: Path) -> None:
    """The config as transformers 5 saves it."""
    words = {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]}
    spelt = {k: v for k, v in CONFIGS["hybrid moe"].items() if k != "hybrid_override_pattern"} | words
    assert model_of(spelt, tmp_path / "a").dims == model_of(CONFIGS["hybrid moe"], tmp_path / "b").dims


def test_the_hybrid_is_trained_as_its_config_says() -> None:
    family = registry.family_for(NEMOTRON_3_SUPER)
    settings = family.to_megatron_kwargs(NEMOTRON_3_SUPER)
    assert settings["moe_latent_size"] == 1024 and settings["moe_router_topk_scaling_factor"] == 5.0
    assert settings["moe_router_num_groups"] is None and sum(settings["moe_layer_freq"]) == 40
    grouped = family.to_megatron_kwargs({**NEMOTRON_3_SUPER, "n_group": 8, "topk_group": 4})
    assert (grouped["moe_router_num_groups"], grouped["moe_router_group_topk"]) == (8, 4)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("norm_topk_prob", False),
        ("num_experts_per_tok", 1),
        ("mlp_hidden_act", "silu"),
        ("mamba_hidden_act", "relu"),
        ("sliding_window", 4096),
        ("residual_in_fp32", True),
    ],
)
def test_settings_of_a_hybrid_that_would_compute_something_else_are_refused(key: str, value: Any) -> None:
    family = registry.family_for(NEMOTRON_3_SUPER)
    with pytest.raises(UserError, match=key):
        family.to_megatron_kwargs({**NEMOTRON_3_SUPER, key: value})
