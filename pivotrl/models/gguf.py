"""Conversion of a llama-architecture GGUF file (as packages ship small models) into a Hugging Face folder.

Only the file's own metadata is used. Needs the `gguf` package; `transformers` reads the tokenizer out of the same file.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pivotrl.errors import UserError

if TYPE_CHECKING:
    import numpy as np

# GGUF block tensor -> Hugging Face module below `model.layers.N.`
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def huggingface_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`. Raises UserError on an unknown name."""
    parts = name.split(".")
    if parts[-1] == "weight" and len(parts) == 4 and parts[0] == "blk" and parts[2] in _BLOCK:
        return f"model.layers.{int(parts[1])}.{_BLOCK[parts[2]]}.weight"
    if parts[-1] == "weight" and len(parts) == 2 and parts[0] in _TOP:
        return f"{_TOP[parts[0]]}.weight"
    raise UserError(f"GGUF tensor {name!r} has no place in a llama model; only plain llama files can be converted")


def rotate_half_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection [heads * d, hidden] from GGUF order to Hugging Face order.

    GGUF keeps the two members of a rotary pair next to each other (rows 2i and 2i + 1 of a head); Hugging Face rotates
    halves (rows i and i + d / 2).
    """
    rows, hidden = weight.shape
    half = rows // heads // 2
    return weight.reshape(heads, half, 2, hidden).swapaxes(1, 2).reshape(rows, hidden)


def convert_llama_gguf(source: Path, folder: Path) -> None:
    """Write config, generation config, tokenizer and bfloat16 weights of `source` into the existing `folder`.

    Quantised blocks become float32 first, then bfloat16. Tensors are converted one by one: peak memory is the bfloat16
    model plus its largest tensor in float32.
    """
    import gguf
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    reader = gguf.GGUFReader(str(source))
    config = llama_config({name: field.contents() for name, field in reader.fields.items() if name in _FIELDS})
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        name = huggingface_name(tensor.name)
        values = dequantize(tensor.data, tensor.tensor_type)  # float32, [out, in] or [hidden]
        projection = name.split(".")[-2]
        if projection in heads:
            values = rotate_half_order(values, heads[projection])
        weights[name] = torch.from_numpy(values.copy()).to(torch.bfloat16)
    config["tie_word_embeddings"] = "lm_head.weight" not in weights
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    del weights
    _save_rest(source, folder, config)


_FIELDS = {
    "general.architecture",
    "llama.block_count",
    "llama.context_length",
    "llama.embedding_length",
    "llama.feed_forward_length",
    "llama.attention.head_count",
    "llama.attention.head_count_kv",
    "llama.rope.freq_base",
    "llama.attention.layer_norm_rms_epsilon",
    "llama.vocab_size",
    "tokenizer.ggml.bos_token_id",
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.padding_token_id",
}


def llama_config(fields: dict[str, Any]) -> dict[str, Any]:
    """`LlamaConfig` arguments of a GGUF file's metadata. Raises UserError on another architecture or a missing key."""
    if fields.get("general.architecture") != "llama":
        raise UserError(
            f"GGUF architecture {fields.get('general.architecture')!r} is not llama; it cannot be converted"
        )
    absent = sorted(_FIELDS - fields.keys())
    if absent:
        raise UserError(f"GGUF metadata lacks {', '.join(absent)}; the file cannot be converted")
    hidden, heads = int(fields["llama.embedding_length"]), int(fields["llama.attention.head_count"])
    return {
        "vocab_size": int(fields["llama.vocab_size"]),
        "hidden_size": hidden,
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fields["llama.attention.head_count_kv"]),
        "head_dim": hidden // heads,
        "max_position_embeddings": int(fields["llama.context_length"]),
        # GGUF keeps it as float32 (1e-5 reads back as 9.999999747e-06)
        "rms_norm_eps": float(f"{float(fields['llama.attention.layer_norm_rms_epsilon']):.6g}"),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(fields["llama.rope.freq_base"])},
        "bos_token_id": int(fields["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(fields["tokenizer.ggml.eos_token_id"]),
        "pad_token_id": int(fields["tokenizer.ggml.padding_token_id"]),
    }


def _save_rest(source: Path, folder: Path, config: dict[str, Any]) -> None:
    from transformers import AutoTokenizer, GenerationConfig, LlamaConfig

    tokens = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    LlamaConfig(**config, architectures=["LlamaForCausalLM"], dtype="bfloat16").save_pretrained(folder)
    GenerationConfig(**tokens).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    tokenizer.model_max_length = config["max_position_embeddings"]
    tokenizer.save_pretrained(folder)
