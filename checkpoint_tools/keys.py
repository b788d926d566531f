"""Names in a megatron-core distributed checkpoint. Pure.

The mapping tables of pivotrl/models name parameters as a model holds them (`decoder.layers.3.mlp...`); a distributed
checkpoint names them as megatron-core's `sharded_state_dict` does, which depends on how the model was built:

- layers: "stacked" (one tensor [layers, ...] for all layers; models whose layers are alike) or "numbered" (one
  tensor a layer; models with `moe_layer_freq` as a list, or `non_homogeneous_layers`);
- norms: "te" (Transformer Engine fuses the norm before attention and before a dense MLP into the next linear) or
  "local" (without Transformer Engine; the norm before the experts is then named as the dense one);
- experts: one tensor [experts, ...] a projection; with `singleton_local_shards` one an expert, gate and up apart.

Writing takes a `Style`; reading tries every variant and demands that exactly one is there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from pivotrl.models.dims import Dims
from pivotrl.models.mapping import Entry


@dataclass(frozen=True)
class Style:
    """How a checkpoint is written."""

    layers: Literal["stacked", "numbered"] = "numbered"
    norms: Literal["te", "local"] = "te"


@dataclass(frozen=True)
class Slot:
    """Where a parameter lies: tensor `key`, at `index` of its leading axes, whose sizes are `leading`."""

    key: str
    index: tuple[int, ...] = ()
    leading: tuple[int, ...] = ()


_LAYER = re.compile(r"^decoder\.layers\.\d+\.")
_LOCAL_EXPERT = re.compile(r"\.experts\.local_experts\.\d+\.")
_FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def default_style(dims: Dims, norms: Literal["te", "local"] = "te") -> Style:
    """As megatron-core names a model that PivotRL's settings build: numbered where it has experts."""
    return Style("numbered" if dims.experts else "stacked", norms)


def slot(name: str, entry: Entry, dims: Dims, style: Style) -> Slot:
    """Where the parameter `name` (a global megatron name) of the table is written."""
    if entry.layer is None:
        return Slot(name)
    inner = _LAYER.sub("", name)
    index: tuple[int, ...] = ()
    leading: tuple[int, ...] = ()
    key = "decoder.layers." + ("" if style.layers == "stacked" else f"{entry.layer}.")
    if style.layers == "stacked":
        index, leading = (entry.layer,), (dims.layers,)
    moe = bool(dims.moe_layers) and dims.moe_layers[entry.layer]
    for plain, fused in _FUSED.items():
        if inner.startswith(plain) and not (style.norms == "te" and moe and plain == "pre_mlp_layernorm."):
            inner = fused + inner.removeprefix(plain)
    if entry.expert is not None:
        inner = _LOCAL_EXPERT.sub(".experts.experts.", "." + inner)[1:]
        index, leading = (*index, entry.expert), (*leading, dims.experts)
    return Slot(key + inner, index, leading)


def variants(name: str, entry: Entry, dims: Dims) -> list[list[Slot]]:
    """Every way in which a checkpoint may hold the parameter; several slots are parts of its first axis, in order."""
    found: list[list[Slot]] = []
    for layers in ("stacked", "numbered") if entry.layer is not None else ("numbered",):
        for norms in ("te", "local"):
            one = slot(name, entry, dims, Style(layers, norms))
            found.append([one])
            if entry.expert is not None and layers == "numbered":
                alone = one.key.replace(".experts.experts.", f".experts.experts.{entry.expert}.")
                found.append([Slot(alone)])
                found.append([Slot(alone + part) for part in ("_w", "_v")])
            elif entry.rule.layout == "gate_up" and layers == "numbered":
                found.append([Slot(one.key + part) for part in ("_w", "_v")])
        if entry.layer is not None:  # a model built without renaming of norms
            plain = slot(name, entry, dims, Style(layers, "te"))
            inner = _LAYER.sub("", name)
            if entry.expert is None and any(inner.startswith(p) for p in _FUSED):
                prefix = "decoder.layers." + ("" if layers == "stacked" else f"{entry.layer}.")
                found.append([Slot(prefix + inner, plain.index, plain.leading)])
    return [v for i, v in enumerate(found) if v not in found[:i]]
