"""Qwen3 mixture of experts (30B-A3B and its relatives): per-expert tensors as they are on disk.

transformers 5 fuses the experts in its state dict but still writes one tensor per expert and projection; the names
here are those of the files, which vLLM reads too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pivotrl.errors import UserError
from pivotrl.models.dims import Dims, HFConfig, dense_dims, megatron_kwargs, need
from pivotrl.models.families import llama, qwen3
from pivotrl.models.mapping import Rule

ARCHITECTURES = ("Qwen3MoeForCausalLM",)
IGNORED = llama.IGNORED

_M, _H = "decoder.layers.{layer}.mlp.", "model.layers.{layer}.mlp."
_E = "experts.local_experts.{expert}."

EXPERTS = (
    Rule(_M + "router.weight", (_H + "gate.weight",), (("experts", "hidden"),), where="moe"),
    Rule(
        _M + _E + "linear_fc1.weight",
        (_H + "experts.{expert}.gate_proj.weight", _H + "experts.{expert}.up_proj.weight"),
        (("moe_ffn", "hidden"), ("moe_ffn", "hidden")),
        "gate_up",
        0,
        "moe",
    ),
    Rule(
        _M + _E + "linear_fc2.weight",
        (_H + "experts.{expert}.down_proj.weight",),
        (("hidden", "moe_ffn"),),
        axis=1,
        where="moe",
    ),
)
RULES = qwen3.RULES + EXPERTS


def dims(config: HFConfig) -> Dims:
    base = dense_dims(config)
    step, dense = int(config.get("decoder_sparse_step") or 1), set(config.get("mlp_only_layers") or ())
    return replace(
        base,
        experts=int(config.get("num_experts") or need(config, "num_local_experts")),
        moe_ffn=int(need(config, "moe_intermediate_size")),
        kinds=tuple("moe" if i not in dense and (i + 1) % step == 0 else "dense" for i in range(base.layers)),
    )


def to_megatron_kwargs(config: HFConfig) -> dict[str, Any]:
    d = dims(config)
    if not config.get("norm_topk_prob", False):
        raise UserError(
            "config.json: 'norm_topk_prob: false' is not supported; the router here normalises over the top k"
        )
    return {
        **megatron_kwargs(config, d),
        "qk_layernorm": True,
        "num_moe_experts": d.experts,
        "moe_router_topk": int(need(config, "num_experts_per_tok")),
        "moe_ffn_hidden_size": d.moe_ffn,
        "moe_layer_freq": [int(kind == "moe") for kind in d.kinds],
        # top-k of the logits, then softmax over those k: equal to Qwen3's softmax followed by renormalisation
        "moe_router_pre_softmax": False,
        "moe_router_score_function": "softmax",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
    }
