"""The megatron-core GPT model that runs prefix trees and returns log-probabilities of targets."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core import parallel_state as groups
from megatron.core.activations import squared_relu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from pivotrl import fp8
from pivotrl.config import Experts, Parallel, Precision
from pivotrl.errors import UserError
from pivotrl.layout import stage_layers
from pivotrl.models.dims import Dims
from pivotrl.models.rope import Rope
from pivotrl.policy.experts import Balance, of_routers
from pivotrl.policy.head import target_logprobs
from pivotrl.policy.hybrid import hybrid_layers
from pivotrl.policy.machine import uses_transformer_engine
from pivotrl.policy.modules import RMSNorm, SwiGLU, with_bias
from pivotrl.policy.prefix_tree import Ints, PrefixTree, split_rows
from pivotrl.policy.rope import rope_tables
from pivotrl.policy.tree_attention import (
    ContextSplit,
    TreeAttention,
    TreeParams,
    attention_plan,
    gather_pairs,
)
from pivotrl.policy.tree_scan import ScanPlan
from pivotrl.policy.versions import submodules


class PolicyModel(GPTModel):
    """A GPTModel whose output is [2, P]: log-probability of each target pair, and entropy of its row (float32).

    Earlier pipeline stages return hidden states, as any GPTModel. Position embedding is rotary, by tree depth, applied
    in the attention, as `rope` says; `vocabulary` is the number of real tokens (the rest is padding).
    """

    rope: Rope
    vocabulary: int
    scan: tuple[int, int] | None = None  # of Mamba layers: rows of a chunk, rows that their convolution sees

    def _postprocess(self, hidden_states: Tensor, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        p: TreeParams = packed_seq_params
        assert p.sources is not None and p.pair_source is not None and p.pair_token is not None
        group = groups.get_tensor_model_parallel_group()
        rank, size = group.rank(), group.size()
        if self.config.sequence_parallel:  # [S / tp, 1, H] -> [S, 1, H]; the backward sums and scatters
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=True, group=group
            )
        elif size > 1:  # the backward sums over the ranks
            hidden_states = copy_to_tensor_model_parallel_region(hidden_states, group=group)
        for hook in self.output_layer._forward_pre_hooks.values():  # those of overlapped gathers; no forward runs them
            hook(self.output_layer, ())
        weight = self.output_layer.weight
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        first = rank * weight.shape[0]
        weight = weight[: max(0, self.vocabulary - first)]  # without padding
        hidden = hidden_states[:, 0].index_select(0, p.sources)  # [U, H]
        logprobs, entropy = target_logprobs(hidden, weight, p.pair_source, p.pair_token - first, p.temperature, group)
        return torch.stack([logprobs, entropy[p.pair_source]])  # [2, P]

    def _choices(self, tree: PrefixTree, rows: Ints, device: torch.device) -> Tensor | None:
        e, config = tree.experts, self.config
        if e is None:
            return None
        number, k = sum(config.moe_layer_freq or ()), config.moe_router_topk
        if e.shape[1:] != (number, k) or e.max() >= config.num_moe_experts:
            raise UserError(
                f"routed experts {list(e.shape[1:])} up to number {e.max()}: the model has {number} layers with "
                f"experts, {k} of {config.num_moe_experts} for each token"
            )
        return of_routers(e, rows, *self._router_place(), device)

    def _router_place(self) -> tuple[int, int]:
        """(rank, size) among the ranks that split a context-parallel rank's rows between their routers."""
        group = groups.get_tensor_model_parallel_group()
        return (group.rank(), group.size()) if self.config.sequence_parallel else (0, 1)

    def _balance(self, tree: PrefixTree, rows: Ints, weight: float, device: torch.device) -> Balance:
        real = np.arange(len(tree.token_ids)) < tree.tokens_unique
        weights = of_routers(real.astype(np.float32) * weight, rows, *self._router_place(), device)
        return Balance(weights, groups.get_tensor_and_context_parallel_group())

    def run(
        self,
        wrapped: torch.nn.Module,
        tree: PrefixTree,
        temperature: float,
        replay: bool = True,
        balance: float = 0.0,
    ) -> Tensor:
        """Run a tree through `wrapped` (this model in its data-parallel wrapper): [2, P] in the order of its pairs.

        `replay` False: the routers choose themselves, whatever experts the tree names. `balance`: weight of a row in
        the load-balancing loss.
        """
        device = next(self.parameters()).device
        group = groups.get_context_parallel_group()
        parts = split_rows(tree.position_ids, group.size())
        rows = parts[group.rank()]  # [R] of this rank
        # pairs by rank and then by row, so that each rank's sources are ascending
        owner = np.empty(len(tree.token_ids), dtype=np.int64)
        for rank, part in enumerate(parts):
            owner[part] = rank
        order = np.lexsort((tree.pair_row, owner[tree.pair_row]))
        counts = np.bincount(owner[tree.pair_row], minlength=len(parts)).tolist()
        first = sum(counts[: group.rank()])
        mine = order[first : first + counts[group.rank()]]
        sources, pair_source = np.unique(np.searchsorted(rows, tree.pair_row[mine]), return_inverse=True)

        def tables(positions: Any) -> tuple[Tensor, Tensor]:
            ids = torch.from_numpy(positions).to(device)
            return rope_tables(ids, self.config.kv_channels, self.rope, self.config.params_dtype)

        split = None
        if len(parts) > 1:
            by_rank = np.concatenate(parts)
            split = ContextSplit(group, *(torch.from_numpy(x).to(device) for x in (by_rank, np.argsort(by_rank))))
        own_tables = tables(tree.position_ids[rows])
        params = TreeParams(
            qkv_format="sbhd",
            max_seqlen_q=len(rows),
            max_seqlen_kv=len(tree.token_ids),
            plan=attention_plan(tree, rows, device),
            tables=own_tables,
            key_tables=tables(tree.position_ids) if split else own_tables,
            split=split,
            scan=ScanPlan.of(tree, *self.scan, device) if self.scan else None,
            sources=torch.from_numpy(sources).to(device),
            pair_source=torch.from_numpy(pair_source).to(device),
            pair_token=torch.from_numpy(tree.pair_token[mine]).to(device),
            temperature=temperature,
            experts=self._choices(tree, rows, device) if replay else None,
            balance=self._balance(tree, rows, balance, device) if balance else None,
        )
        ids, positions = (torch.from_numpy(x[rows]).to(device)[None] for x in (tree.token_ids, tree.position_ids))
        out: Tensor = wrapped(ids, positions, None, packed_seq_params=params)  # ids [1, R]
        if not self.post_process:
            return out
        if split:
            out = gather_pairs(out, counts, group)
        return out[:, torch.from_numpy(np.argsort(order)).to(device)]


def transformer_config(
    settings: dict[str, Any],
    dims: Dims,
    parallel: Parallel,
    dtype: torch.dtype,
    recompute: bool,
    experts: Experts | None = None,
    precision: Precision | None = None,
) -> TransformerConfig:
    """TransformerConfig of a family's settings, with what depends on devices, precision and parallel layout.

    Raises UserError where the model cannot be split so.
    """
    for what, size, by, key in (
        ("key-value heads", dims.kv_heads, parallel.tensor, "tensor"),
        ("ffn size", dims.ffn, parallel.tensor, "tensor"),
        ("experts", dims.experts, parallel.expert, "expert"),
        ("expert ffn size", dims.moe_ffn, parallel.expert_tensor, "expert_tensor"),
        *_mamba_sizes(dims, parallel),
    ):
        if size % by:
            raise UserError(f"parallel.{key}: the model has {size} {what}, which {by} does not divide")
    if dims.experts and parallel.tensor > 1 and not parallel.sequence:
        raise UserError(
            "parallel.sequence: a mixture of experts with parallel.tensor > 1 needs it in megatron-core; set it to true"
        )
    if not dims.experts and parallel.expert * parallel.expert_tensor > 1:
        raise UserError("parallel.expert: this model has no experts; set expert and expert_tensor to 1")
    if experts is not None and experts.aux_loss and settings.get("moe_router_score_function") == "sigmoid":
        raise UserError("experts.aux_loss: this model's routers are sigmoid and balanced by their bias; set it to 0")
    stage_layers(parallel, dims.layers)  # refuses what cannot be dealt out
    if dims.experts and experts is not None:
        settings = {**settings, "moe_router_dtype": experts.router_dtype}
    cuda = torch.cuda.is_available()
    fused, gated = uses_transformer_engine(), settings["gated_linear_unit"]
    # all-to-all with expert tensor parallel needs uneven all-gathers, which gloo refuses
    dispatcher = "allgather" if not cuda and parallel.expert_tensor > 1 else "alltoall"
    return TransformerConfig(
        **settings,
        activation_func=F.silu if gated else squared_relu,
        # without Transformer Engine: the hook through which our SwiGLU gets both halves
        use_te_activation_func=gated and not fused,
        use_cpu_initialization=not cuda,
        perform_initialization=False,  # every weight is loaded
        masked_softmax_fusion=False,
        bias_activation_fusion=fused and gated,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        moe_token_dispatcher_type=dispatcher,
        moe_grouped_gemm=fused and dims.experts > 0,
        moe_permute_fusion=fused and dims.experts > 0,
        tensor_model_parallel_size=parallel.tensor,
        context_parallel_size=parallel.context,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
        # between two stages an interleaved schedule sends both ways at once, which one batch would mix up
        overlap_p2p_comm=parallel.virtual_pipeline > 1,
        batch_p2p_comm=parallel.virtual_pipeline == 1,
        num_layers_in_first_pipeline_stage=parallel.first_stage_layers,
        num_layers_in_last_pipeline_stage=parallel.last_stage_layers,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        sequence_parallel=parallel.sequence and parallel.tensor > 1,
        variable_seq_lengths=parallel.pipeline > 1,  # trees differ in size
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
        **(fp8.settings(precision) if precision is not None else {}),
        calculate_per_token_loss=True,  # gradients are sums: the objective holds the one denominator
    )


def _mamba_sizes(dims: Dims, parallel: Parallel) -> list[tuple[str, int, int, str]]:
    if not dims.hybrid:
        return []
    heads, split = dims.size("mamba_heads"), parallel.tensor * parallel.context
    if heads % split == 0 and (per_group := heads // dims.size("mamba_groups")) % (heads // split):
        heads //= per_group  # ranks of one head and a half each: whole groups must be dealt out
    return [
        ("groups of Mamba heads", dims.size("mamba_groups"), parallel.tensor, "tensor"),
        ("Mamba heads (or groups of them, where a rank has several)", heads, split, "tensor x context"),
    ]


def build_chunks(config: TransformerConfig, dims: Dims, rope: Rope, max_length: int) -> list[PolicyModel]:
    """The model of this rank's pipeline stage, chunk by chunk (one without virtual stages), weights uninitialised."""
    number = config.virtual_pipeline_model_parallel_size or 1
    return [build_model(config, dims, rope, max_length, c if number > 1 else None) for c in range(number)]


def build_model(
    config: TransformerConfig, dims: Dims, rope: Rope, max_length: int, chunk: int | None = None
) -> PolicyModel:
    """One chunk of `build_chunks`; `chunk` None: the stage's only one."""
    fused = uses_transformer_engine()
    spec = copy.deepcopy(
        get_gpt_decoder_block_spec(config, use_transformer_engine=fused, normalization="RMSNorm", vp_stage=chunk)
    )
    if dims.hybrid:
        offset = get_transformer_layer_offset(config, vp_stage=chunk)
        kinds = dims.kinds[offset : offset + len(spec.layer_specs)]
        spec.layer_specs = hybrid_layers(spec.layer_specs, kinds, dims, fused)
    for layer in spec.layer_specs:
        _use_tree_attention(layer.submodules.self_attention, dims)
        if not fused:
            _use_own_parts(layer.submodules, config)
    if not fused:
        spec.layer_norm = RMSNorm
    model = PolicyModel(
        config,
        spec,
        vocab_size=-(-dims.vocab // config.tensor_model_parallel_size) * config.tensor_model_parallel_size,
        max_sequence_length=max_length,
        position_embedding_type="none",  # rotary embedding is applied in the attention, by tree depth
        pre_process=groups.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
        post_process=groups.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
        share_embeddings_and_output_weights=dims.tied,
        vp_stage=chunk,
    )
    model.rope, model.vocabulary = rope, dims.vocab
    if dims.hybrid:
        model.scan = (dims.size("chunk"), dims.size("kernel"))
    return model


def _use_tree_attention(attention: Any, dims: Dims) -> None:
    """The attention of a layer spec; a layer of a hybrid model may have something else there."""
    if getattr(attention, "module", None) is SelfAttention:
        attention.submodules.core_attention = TreeAttention
        if dims.has("o_bias"):
            attention.submodules.linear_proj = with_bias(attention.submodules.linear_proj)


def _use_own_parts(parts: Any, config: TransformerConfig) -> None:
    """Norms and activation of a local layer spec -> ours, which keep less for the backward."""
    for name in ("input_layernorm", "pre_mlp_layernorm"):
        if getattr(parts, name) is not IdentityOp:
            setattr(parts, name, RMSNorm)
    if config.qk_layernorm:
        attention = parts.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if config.gated_linear_unit:
        mlp = submodules(parts.mlp)
        experts = getattr(mlp, "experts", None)
        (mlp if experts is None else submodules(experts)).activation_func = SwiGLU
