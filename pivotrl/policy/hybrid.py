"""Layer specs of a hybrid model, whose layers are each one thing: Mamba, attention, dense MLP or experts.

They are megatron-core's own layers of a GPT model with the other half left out, so pipeline stages, recomputation, FP8
and checkpoints are what they are elsewhere.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from pivotrl.models.dims import Dims
from pivotrl.policy.experts import HandOver
from pivotrl.policy.mamba import MambaParts, TreeMamba


def hybrid_layers(specs: Sequence[ModuleSpec], kinds: Sequence[str], dims: Dims, fused: bool) -> list[ModuleSpec]:
    """Specs of a stage's layers by their `kinds`; `specs` are those of a GPT model, dense or with experts as `kinds`.

    `fused`: layers are Transformer Engine's.
    """
    return [
        _mamba(dims, fused) if kind == "mamba" else _half(spec, kind == "attention")
        for spec, kind in zip(specs, kinds, strict=True)
    ]


def _half(spec: ModuleSpec, attention: bool) -> ModuleSpec:
    """A layer without its MLP, or without its attention."""
    spec = copy.deepcopy(spec)
    parts: Any = spec.submodules
    if attention:
        parts.pre_mlp_layernorm = parts.mlp = IdentityOp
        parts.mlp_bda = IdentityFuncOp
    else:
        parts.input_layernorm, parts.self_attention = IdentityOp, HandOver
        parts.self_attn_bda = IdentityFuncOp
    return spec


def _mamba(dims: Dims, fused: bool) -> ModuleSpec:
    backend = TESpecProvider() if fused else LocalSpecProvider()
    mixer = MambaParts(backend.column_parallel_linear(), backend.row_parallel_linear())
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=backend.layer_norm(rms_norm=True),
            self_attention=ModuleSpec(module=TreeMamba, params={"dims": dims}, submodules=mixer),
            self_attn_bda=get_bias_dropout_add,
        ),
    )
