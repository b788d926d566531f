"""Qwen2 and Qwen2.5 dense: Llama with biases of queries, keys and values."""

from __future__ import annotations

from pivotrl.models.families import llama

ARCHITECTURES = ("Qwen2ForCausalLM",)
IGNORED = llama.IGNORED
RULES = llama.RULES

dims = llama.dims
to_megatron_kwargs = llama.to_megatron_kwargs
