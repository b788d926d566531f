"""Memory of one GPU and size of checkpoints, from the Hugging Face config alone. Pure; docs/cluster.md explains it.

Weights of a Llama-shaped block (RMSNorm, grouped-query attention, SwiGLU or a mixture of such experts) or of a hybrid's
layers, exactly; then what training adds to them: gradients and Adam in float32 (megatron-core's distributed optimiser
shards Adam over the data-parallel ranks), activations by the tensors that the backward reads. Trainer and engine take
turns on a GPU (`pivotrl.training.handover`): each phase must fit by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pivotrl.config import Config, Optimizer
from pivotrl.models.dims import Dims, dense_dims
from pivotrl.models.hybrid_dims import hybrid_dims

GIB = 2**30
OVERHEAD_GIB = 4.0  # CUDA context, NCCL buffers and fragmentation
ASLEEP_GIB = 2.0  # what a sleeping engine keeps: CUDA graphs, buffers of its collectives
SCORES_GIB = 0.5  # chunks of the head's float32 scores
BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class Weights:
    """Parameter counts by how they are split."""

    dense: int  # of the layers, over tensor x pipeline
    experts: int  # over expert_tensor x expert x pipeline
    embedding: int  # one vocabulary matrix, over tensor, on the first and the last stage
    tied: bool

    @property
    def total(self) -> int:
        return self.dense + self.experts + self.embedding * (1 if self.tied else 2)


@dataclass(frozen=True)
class Model:
    """What the estimate needs of a model."""

    dims: Dims
    experts_per_token: int
    weights: Weights
    qk_norm: bool = False

    @property
    def attentions(self) -> int:
        """Layers with a KV cache."""
        return self.dims.kinds.count("attention") if self.dims.hybrid else self.dims.layers


def read_model(config: Mapping[str, Any]) -> Model:
    """Sizes of a Hugging Face config. Raises UserError for one without the keys of a model known here."""
    if "NemotronHForCausalLM" in (config.get("architectures") or ()):
        return _read_hybrid(config)
    d = dense_dims(config)
    experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
    moe_ffn = int(config.get("moe_intermediate_size") or d.ffn)
    step, dense_layers = int(config.get("decoder_sparse_step") or 1), set(config.get("mlp_only_layers") or ())
    moe = [experts > 0 and i not in dense_layers and (i + 1) % step == 0 for i in range(d.layers)]
    q, kv = d.heads * d.head_dim, d.kv_heads * d.head_dim
    qk_norm = 2 * d.head_dim if str(config.get("model_type", "")).startswith("qwen3") else 0
    biases = d.has("qkv_bias") * (q + 2 * kv) + d.has("o_bias") * d.hidden
    block = d.hidden * (2 * q + 2 * kv) + 2 * d.hidden + qk_norm + biases
    sparse = sum(moe)
    dense = d.layers * block + (d.layers - sparse) * 3 * d.hidden * d.ffn + sparse * experts * d.hidden + d.hidden
    weights = Weights(dense, sparse * experts * 3 * d.hidden * moe_ffn, d.vocab * d.hidden, d.tied)
    kinds = tuple("moe" if m else "dense" for m in moe)
    dims = replace(d, moe_ffn=moe_ffn, experts=experts, kinds=kinds)
    return Model(dims, int(config.get("num_experts_per_tok") or 0) if experts else 0, weights, qk_norm > 0)


def _read_hybrid(config: Mapping[str, Any]) -> Model:
    d = replace(hybrid_dims(config), mtp_kinds=())
    h, inner, conv, experts = d.hidden, d.size("inner"), d.size("conv"), d.experts
    of_conv = conv * (d.size("kernel") + d.has("conv_bias"))
    dense = {
        "mamba": 3 * d.size("mamba_heads") + h * (d.size("mamba_in") + inner) + of_conv + inner,
        "attention": h * 2 * (d.size("q") + d.size("kv")),
        "dense": 2 * h * d.ffn,
        "moe": (h + 1) * experts + 2 * h * (d.size("latent") + d.size("shared")),  # a router has a bias
    }
    count = sum(h + dense[kind] for kind in d.kinds) + h
    routed = d.kinds.count("moe") * experts * 2 * d.size("expert_in") * d.moe_ffn
    chosen = int(config.get("num_experts_per_tok") or 0) if experts else 0
    return Model(d, chosen, Weights(count, routed, d.vocab * h, d.tied))


def training_gib(model: Model, cfg: Config, world: int, optimizer: Optimizer | None = None) -> dict[str, float]:
    """GiB on the fullest GPU of each part of the trainer, for `world` processes (see docs/cluster.md).

    `optimizer`: that of the stage; None: of `train`.
    """
    p, o, w = cfg.parallel, optimizer or cfg.algorithm.optimizer, BYTES[cfg.precision.policy]
    n, stages = model.weights, p.pipeline
    embeddings = n.embedding * (1 if n.tied or stages > 1 else 2)
    dense = (n.dense / stages + embeddings) / p.tensor
    experts = n.experts / (p.expert_tensor * p.expert * stages)
    data = max(world // (p.tensor * stages), 1)  # context ranks share the optimiser's state too
    expert_data = max(world // (p.expert_tensor * p.expert * stages), 1)
    adam = 12 if w == 2 else 8  # float32 copy of bf16 weights, and two moments
    optimiser = adam * (dense / data + experts / expert_data) / GIB
    activations = activation_bytes(model, cfg, tokens_of(cfg, o), o) / GIB
    if o.cpu_offload:  # there only when activations and scores are gone: what it needs beyond their memory
        optimiser = max(0.0, optimiser - activations - SCORES_GIB)
    found = {
        "weights": w * (dense + experts) / GIB,
        "gradients": 4 * (dense + experts) / GIB,
        "optimiser": optimiser,
        "activations": activations,
        "scores": SCORES_GIB,
        "overhead": OVERHEAD_GIB,
    }
    return found | ({"scan": _scan_bytes(model, cfg, tokens_of(cfg, o)) / GIB} if model.dims.hybrid else {})


def _scan_bytes(model: Model, cfg: Config, tokens: int) -> float:
    """What the scan of one Mamba layer takes in float32 while it runs: decays between the rows of a chunk (twice, and
    their gradients), and about ten tensors of the size of its input."""
    d, p = model.dims, cfg.parallel
    each = 4 * d.size("mamba_heads") * d.size("chunk") + 10 * d.size("inner")
    return 4.0 * tokens * each / (p.context * p.tensor)


def tokens_of(cfg: Config, optimizer: Optimizer | None = None) -> int:
    """Unique tokens of the largest micro-batch: a sequence longer than the budget gets one of its own."""
    return max((optimizer or cfg.algorithm.optimizer).tokens_per_microbatch, cfg.model.context_length)


def layer_bytes(model: Model, cfg: Config, kind: str, tokens: int) -> float:
    """Bytes that the backward of one layer reads, for a tree of `tokens` unique tokens. `kind`: as in `Dims.kinds`."""
    d, p, w = model.dims, cfg.parallel, BYTES[cfg.precision.policy]
    sharded = p.tensor if p.sequence else 1
    if model.dims.hybrid:
        return tokens / p.context * _hybrid_bytes(model, cfg, kind, sharded)
    residual = 4 * d.hidden / sharded  # inputs of both norms and their results
    q, kv = d.heads * d.head_dim, d.kv_heads * d.head_dim
    attention = (2 * q + 2 * kv) / p.tensor  # queries, keys, values, result
    if model.qk_norm:
        attention += (2 * q + 2 * kv) / p.tensor  # what the norms of queries and keys read
    if kind == "moe":  # balanced experts: a rank serves as many tokens as it sends, once a rank of expert_tensor
        k = model.experts_per_token
        mlp = k * (p.expert_tensor * d.hidden + 4 * d.moe_ffn) / sharded
    else:
        mlp = 3 * d.ffn / p.tensor  # gate and up, and their product
    statistics = 4 * (d.heads / p.tensor + 2 / sharded)  # float32: log-sum-exp of attention, scales of the norms
    return tokens / p.context * (w * (residual + attention + mlp) + statistics)


def _hybrid_bytes(model: Model, cfg: Config, kind: str, sharded: int) -> float:
    """Bytes a token of a layer that is one thing: what its norm reads and gives, and what is between."""
    d, p = model.dims, cfg.parallel
    elements, floats = 2 * d.hidden / sharded, 1 / sharded
    if kind == "mamba":  # both projections' inputs; the scan between them is computed again
        elements += (d.size("mamba_in") + d.size("inner")) / p.tensor
    elif kind == "attention":
        elements += 2 * (d.size("q") + d.size("kv")) / p.tensor
        floats += d.heads / p.tensor
    elif kind == "dense":  # before and after the square
        elements += 2 * d.ffn / p.tensor
    else:
        latent, k = d.size("latent"), model.experts_per_token
        elements += (k * (p.expert_tensor * d.size("expert_in") + 3 * d.moe_ffn) + latent) / sharded
        elements += 2 * d.size("shared") / p.tensor
        floats += 4 * d.experts / sharded  # the router
    return BYTES[cfg.precision.policy] * elements + 4 * floats


def activation_bytes(model: Model, cfg: Config, tokens: int, optimizer: Optimizer | None = None) -> float:
    """Bytes of activations kept for the backward of trees of `tokens` unique tokens each.

    1F1B keeps `pipeline` micro-batches of `layers / pipeline` layers on the first stage: the whole depth in all. With
    `virtual_pipeline` chunks a stage the first one runs ahead by another pipeline - 1 chunks. Without stages the head's
    rows count too (as if every token had a target).
    """
    d, p, w = model.dims, cfg.parallel, BYTES[cfg.precision.policy]
    sharded = p.tensor if p.sequence else 1
    layers = [layer_bytes(model, cfg, d.kind(i), tokens) for i in range(d.layers)]
    ahead = 1 + (p.pipeline - 1) / (p.pipeline * p.virtual_pipeline) if p.virtual_pipeline > 1 else 1.0
    head = w * tokens / p.context * d.hidden * (1 + 1 / sharded) if p.pipeline == 1 else 0.0
    if not (optimizer or cfg.algorithm.optimizer).recompute:
        return ahead * sum(layers) + head
    return ahead * w * tokens / p.context * d.hidden / sharded * d.layers + max(*layers, head)


def engine_gib(model: Model, cfg: Config) -> dict[str, float]:
    """GiB that the engine needs at least on one GPU: its weights, and the KV cache of one sequence of full length."""
    fp8 = cfg.precision.engine == "fp8"
    d, w, tp = model.dims, BYTES["bf16" if fp8 else cfg.precision.engine], cfg.generation.tensor_parallel
    weights = w * model.weights.total
    if fp8:  # embedding and head stay in bfloat16
        weights = model.weights.total + d.vocab * d.hidden * (1 if d.tied else 2)
    kv_per_token = 2 * model.attentions * d.kv_heads * d.head_dim * w / min(tp, d.kv_heads)
    return {
        "engine weights": weights / tp / GIB,
        "KV cache of one sequence": kv_per_token * cfg.model.context_length / GIB,
    }


def refit_gib(model: Model, cfg: Config, world: int) -> dict[str, float]:
    """GiB on the fullest GPU while the engine takes the trainer's weights: both copies, and no cache yet."""
    return {
        "weights": training_gib(model, cfg, world)["weights"],
        "engine weights": engine_gib(model, cfg)["engine weights"],
        "overhead": OVERHEAD_GIB + ASLEEP_GIB,
    }


def checkpoint_gib(model: Model, cfg: Config) -> float:
    """GiB of one Hugging Face checkpoint in the policy's precision."""
    return BYTES[cfg.precision.policy] * model.weights.total / GIB
