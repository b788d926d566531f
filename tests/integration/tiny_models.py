"""Tiny random models in the Hugging Face format, for engine tests (float32, weights large enough to matter)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 320


def save_moe(folder: Path, seed: int) -> Path:
    """Two-layer Qwen3-MoE: 4 heads, 2 KV heads, 4 experts, an own output head."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=512,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return _save(Qwen3MoeForCausalLM, config, folder, seed)


def save_llama(folder: Path, seed: int) -> Path:
    """Two-layer Llama whose output head is tied to its embedding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return _save(LlamaForCausalLM, config, folder, seed)


def _save(model_class: Any, config: Any, folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    model = model_class(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(5.0)
    model.save_pretrained(folder)
    return folder
