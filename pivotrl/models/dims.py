"""Reading of a Hugging Face config into the sizes that the tensor mappings use. Pure: no torch, no megatron."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pivotrl.errors import UserError

HFConfig = Mapping[str, Any]
FURTHER_TOKENS = r"mtp\..*"  # Hugging Face names of layers that predict further tokens: here neither run nor trained


@dataclass(frozen=True)
class Dims:
    """Sizes of one model, in its own units (heads, features, experts), before any parallel split."""

    layers: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    moe_ffn: int = 0
    experts: int = 0
    kinds: tuple[str, ...] = ()  # one a layer, as rules name them ("dense", "moe", ...); empty: all "dense"
    tied: bool = False  # the head is the embedding
    mtp_kinds: tuple[str, ...] = ()  # the same for the layers that predict further tokens, block after block
    mtp_block: int = 1  # layers of one such block
    extra: tuple[tuple[str, int], ...] = ()  # sizes that only one family has, by name

    def kind(self, layer: int) -> str:
        """Kind of a layer."""
        return self.kinds[layer] if self.kinds else "dense"

    @property
    def hybrid(self) -> bool:
        """Each layer is one thing: Mamba, attention, MLP or experts."""
        return "mamba" in self.kinds

    def size(self, name: str) -> int:
        """A size by the name used in `Tensor` shapes (a number stands for itself)."""
        derived = {"q": self.heads * self.head_dim, "kv": self.kv_heads * self.head_dim, **dict(self.extra)}
        if name.isdigit():
            return int(name)
        return derived[name] if name in derived else int(getattr(self, name))

    def has(self, name: str) -> bool:
        """Whether a size of `extra` is there and not 0."""
        return bool(dict(self.extra).get(name, 0))


def need(config: HFConfig, key: str) -> Any:
    """`config[key]`, or a UserError that names the key."""
    if config.get(key) is None:
        raise UserError(
            f"config.json: key '{key}' is missing; it is needed to build a '{config.get('model_type')}' model"
        )
    return config[key]


def refuse(config: HFConfig, key: str, harmless: tuple[Any, ...] = (None, False)) -> None:
    """Raise where a setting changes the computation in a way that the megatron model here does not have."""
    if config.get(key) not in harmless:
        raise UserError(f"config.json: '{key}: {config[key]}' is not supported; use a model without it")


def attention_biases(config: HFConfig) -> dict[str, int]:
    """Which products of the attention have a bias, as 0 or 1: `attention_bias` adds one to all four; Qwen2 has always
    one of queries, keys and values."""
    everywhere = int(bool(config.get("attention_bias")))
    always = "Qwen2ForCausalLM" in (config.get("architectures") or ())
    return {"qkv_bias": int(always or everywhere), "o_bias": 0 if always else everywhere}


def dense_dims(config: HFConfig) -> Dims:
    """Dims of the Llama-shaped part that all families share."""
    heads, hidden = int(need(config, "num_attention_heads")), int(need(config, "hidden_size"))
    return Dims(
        layers=int(need(config, "num_hidden_layers")),
        hidden=hidden,
        vocab=int(need(config, "vocab_size")),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        ffn=int(need(config, "intermediate_size")),
        tied=bool(config.get("tie_word_embeddings", False)),
        extra=tuple(attention_biases(config).items()),
    )


def megatron_kwargs(config: HFConfig, dims: Dims) -> dict[str, Any]:
    """TransformerConfig settings that all families share (RMSNorm, SwiGLU, GQA, no bias in the MLP, no dropout).

    megatron-core ties the bias of the attention's output to that of the MLP, so `o_bias` is the policy's to add.
    Names are megatron-core's. `activation_func` and everything about devices, precision and parallel layout are the
    policy's, since they need torch.
    """
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"config.json: hidden_act '{config['hidden_act']}' is not supported; only 'silu' is")
    for key in ("mlp_bias", "use_sliding_window"):
        refuse(config, key)
    if "sliding_attention" in (config.get("layer_types") or ()):
        raise UserError(
            "config.json: 'layer_types' has sliding_attention, which is not supported; use a model without it"
        )
    return {
        "num_layers": dims.layers,
        "hidden_size": dims.hidden,
        "num_attention_heads": dims.heads,
        "num_query_groups": dims.kv_heads,
        "kv_channels": dims.head_dim,
        "ffn_hidden_size": dims.ffn,
        "normalization": "RMSNorm",
        "layernorm_epsilon": float(config.get("rms_norm_eps", 1e-6)),
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": dims.has("qkv_bias"),
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "qk_layernorm": False,
    }
