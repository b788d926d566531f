"""Names in a megatron-core distributed checkpoint. Pure.

The mapping tables of pivotrl/models name parameters as a model holds them (`decoder.layers.3.mlp...`); a distributed
checkpoint names them as megatron-core's `sharded_state_dict` does, which depends on how the model was built:

- layers: "stacked" (one tensor [layers, ...] for all layers; models whose layers are alike) or "numbered" (one
  tensor a layer; models with `moe_layer_freq` as a list, or `non_homogeneous_layers`);
- norms: "te" (Transformer Engine fuses the norm before attention and before a dense MLP into the next linear) or
  "local" (without Transformer Engine; the norm before the experts is then named as the dense one);
- experts: one tensor [experts, ...] a projection; with `singleton_local_shards` one an expert, gate and up apart;
- sections: the parts of a Mamba mixer's fused tensors (`in_proj`, `conv1d`) under names of their own (.z, .x, .B, ...).

Writing takes a `Style`; reading tries every variant and demands that exactly one is there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
    """Where a parameter lies: tensor `key`, at `index` of its leading axes, whose sizes are `leading`.

    `rows`: how many rows of the parameter, where several slots follow on each other in its first axis and differ.
    """

    key: str
    index: tuple[int, ...] = ()
    leading: tuple[int, ...] = ()
    rows: int | None = None


_LAYER = re.compile(r"^(decoder\.layers\.\d+\.|mtp\.layers\.\d+\.mtp_model_layer\.layers\.\d+\.)")
_LOCAL_EXPERT = re.compile(r"\.experts\.local_experts\.\d+\.")
_FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    "norm.": "mixer.in_proj.layer_norm_",
}
# names that changed between releases of megatron-core, without a change of meaning
_ALIASES = {"decoder.final_norm.weight": "decoder.final_layernorm.weight"}


def default_style(dims: Dims, norms: Literal["te", "local"] = "te") -> Style:
    """As megatron-core names a model that PivotRL's settings build: numbered where it has experts."""
    return Style("numbered" if dims.experts or len(set(dims.kinds)) > 1 else "stacked", norms)


def slots(name: str, entry: Entry, dims: Dims, style: Style) -> list[Slot]:
    """Where the parameter `name` (a global megatron name) of the table is written: one slot a section of its rows."""
    whole = _slot(name, entry, dims, style)
    return [replace(whole, key=f"{whole.key}.{part}", rows=rows) for part, rows in entry.sections] or [whole]


def sizes(table: Mapping[str, Entry], dims: Dims, style: Style) -> dict[str, tuple[int, ...]]:
    """Names and whole sizes of the tensors of a distributed checkpoint of that style (vocabulary not padded)."""
    found: dict[str, tuple[int, ...]] = {}
    for name, entry in table.items():
        rows = sum(shape[0] for shape in entry.shapes)
        for where in slots(name, entry, dims, style):
            found[where.key] = (*where.leading, where.rows or rows, *entry.shapes[0][1:])
    return found


def _slot(name: str, entry: Entry, dims: Dims, style: Style) -> Slot:
    found = _LAYER.match(name)
    if not found:
        return Slot(name)
    inner, key = name[found.end() :], found[0]
    index: tuple[int, ...] = ()
    leading: tuple[int, ...] = ()
    if style.layers == "stacked" and entry.layer is not None:
        key, index, leading = "decoder.layers.", (entry.layer,), (dims.layers,)
    for plain, fused in _FUSED.items():
        if inner.startswith(plain) and not (style.norms == "te" and entry.kind == "moe" and plain[:3] == "pre"):
            inner = fused + inner.removeprefix(plain)
    if entry.expert is not None:
        inner = _LOCAL_EXPERT.sub(".experts.experts.", "." + inner)[1:]
        index, leading = (*index, entry.expert), (*leading, dims.experts)
    return Slot(key + inner, index, leading)


def variants(name: str, entry: Entry, dims: Dims) -> list[list[Slot]]:
    """Every way in which a checkpoint may hold the parameter; several slots are parts of its first axis, in order."""
    if name in _ALIASES:
        return [[Slot(name)], [Slot(_ALIASES[name])]]
    found: list[list[Slot]] = []
    for layers in ("stacked", "numbered") if entry.layer is not None else ("numbered",):
        for norms in ("te", "local"):
            parts = slots(name, entry, dims, Style(layers, norms))
            found.append(parts)
            key = parts[0].key
            if entry.expert is not None and layers == "numbered":
                alone = key.replace(".experts.experts.", f".experts.experts.{entry.expert}.")
                found.append([Slot(alone)])
                found.append([Slot(alone + part) for part in ("_w", "_v")])
            elif entry.rule.layout == "gate_up" and layers == "numbered":
                found.append([Slot(key + part) for part in ("_w", "_v")])
        inner = _LAYER.sub("", name)
        if inner != name and entry.expert is None and any(inner.startswith(p) for p in _FUSED):
            fused = slots(name, entry, dims, Style(layers, "te"))[0]  # a model built without renaming of norms
            prefix = name.removesuffix(inner) if not fused.index else "decoder.layers."
            found.append([Slot(prefix + inner, fused.index, fused.leading)])
    return [v for i, v in enumerate(found) if v not in found[:i]]
