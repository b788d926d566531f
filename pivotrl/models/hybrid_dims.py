"""Sizes of a hybrid's config, whose layers are Mamba-2, attention, MLP or experts. Pure: no torch, no megatron."""

from __future__ import annotations

from pivotrl.errors import UserError
from pivotrl.models.dims import Dims, HFConfig, need, refuse

# one letter a layer in `hybrid_override_pattern`; words, of older and newer transformers, in `layers_block_type`
_KINDS = {"M": "mamba", "*": "attention", "E": "moe", "-": "dense"}
_WORDS = {"linear_attention": "mamba", "full_attention": "attention", "mlp": "dense"}


def _kinds(config: HFConfig, pattern: str, words: tuple[str, ...]) -> tuple[str, ...]:
    """Kinds of layers from a pattern of letters or, where it is absent, a list of words."""
    letters = config.get(pattern)
    named = next((config[key] for key in words if config.get(key) is not None), None)
    if letters is None and named is None:
        raise UserError(f"config.json: neither '{pattern}' nor '{words[0]}' says which layers the model has")
    kinds = [_KINDS.get(x, x) for x in letters] if letters is not None else [_WORDS.get(x, x) for x in named or ()]
    if wrong := sorted({str(k) for k in kinds} - set(_KINDS.values())):
        raise UserError(f"config.json: '{pattern if letters is not None else words[0]}' names unknown layers {wrong}")
    return tuple(kinds)


def hybrid_dims(config: HFConfig) -> Dims:
    """Dims of a Nemotron-H config. Raises UserError for layers or settings that are not known."""
    kinds = _kinds(config, "hybrid_override_pattern", ("layers_block_type", "layer_types"))
    given = config.get("num_hidden_layers")
    if given is not None and given != len(kinds):
        raise UserError(f"config.json: num_hidden_layers is {given}, but its pattern has {len(kinds)} layers")
    blocks = int(config.get("num_nextn_predict_layers") or 0)
    further = _kinds(config, "mtp_hybrid_override_pattern", ("mtp_layers_block_type",)) if blocks else ()
    for key in ("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias"):
        refuse(config, key)
    hidden, heads = int(need(config, "hidden_size")), int(need(config, "num_attention_heads"))
    mamba_heads = int(need(config, "mamba_num_heads"))
    inner = mamba_heads * int(need(config, "mamba_head_dim"))
    states = int(need(config, "n_groups")) * int(need(config, "ssm_state_size"))
    moe = "moe" in kinds + further
    latent = int(config.get("moe_latent_size") or 0)
    extra = {
        "mamba_heads": mamba_heads,
        "mamba_groups": int(need(config, "n_groups")),
        "chunk": int(config.get("chunk_size") or 128),
        "inner": inner,
        "states": states,
        "mamba_in": 2 * inner + 2 * states + mamba_heads,
        "conv": inner + 2 * states,
        "kernel": int(need(config, "conv_kernel")),
        "conv_bias": int(bool(config.get("use_conv_bias", True))),
        "latent": latent,
        "expert_in": latent or hidden,
        "shared": int(need(config, "moe_shared_expert_intermediate_size")) if moe else 0,
        "two_hidden": 2 * hidden,
    }
    return Dims(
        layers=len(kinds),
        hidden=hidden,
        vocab=int(need(config, "vocab_size")),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or config.get("attention_head_dim") or hidden // heads),
        ffn=int(need(config, "intermediate_size")),
        moe_ffn=int(need(config, "moe_intermediate_size")) if moe else 0,
        experts=int(need(config, "n_routed_experts")) if moe else 0,
        kinds=kinds,
        tied=bool(config.get("tie_word_embeddings", False)),
        mtp_kinds=further * blocks,
        mtp_block=len(further) or 1,
        extra=tuple(extra.items()),
    )
