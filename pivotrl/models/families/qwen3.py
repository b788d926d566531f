"""Qwen3 dense: Llama with RMSNorm on queries and keys."""

from __future__ import annotations

from typing import Any

from pivotrl.models.dims import Dims, HFConfig, dense_dims, megatron_kwargs
from pivotrl.models.families import llama
from pivotrl.models.mapping import Rule

ARCHITECTURES = ("Qwen3ForCausalLM",)
IGNORED = llama.IGNORED

_M, _H = "decoder.layers.{layer}.", "model.layers.{layer}."

QK_NORM = (
    Rule(_M + "self_attention.q_layernorm.weight", (_H + "self_attn.q_norm.weight",), (("head_dim",),)),
    Rule(_M + "self_attention.k_layernorm.weight", (_H + "self_attn.k_norm.weight",), (("head_dim",),)),
)
RULES = llama.RULES + QK_NORM


def dims(config: HFConfig) -> Dims:
    return dense_dims(config)


def to_megatron_kwargs(config: HFConfig) -> dict[str, Any]:
    return {**megatron_kwargs(config, dims(config)), "qk_layernorm": True}
