"""Small checkpoints for the tests of checkpoint_tools: every element of every tensor has a value of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint_tools.dist_writer import DistWriter
from checkpoint_tools.keys import Style, slots
from checkpoint_tools.sides import Model
from pivotrl.models.folder import ModelFolder
from pivotrl.models.mapping import pack, split

BASE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 8,
    "vocab_size": 11,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,  # not hidden / heads
    "intermediate_size": 16,
    "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6},
    "a_key_that_nobody_knows": {"kept": [1, None, "ü"]},
    "dtype": "float32",
}
MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "moe_intermediate_size": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
HYBRID: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "hybrid_override_pattern": "ME*-",
    "mamba_num_heads": 8,
    "mamba_head_dim": 2,
    "n_groups": 4,
    "ssm_state_size": 2,
    "conv_kernel": 4,
    "n_routed_experts": 4,
    "moe_intermediate_size": 8,
    "moe_shared_expert_intermediate_size": 16,
    "moe_latent_size": 4,
    "num_nextn_predict_layers": 2,
    "mtp_hybrid_override_pattern": "*E",
}
MTP = ("num_nextn_predict_layers", "mtp_hybrid_override_pattern")  # transformers leaves these layers out
CONFIGS: dict[str, dict[str, Any]] = {
    "llama tied": {**BASE, "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True},
    "llama": {**BASE, "architectures": ["LlamaForCausalLM"]},
    "llama with biases": {**BASE, "architectures": ["LlamaForCausalLM"], "attention_bias": True},
    "qwen3 tied": {**BASE, "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
    "moe": {**BASE, **MOE},
    "moe tied, first layer dense": {**BASE, **MOE, "mlp_only_layers": [0], "tie_word_embeddings": True},
    "hybrid moe": {**BASE, **HYBRID},
}


def model_of(config: dict[str, Any], folder: Path) -> Model:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
    return Model.of(ModelFolder(folder))


def tensors_of(model: Model) -> dict[str, Tensor]:
    """A constant a tensor plus a ramp, so that a swapped tensor, row or column shows."""
    made: dict[str, Tensor] = {}
    for entry in model.table.values():
        for name, shape in zip(entry.hf, entry.shapes, strict=True):
            ramp = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
            made[name] = 1000.0 * (len(made) + 1) + ramp
    return made


def save_hf(config: dict[str, Any], folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A Hugging Face folder with a tokenizer file and a template beside the weights."""
    from safetensors.torch import save_file

    made = {n: t.to(dtype) for n, t in tensors_of(model_of(config, folder)).items()}
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "generation_config.json").write_text('{"top_k": 20}')
    return made


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return set(a) == set(b) and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def read_all(folder: Path) -> dict[str, Tensor]:
    model = ModelFolder(folder)
    return {n: model.tensor(n) for n in model.file_of}


def save_as_ranks(
    config: dict[str, Any],
    root: Path,
    folder: Path,
    tp: int,
    ep: int,
    etp: int,
    pp: int,
    style: Style,
    prefix: str = "",
) -> None:
    """The checkpoint that ranks of a parallel layout leave: each rank's shards are pieces, spread over files."""
    model = model_of(config, root)
    made = tensors_of(model)
    folder.mkdir(parents=True)
    writer = DistWriter(folder)
    for name, entry in model.table.items():
        whole = pack(entry, [made[n] for n in entry.hf], model.dims)
        size = etp if entry.rule.expert else tp
        stage = 0 if entry.layer is None else entry.layer // (model.dims.layers // pp)
        expert_rank = 0 if entry.expert is None else entry.expert // (model.dims.experts // ep)
        first = 0
        for where in slots(name, entry, model.dims, style):
            full = whole[first : first + (where.rows or len(whole))]
            first += len(full)
            for rank in range(1 if entry.rule.axis is None else size):
                # a section of rows is split as a plain tensor is
                shard = full.chunk(size, 0)[rank] if where.rows else split(entry, full, rank, size)
                halves = shard.chunk(2, 0) if entry.rule.layout == "gate_up" else (shard,)
                for number, part in enumerate(halves):
                    offsets = [0] * shard.dim()
                    rows = part.shape[0] * size * len(halves)
                    sizes = [rows, *full.shape[1:]] if entry.rule.layout == "vocab" else list(full.shape)
                    if entry.rule.axis is not None:
                        offsets[entry.rule.axis] = (number * size + rank) * part.shape[entry.rule.axis]
                    writer.add(
                        prefix + where.key,
                        (*where.leading, *sizes),
                        (*where.index, *offsets),
                        part[(None,) * len(where.index)],
                        stream=(stage + rank + expert_rank) % 3,
                    )
    writer.finish({"iteration": 120})
