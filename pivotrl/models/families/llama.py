"""Llama (and SmolLM2, which is a small Llama with a tied head): config and tensor mapping."""

from __future__ import annotations

from typing import Any

from pivotrl.models.dims import Dims, HFConfig, dense_dims, megatron_kwargs
from pivotrl.models.mapping import Rule

ARCHITECTURES = ("LlamaForCausalLM",)
IGNORED = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)

_M, _H = "decoder.layers.{layer}.", "model.layers.{layer}."

EMBEDDING_AND_HEAD = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), (("vocab", "hidden"),), "vocab", 0),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",), (("hidden",),)),
    Rule("output_layer.weight", ("lm_head.weight",), (("vocab", "hidden"),), "vocab", 0),
)
ATTENTION = (
    Rule(_M + "input_layernorm.weight", (_H + "input_layernorm.weight",), (("hidden",),)),
    Rule(
        _M + "self_attention.linear_qkv.weight",
        tuple(_H + f"self_attn.{x}_proj.weight" for x in "qkv"),
        (("q", "hidden"), ("kv", "hidden"), ("kv", "hidden")),
        "qkv",
        0,
    ),
    Rule(
        _M + "self_attention.linear_qkv.bias",
        tuple(_H + f"self_attn.{x}_proj.bias" for x in "qkv"),
        (("q",), ("kv",), ("kv",)),
        "qkv",
        0,
        needs="qkv_bias",
    ),
    Rule(_M + "self_attention.linear_proj.weight", (_H + "self_attn.o_proj.weight",), (("hidden", "q"),), axis=1),
    Rule(_M + "self_attention.linear_proj.bias", (_H + "self_attn.o_proj.bias",), (("hidden",),), needs="o_bias"),
    Rule(_M + "pre_mlp_layernorm.weight", (_H + "post_attention_layernorm.weight",), (("hidden",),)),
)
DENSE_MLP = (
    Rule(
        _M + "mlp.linear_fc1.weight",
        (_H + "mlp.gate_proj.weight", _H + "mlp.up_proj.weight"),
        (("ffn", "hidden"), ("ffn", "hidden")),
        "gate_up",
        0,
        "dense",
    ),
    Rule(_M + "mlp.linear_fc2.weight", (_H + "mlp.down_proj.weight",), (("hidden", "ffn"),), axis=1, where="dense"),
)
RULES = EMBEDDING_AND_HEAD + ATTENTION + DENSE_MLP


def dims(config: HFConfig) -> Dims:
    return dense_dims(config)


def to_megatron_kwargs(config: HFConfig) -> dict[str, Any]:
    return megatron_kwargs(config, dims(config))
