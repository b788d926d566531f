"""The engine of the declarative tensor mappings: Hugging Face tensors <-> megatron-core shards. No megatron.

A family declares `Rule`s; `plan` expands them over layers and experts into one table from the *global* megatron
name (global layer and expert numbers) to the Hugging Face tensors behind it. Loading, refit, export and conversion
all read that table, so a tensor cannot be mapped one way in one of them and another way in the next.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pivotrl.errors import UserError
from pivotrl.models.dims import Dims


@dataclass(frozen=True)
class Rule:
    """One kind of megatron parameter and the Hugging Face tensors that it is made of.

    `layout`: "plain" (the tensor itself), "vocab" (rows padded to a multiple of the tensor-parallel size), "qkv"
    (query, key and value interleaved by key-value group, as megatron's linear_qkv has them) or "gate_up" (both
    halves, each split over the ranks). `axis` is the tensor-parallel split of the megatron tensor (None: replicated);
    rules with {expert} in their name split over the expert-tensor-parallel group instead.
    """

    megatron: str  # with {layer} and {expert}
    hf: tuple[str, ...]
    shapes: tuple[tuple[str, ...], ...]  # one a Hugging Face tensor, in names of `Dims.size`
    layout: str = "plain"
    axis: int | None = None
    where: str = "all"  # layers that have it: "all" | "dense" | "moe"

    @property
    def expert(self) -> bool:
        return "{expert}" in self.megatron


@dataclass(frozen=True)
class Entry:
    """One global megatron parameter: its rule, its Hugging Face names and their shapes."""

    rule: Rule
    hf: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    layer: int | None
    expert: int | None


@dataclass(frozen=True)
class Place:
    """Where a rank stands: sizes and ranks of the groups that split weights, and the first layer of its stage."""

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    etp_rank: int = 0
    etp_size: int = 1
    layer_offset: int = 0

    def split(self, rule: Rule) -> tuple[int, int]:
        """(rank, size) of the group over which the rule's axis is split."""
        return (self.etp_rank, self.etp_size) if rule.expert else (self.tp_rank, self.tp_size)


def plan(rules: Sequence[Rule], dims: Dims) -> dict[str, Entry]:
    """Global megatron name -> Entry, in model order (embedding, layers, final norm, head)."""
    table: dict[str, Entry] = {}

    def add(rule: Rule, layer: int | None, expert: int | None) -> None:
        names = {"layer": layer, "expert": expert}
        shapes = tuple(tuple(dims.size(d) for d in shape) for shape in rule.shapes)
        table[rule.megatron.format(**names)] = Entry(
            rule, tuple(n.format(**names) for n in rule.hf), shapes, layer, expert
        )

    def is_layer(rule: Rule) -> bool:
        return "{layer}" in rule.megatron

    for rule in rules:
        if rule.megatron.startswith("embedding."):
            add(rule, None, None)
    for layer in range(dims.layers):
        kind = "moe" if dims.moe_layers and dims.moe_layers[layer] else "dense"
        for rule in (r for r in rules if is_layer(r) and r.where in ("all", kind)):
            for expert in range(dims.experts) if rule.expert else (None,):
                add(rule, layer, expert)
    for rule in rules:
        tied_head = dims.tied and rule.megatron == "output_layer.weight"
        if not is_layer(rule) and not rule.megatron.startswith("embedding.") and not tied_head:
            add(rule, None, None)
    return table


_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")


def global_name(local: str, place: Place, experts: int) -> str:
    """Global megatron name of a rank's parameter: its layer and expert numbers count over all stages and ranks."""
    name = _LAYER.sub(lambda m: str(int(m[0]) + place.layer_offset), local)
    return _EXPERT.sub(lambda m: str(int(m[0]) + place.ep_rank * (experts // place.ep_size)), name)


def check_source(
    table: Mapping[str, Entry], shapes: Mapping[str, Sequence[int]], ignored: Iterable[str], where: str
) -> None:
    """Raise UserError that names every missing, unknown or misshapen tensor of a Hugging Face source.

    Args: `shapes` of the source by name; `ignored` patterns of names that carry nothing; `where` for the message.
    """
    expected = {n: s for e in table.values() for n, s in zip(e.hf, e.shapes, strict=True)}
    missing = sorted(set(expected) - set(shapes))
    unknown = sorted(n for n in set(shapes) - set(expected) if not any(re.fullmatch(p, n) for p in ignored))
    wrong = [
        f"{n} is {list(shapes[n])}, config.json says {list(s)}"
        for n, s in sorted(expected.items())
        if n in shapes and tuple(shapes[n]) != s
    ]
    problems = [f"missing tensor {n}" for n in missing] + [f"unknown tensor {n}" for n in unknown] + wrong
    if problems:
        more = f"\n  ... and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise UserError(f"{where}: weights do not fit config.json:\n  " + "\n  ".join(problems[:20]) + more)


def pack(entry: Entry, tensors: Sequence[Tensor], dims: Dims) -> Tensor:
    """Hugging Face tensors of an entry -> the full megatron tensor (before any split)."""
    for name, tensor, shape in zip(entry.hf, tensors, entry.shapes, strict=True):
        if tuple(tensor.shape) != shape:
            raise UserError(f"tensor {name} has shape {list(tensor.shape)}; {list(shape)} was expected")
    if entry.rule.layout == "qkv":
        groups, d = dims.kv_heads, dims.head_dim
        q, k, v = tensors  # [heads * d, h], [kv_heads * d, h], [kv_heads * d, h]
        parts = [q.reshape(groups, -1, q.shape[-1]), k.reshape(groups, d, -1), v.reshape(groups, d, -1)]
        return torch.cat(parts, 1).reshape(-1, q.shape[-1])  # [(heads + 2 * kv_heads) * d, h]
    if entry.rule.layout == "gate_up":
        return torch.cat(list(tensors), 0)  # [2 * ffn, h]
    return tensors[0]


def unpack(entry: Entry, full: Tensor, dims: Dims) -> list[tuple[str, Tensor]]:
    """The full megatron tensor of an entry -> its Hugging Face (name, tensor) pairs; the inverse of `pack`."""
    if entry.rule.layout == "qkv":
        d, per = dims.head_dim, dims.heads // dims.kv_heads
        grouped = full.reshape(dims.kv_heads, (per + 2) * d, -1)
        q, k, v = grouped.split([per * d, d, d], 1)
        parts = [t.reshape(-1, full.shape[-1]) for t in (q, k, v)]
    elif entry.rule.layout == "gate_up":
        parts = list(full.chunk(2, 0))
    else:
        parts = [full]
    for name, part, shape in zip(entry.hf, parts, entry.shapes, strict=True):
        if tuple(part.shape) != shape:
            raise ValueError(f"{name}: gathered {list(part.shape)}, expected {list(shape)}: a shard is missing")
    return list(zip(entry.hf, parts, strict=True))


def split(entry: Entry, full: Tensor, rank: int, size: int) -> Tensor:
    """The part of a full megatron tensor that `rank` of `size` holds."""
    rule = entry.rule
    if size == 1 or rule.axis is None:
        return full
    if rule.layout == "vocab":
        padded = -full.shape[0] % size  # rows of zeros that no token id reaches
        full = torch.cat([full, full.new_zeros(padded, *full.shape[1:])]) if padded else full
    halves = full.chunk(2, 0) if rule.layout == "gate_up" else (full,)
    if any(h.shape[rule.axis] % size for h in halves):
        raise UserError(
            f"{entry.hf}: {list(full.shape)} cannot be split over {size} ranks; choose a parallel size that divides it"
        )
    return torch.cat([h.chunk(size, rule.axis)[rank] for h in halves], 0)


def merge(entry: Entry, shards: Sequence[Tensor]) -> Tensor:
    """Shards of all ranks, in order -> the full megatron tensor; the inverse of `split`."""
    rule = entry.rule
    if len(shards) == 1 or rule.axis is None:
        return shards[0]
    if rule.layout == "gate_up":
        halves = [s.chunk(2, 0) for s in shards]
        return torch.cat([h[0] for h in halves] + [h[1] for h in halves], 0)
    full = torch.cat(list(shards), rule.axis)
    return full[: entry.shapes[0][0]] if rule.layout == "vocab" else full


def local_shard(
    local: str, table: Mapping[str, Entry], dims: Dims, place: Place, source: Callable[[str], Tensor]
) -> Tensor:
    """A rank's shard of its parameter `local`, from Hugging Face tensors by name.

    Raises KeyError for a parameter that no rule maps. A head that is a copy of a tied embedding (last pipeline
    stage) takes the embedding's tensor.
    """
    name = global_name(local, place, dims.experts)
    if dims.tied and name == "output_layer.weight":
        name = "embedding.word_embeddings.weight"
    if name not in table:
        raise KeyError(f"no rule maps the megatron parameter {name}")
    entry = table[name]
    return split(entry, pack(entry, [source(n) for n in entry.hf], dims), *place.split(entry.rule))
