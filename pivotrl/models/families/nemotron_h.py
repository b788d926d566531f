"""Nemotron-H and Nemotron-3 (Nano, Super): Mamba-2, attention, mixture-of-experts and dense layers in one stack.

Hugging Face names are those of the published files, sizes as transformers' NemotronHForCausalLM has them; megatron
names are those of megatron-core's hybrid model (MambaModel) with Transformer Engine, among them the layers that
predict further tokens (`mtp`), which transformers leaves out and the policy does not train.

The time step is not clamped: megatron-core and vLLM have no limit, transformers takes `time_step_min` for one.
"""

from __future__ import annotations

from typing import Any

from pivotrl.errors import UserError
from pivotrl.models.dims import Dims, HFConfig, megatron_kwargs, need, refuse
from pivotrl.models.hybrid_dims import hybrid_dims
from pivotrl.models.mapping import Rule

ARCHITECTURES = ("NemotronHForCausalLM",)
IGNORED: tuple[str, ...] = ()

_FC1, _FC2 = "linear_fc1.weight", "linear_fc2.weight"

_CONV: dict[str, Any] = {
    "layout": "sections",
    "axis": 0,
    "sections": (("x", "inner"), ("B", "states"), ("C", "states")),
}


def _layer(m: str, h: str) -> tuple[Rule, ...]:
    """Rules of the layers whose names start with `m` in megatron and `h` in Hugging Face."""

    def rule(where: str, megatron: str, hf: str, *shape: str, **more: Any) -> Rule:
        return Rule(m + megatron, (h + hf,), (shape,), where=where, **more)

    experts = "mlp.experts.local_experts.{expert}."
    return (
        rule("mamba", "norm.weight", "norm.weight", "hidden"),
        rule("mamba", "mixer.A_log", "mixer.A_log", "mamba_heads", axis=0),
        rule("mamba", "mixer.D", "mixer.D", "mamba_heads", axis=0),
        rule("mamba", "mixer.dt_bias", "mixer.dt_bias", "mamba_heads", axis=0),
        rule(
            "mamba",
            "mixer.in_proj.weight",
            "mixer.in_proj.weight",
            "mamba_in",
            "hidden",
            layout="sections",
            axis=0,
            sections=(("z", "inner"), ("x", "inner"), ("B", "states"), ("C", "states"), ("dt", "mamba_heads")),
        ),
        rule("mamba", "mixer.conv1d.weight", "mixer.conv1d.weight", "conv", "1", "kernel", **_CONV),
        rule("mamba", "mixer.conv1d.bias", "mixer.conv1d.bias", "conv", needs="conv_bias", **_CONV),
        rule("mamba", "mixer.norm.weight", "mixer.norm.weight", "inner", axis=0),
        rule("mamba", "mixer.out_proj.weight", "mixer.out_proj.weight", "hidden", "inner", axis=1),
        rule("attention", "input_layernorm.weight", "norm.weight", "hidden"),
        Rule(
            m + "self_attention.linear_qkv.weight",
            tuple(h + f"mixer.{x}_proj.weight" for x in "qkv"),
            (("q", "hidden"), ("kv", "hidden"), ("kv", "hidden")),
            "qkv",
            0,
            "attention",
        ),
        rule("attention", "self_attention.linear_proj.weight", "mixer.o_proj.weight", "hidden", "q", axis=1),
        rule("dense", "pre_mlp_layernorm.weight", "norm.weight", "hidden"),
        rule("dense", "mlp." + _FC1, "mixer.up_proj.weight", "ffn", "hidden", axis=0),
        rule("dense", "mlp." + _FC2, "mixer.down_proj.weight", "hidden", "ffn", axis=1),
        rule("moe", "pre_mlp_layernorm.weight", "norm.weight", "hidden"),
        rule("moe", "mlp.router.weight", "mixer.gate.weight", "experts", "hidden"),
        rule("moe", "mlp.router.expert_bias", "mixer.gate.e_score_correction_bias", "experts", constant=True),
        rule("moe", "mlp.fc1_latent_proj.weight", "mixer.fc1_latent_proj.weight", "latent", "hidden", needs="latent"),
        rule("moe", "mlp.fc2_latent_proj.weight", "mixer.fc2_latent_proj.weight", "hidden", "latent", needs="latent"),
        rule("moe", experts + _FC1, "mixer.experts.{expert}.up_proj.weight", "moe_ffn", "expert_in", axis=0),
        rule("moe", experts + _FC2, "mixer.experts.{expert}.down_proj.weight", "expert_in", "moe_ffn", axis=1),
        rule("moe", "mlp.shared_experts." + _FC1, "mixer.shared_experts.up_proj.weight", "shared", "hidden", axis=0),
        rule("moe", "mlp.shared_experts." + _FC2, "mixer.shared_experts.down_proj.weight", "hidden", "shared", axis=1),
    )


_MTP = "mtp.layers.{outer}."
RULES = (
    Rule("embedding.word_embeddings.weight", ("backbone.embeddings.weight",), (("vocab", "hidden"),), "vocab", 0),
    *_layer("decoder.layers.{layer}.", "backbone.layers.{layer}."),
    Rule("decoder.final_norm.weight", ("backbone.norm_f.weight",), (("hidden",),)),
    Rule("output_layer.weight", ("lm_head.weight",), (("vocab", "hidden"),), "vocab", 0),
    Rule(_MTP + "enorm.weight", ("mtp.layers.{layer}.enorm.weight",), (("hidden",),), where="first"),
    Rule(_MTP + "hnorm.weight", ("mtp.layers.{layer}.hnorm.weight",), (("hidden",),), where="first"),
    Rule(
        _MTP + "eh_proj.weight",
        ("mtp.layers.{layer}.eh_proj.weight",),
        (("hidden", "two_hidden"),),
        axis=0,
        where="first",
    ),
    *_layer(_MTP + "mtp_model_layer.layers.{inner}.", "mtp.layers.{layer}."),
    Rule(_MTP + "final_layernorm.weight", ("mtp.layers.{layer}.final_layernorm.weight",), (("hidden",),), where="last"),
)


def dims(config: HFConfig) -> Dims:
    return hybrid_dims(config)


def to_megatron_kwargs(config: HFConfig) -> dict[str, Any]:
    d = hybrid_dims(config)
    for key, only in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")):
        refuse(config, key, (None, only))
    for key in ("sliding_window", "residual_in_fp32"):
        refuse(config, key)
    return {
        **megatron_kwargs(config, d),
        "layernorm_epsilon": float(config.get("layer_norm_epsilon", config.get("norm_eps", 1e-5))),
        "gated_linear_unit": False,
        **(_experts(config, d) if d.experts else {}),
    }


def _experts(config: HFConfig, d: Dims) -> dict[str, Any]:
    chosen = int(need(config, "num_experts_per_tok"))
    if not config.get("norm_topk_prob", True) or chosen == 1:
        raise UserError(
            "config.json: 'norm_topk_prob: false' and 'num_experts_per_tok: 1' are not supported; the router here "
            "normalises over two experts or more"
        )
    among = int(config.get("n_group") or 1)
    return {
        "num_moe_experts": d.experts,
        "moe_router_topk": chosen,
        "moe_ffn_hidden_size": d.moe_ffn,
        "moe_shared_expert_intermediate_size": d.size("shared"),
        "moe_latent_size": d.size("latent") or None,
        "moe_layer_freq": [int(kind == "moe") for kind in d.kinds],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,  # it balances the load in pretraining; here it stays what it is
        "moe_router_topk_scaling_factor": float(config.get("routed_scaling_factor") or 1.0),
        "moe_router_num_groups": among if among > 1 else None,
        "moe_router_group_topk": int(need(config, "topk_group")) if among > 1 else None,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
    }
