"""Tiny random Hugging Face models, with every weight distinct and norms away from one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from pivotrl.policy.prefix_tree import depth_first_order

_SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
COMMON = {
    **_SIZES,
    "initializer_range": 0.1,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "attn_implementation": "eager",
}
NAMES = ("llama", "qwen3", "qwen3_moe", "nemotron_h")
_HYBRID = {
    **_SIZES,
    "initializer_range": 0.05,
    "hybrid_override_pattern": "MEM*-MEM",
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "chunk_size": 4,  # a tree has several chunks
    "time_step_min": 1e-30,  # of which transformers makes a limit, which megatron-core and vLLM do not have
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "moe_latent_size": 24,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}
SERVED_VOCABULARY = 320
_SERVED: dict[str, Any] = {"vocab_size": SERVED_VOCABULARY, "head_dim": 32, "max_position_embeddings": 512}
# without experts: on CPU builds vLLM has none without a gate
_SERVED_HYBRID = {"hybrid_override_pattern": "M-M*-", "chunk_size": 256}
_SERVED_MOE = {"num_hidden_layers": 2, "moe_intermediate_size": 64, "num_experts": 4, "mlp_only_layers": []}


def tiny_model(name: str, seed: int = 0, **changes: Any) -> Any:
    """A float32 model: "llama" (tied head), "qwen2" (biases), "qwen3" (untied), "qwen3_moe" (first layer dense, then
    experts) or "nemotron_h" (Mamba, latent experts, attention, dense)."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        NemotronHConfig,
        NemotronHForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    torch.manual_seed(seed)
    if name == "llama":
        model = LlamaForCausalLM(
            LlamaConfig(**{**COMMON, "num_hidden_layers": 2, "tie_word_embeddings": True, **changes})
        )
    elif name == "qwen2":
        model = Qwen2ForCausalLM(
            Qwen2Config(**{**COMMON, "num_hidden_layers": 2, "tie_word_embeddings": True, **changes})
        )
    elif name == "qwen3":
        model = Qwen3ForCausalLM(
            Qwen3Config(**{**COMMON, "num_hidden_layers": 2, "tie_word_embeddings": False, **changes})
        )
    elif name == "nemotron_h":
        model = NemotronHForCausalLM(NemotronHConfig(**{**_HYBRID, **changes}))
        with torch.no_grad():
            model.model.embeddings.weight.mul_(4)  # small rows would have large gradients
            for parameter_name, parameter in [*model.named_parameters(), *model.named_buffers()]:
                if parameter_name.endswith((".D", "e_score_correction_bias")):
                    parameter.add_(0.3 * torch.randn_like(parameter))
                elif parameter_name.endswith(("A_log", "dt_bias")):  # some heads forget within a token, some do not
                    parameter.normal_()
    else:
        moe = {
            "num_hidden_layers": 3,
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [0],
            "tie_word_embeddings": False,
        }
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**COMMON, **moe, **changes}))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name or parameter_name.endswith("bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.float().eval()


def save_tiny(name: str, path: Path, **changes: Any) -> Any:
    """Save the model as a Hugging Face folder; returns the model."""
    model = tiny_model(name, **changes)
    model.save_pretrained(path)
    return model


def on_disk(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers 5 fuses experts in memory; here they are as in its files, one tensor an expert and projection. Those
    of a "nemotron_h" begin with "backbone"."""
    out: dict[str, torch.Tensor] = {}
    hybrid = "model.embeddings.weight" in tensors
    for name, tensor in tensors.items():
        if hybrid and name.startswith("model."):
            name = "backbone." + name.removeprefix("model.")
        base = name.rpartition(".")[0]
        if name.endswith("experts.gate_up_proj"):  # [E, 2 * I, H]
            for e, fused in enumerate(tensor):
                out[f"{base}.{e}.gate_proj.weight"], out[f"{base}.{e}.up_proj.weight"] = fused.chunk(2, 0)
        elif name.endswith(("experts.down_proj", "experts.up_proj")):  # [E, H, I], [E, I, H]
            out.update({f"{base}.{e}.{name.rpartition('.')[2]}.weight": t for e, t in enumerate(tensor)})
        else:
            out[name] = tensor
    return out


def save_served(name: str, folder: Path, seed: int, **changes: Any) -> Path:
    """A "llama", "qwen3_moe" or "nemotron_h" of sizes that vLLM's kernels take; the folder."""
    own = {"qwen3_moe": _SERVED_MOE, "nemotron_h": _SERVED_HYBRID}.get(name, {})
    save_tiny(name, folder, seed=seed, **{**_SERVED, **own, **changes})
    return folder


@contextmanager
def told_experts(model: Any, experts: Any) -> Iterator[None]:
    """Within it a "qwen3_moe" or "nemotron_h" runs the tokens of one sequence through `experts`: numpy [tokens or less,
    layers with experts, k]; None: its own choices."""
    patches = []
    parts = [getattr(layer, "mlp", None) or layer.mixer for layer in model.model.layers]
    gates = [part.gate for part in parts if hasattr(part, "gate")] if experts is not None else []
    for number, gate in enumerate(gates):
        given = None if experts is None else torch.from_numpy(experts[:, number])

        def forward(x: torch.Tensor, gate: Any = gate, given: torch.Tensor | None = given) -> tuple[torch.Tensor, ...]:
            logits = torch.nn.functional.linear(x.view(-1, x.shape[-1]), gate.weight)
            bias = getattr(gate, "e_score_correction_bias", None)
            scores = logits if bias is None else logits.sigmoid()
            chosen = (scores if bias is None else scores + bias).topk(gate.top_k, dim=-1)[1]
            if given is not None:
                chosen = torch.cat([given, chosen[len(given) :]])
            picked = scores.gather(1, chosen)
            if bias is None:
                return logits, picked.softmax(-1), chosen
            return logits, gate.routed_scaling_factor * picked / picked.sum(-1, keepdim=True), chosen

        patches.append(mock.patch.object(gate, "forward", forward))
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def balance_loss(model: Any, sequences: Any) -> torch.Tensor:
    """Load-balancing loss of a "qwen3_moe" with coefficient 1, over the unique tokens of one batch: for each layer with
    experts E * sum over experts of share of choices * mean probability."""
    order, shared = depth_first_order(sequences)
    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    seen: list[list[torch.Tensor]] = [[] for _ in gates]
    hooks = [
        gate.register_forward_hook(lambda gate, args, out, into=into: into.append(args[0] @ gate.weight.T))
        for gate, into in zip(gates, seen, strict=True)
    ]
    for index in order:
        model(torch.tensor([sequences[index].token_ids]))
    for hook in hooks:
        hook.remove()
    loss = torch.zeros(())
    for gate, logits in zip(gates, seen, strict=True):
        rows = torch.cat([x.reshape(-1, x.shape[-1])[known:] for x, known in zip(logits, shared, strict=True)])
        chosen = rows.topk(gate.top_k, dim=-1)[1].flatten().bincount(minlength=rows.shape[1])
        loss = loss + rows.shape[1] * (chosen / chosen.sum() * rows.softmax(-1).mean(0)).sum()
    return loss
