"""Tensor mappings: every rank's shards come from the right tensors, go back bit-equal, and misfits are named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pivotrl.errors import UserError
from pivotrl.models.dims import Dims
from pivotrl.models.folder import ModelFolder
from pivotrl.models.mapping import (
    Entry,
    Place,
    check_source,
    global_name,
    local_shard,
    merge,
    pack,
    plan,
    split,
    unpack,
)
from pivotrl.models.registry import FAMILIES, Family, family_for
from tests.checkpoint_makers import HYBRID, MTP

BASE = {
    "num_hidden_layers": 4,
    "hidden_size": 8,
    "vocab_size": 11,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 12,
}
MOE = {
    "num_experts": 4,
    "moe_intermediate_size": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
}
CONFIGS = {
    "hybrid": {**BASE, **{k: v for k, v in HYBRID.items() if k not in MTP}},
    "tied llama": {**BASE, "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True},
    "llama": {**BASE, "architectures": ["LlamaForCausalLM"]},
    "qwen3": {**BASE, "architectures": ["Qwen3ForCausalLM"]},
    "moe": {**BASE, **MOE, "architectures": ["Qwen3MoeForCausalLM"]},
    "qwen2": {**BASE, "architectures": ["Qwen2ForCausalLM"]},
    "biased moe": {**BASE, **MOE, "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": True},
}


def made(config: dict[str, Any]) -> tuple[Family, Dims, dict[str, Entry], dict[str, Tensor]]:
    """A family and tensors: each has its own constant, plus a ramp that shows any mixed-up row or column."""
    family = family_for(config)
    dims = family.dims(config)
    table = plan(family.rules, dims)
    tensors: dict[str, Tensor] = {}
    for entry in table.values():
        for name, shape in zip(entry.hf, entry.shapes, strict=True):
            ramp = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
            tensors[name] = 1000.0 * (len(tensors) + 1) + ramp
    return family, dims, table, tensors


def local_names(table: dict[str, Entry], dims: Dims, place: Place, stages: int) -> Iterator[str]:
    """Names of the parameters of one rank, as megatron-core numbers them there."""
    per_stage, per_rank = dims.layers // stages, dims.experts // place.ep_size
    first, last = place.layer_offset == 0, place.layer_offset + per_stage == dims.layers
    for name, entry in table.items():
        if entry.layer is None:
            if first if name.startswith("embedding.") else last:
                yield name
            continue
        if not place.layer_offset <= entry.layer < place.layer_offset + per_stage:
            continue
        if entry.expert is not None and entry.expert // per_rank != place.ep_rank:
            continue
        name = name.replace(f".layers.{entry.layer}.", f".layers.{entry.layer - place.layer_offset}.")
        if entry.expert is not None:
            name = name.replace(f"experts.{entry.expert}.", f"experts.{entry.expert - place.ep_rank * per_rank}.")
        yield name
    if dims.tied and last and not first:
        yield "output_layer.weight"


@pytest.mark.parametrize(
    ("local", "name"),
    [
        ("decoder.layers.0.input_layernorm.weight", "decoder.layers.0.norm.weight"),
        ("decoder.layers.0.self_attention.conv1d.bias", "decoder.layers.0.mixer.conv1d.bias"),
        ("decoder.layers.0.self_attention.norm.weight", "decoder.layers.0.mixer.norm.weight"),
        ("decoder.layers.2.input_layernorm.weight", "decoder.layers.2.input_layernorm.weight"),
        ("decoder.layers.2.self_attention.linear_proj.weight", "decoder.layers.2.self_attention.linear_proj.weight"),
        ("decoder.final_layernorm.weight", "decoder.final_norm.weight"),
    ],
)
def test_a_hybrid_built_of_gpt_layers_has_the_names_of_the_hybrid_model(local: str, name: str) -> None:
    _, dims, table, _ = made(CONFIGS["hybrid"])
    assert global_name(local, Place(), dims) == name
    assert name in table


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("etp", [1, 2])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_round_trip_over_every_layout(kind: str, tp: int, ep: int, etp: int, stages: int) -> None:
    """Field reports A6, A7, H2, H3: no shard for a whole, no local number for a global one, no extra, none missing."""
    _, dims, table, tensors = made(CONFIGS[kind])
    shards: dict[str, dict[int, Tensor]] = {}
    for stage in range(stages):
        for e in range(ep):
            for t in range(tp):
                for x in range(etp):
                    place = Place(t, tp, e, ep, x, etp, stage * dims.layers // stages)
                    for local in local_names(table, dims, place, stages):
                        shard = local_shard(local, table, dims, place, tensors.__getitem__)
                        name = global_name(local, place, dims)
                        if name == "output_layer.weight" and dims.tied:  # the last stage's copy of the embedding
                            assert torch.equal(
                                shard,
                                split(
                                    table["embedding.word_embeddings.weight"],
                                    tensors["model.embed_tokens.weight"],
                                    t,
                                    tp,
                                ),
                            )
                            continue
                        shards.setdefault(name, {})[place.split(table[name].rule)[0]] = shard
    assert set(shards) == set(table)
    back: dict[str, Tensor] = {}
    for name, parts in shards.items():
        back.update(unpack(table[name], merge(table[name], [parts[i] for i in sorted(parts)]), dims))
    assert set(back) == set(tensors)
    assert all(torch.equal(back[n], tensors[n]) for n in tensors)


def test_experts_of_the_second_rank_are_the_global_ones() -> None:
    _, dims, table, tensors = made(CONFIGS["moe"])
    place = Place(ep_rank=1, ep_size=2)
    shard = local_shard(
        "decoder.layers.1.mlp.experts.local_experts.0.linear_fc2.weight", table, dims, place, tensors.__getitem__
    )
    assert torch.equal(shard, tensors["model.layers.1.mlp.experts.2.down_proj.weight"])


def test_qkv_is_interleaved_by_group_and_gate_up_is_split_by_half() -> None:
    _, dims, table, tensors = made(CONFIGS["qwen3"])
    qkv = local_shard(
        "decoder.layers.0.self_attention.linear_qkv.weight", table, dims, Place(1, 2), tensors.__getitem__
    )
    q, k = (tensors[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qk")
    assert torch.equal(qkv[:8], q[8:]) and torch.equal(qkv[8:12], k[4:])
    fc1 = local_shard("decoder.layers.0.mlp.linear_fc1.weight", table, dims, Place(1, 2), tensors.__getitem__)
    gate, up = (tensors[f"model.layers.0.mlp.{x}_proj.weight"] for x in ("gate", "up"))
    assert torch.equal(fc1, torch.cat([gate[6:], up[6:]]))


def test_head_exists_iff_untied() -> None:
    for kind, config in CONFIGS.items():
        assert ("output_layer.weight" in made(config)[2]) == (kind != "tied llama")


def test_moe_layer_pattern() -> None:
    """Field report H8: first layer dense, three with experts."""
    family = family_for(CONFIGS["moe"])
    assert family.to_megatron_kwargs(CONFIGS["moe"])["moe_layer_freq"] == [0, 1, 1, 1]


@pytest.mark.parametrize("change", ["missing", "unknown", "misshapen"])
def test_misfits_are_named(change: str) -> None:
    """Field reports A9, H7."""
    family, dims, table, tensors = made(CONFIGS["moe"])
    shapes = {n: tuple(t.shape) for n, t in tensors.items()}
    ignored = family.ignored_names(dims)
    check_source(table, {**shapes, "model.layers.0.self_attn.rotary_emb.inv_freq": (2,)}, ignored, "here")
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    if change == "missing":
        del shapes[name]
    elif change == "unknown":
        name = "model.layers.2.mlp.experts.4.up_proj.weight"
        shapes[name] = (6, 8)
    else:
        shapes[name] = (3, 8)
    with pytest.raises(UserError, match=f"(?s)here.*{name}"):
        check_source(table, shapes, ignored, "here")


def test_a_shard_is_never_taken_for_the_whole() -> None:
    _, dims, table, tensors = made(CONFIGS["moe"])
    entry = table["decoder.layers.1.mlp.experts.local_experts.0.linear_fc1.weight"]
    full = pack(entry, [tensors[n] for n in entry.hf], dims)
    with pytest.raises(ValueError, match="a shard is missing"):
        unpack(entry, split(entry, full, 0, 2), dims)


def test_padded_vocabulary_is_trimmed() -> None:
    _, _, table, tensors = made(CONFIGS["llama"])
    entry, full = table["output_layer.weight"], tensors["lm_head.weight"]
    parts = [split(entry, full, r, 4) for r in range(4)]
    assert {p.shape[0] for p in parts} == {3} and torch.equal(merge(entry, parts), full)


def test_unknown_architecture_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"GPT2LMHeadModel.*LlamaForCausalLM.*Qwen3MoeForCausalLM"):
        family_for({"architectures": ["GPT2LMHeadModel"]})
    assert {f.name for f in FAMILIES} == {"llama", "nemotron_h", "qwen2", "qwen3", "qwen3_moe"}


@pytest.mark.parametrize("key", ["mlp_bias", "use_sliding_window"])
def test_settings_that_change_the_computation_are_refused(key: str) -> None:
    config = {**CONFIGS["llama"], key: True}
    with pytest.raises(UserError, match=key):
        family_for(config).to_megatron_kwargs(config)


def test_folder_reads_lazily_and_names_what_lacks(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    with pytest.raises(UserError, match=r"config\.json"):
        _ = ModelFolder(tmp_path).config
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="safetensors"):
        _ = ModelFolder(tmp_path).shapes
    save_file({"a": torch.ones(2, 3)}, tmp_path / "one.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"two\.safetensors"):
        _ = ModelFolder(tmp_path).shapes
    save_file({"b": torch.zeros(4)}, tmp_path / "two.safetensors")
    folder = ModelFolder(tmp_path)
    assert folder.shapes == {"a": (2, 3), "b": (4,)} and torch.equal(folder.tensor("b"), torch.zeros(4))
    with pytest.raises(UserError, match="no tensor c"):
        folder.tensor("c")
