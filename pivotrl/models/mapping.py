"""The engine of the declarative tensor mappings: Hugging Face tensors <-> megatron-core shards. No megatron.

A family declares `Rule`s; `plan` expands them over layers and experts into one table from the *global* megatron
name (global layer and expert numbers) to the Hugging Face tensors behind it. Loading, refit, export and conversion
all read that table, so a tensor cannot be mapped one way in one of them and another way in the next.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from pivotrl.errors import UserError
from pivotrl.models.dims import Dims


@dataclass(frozen=True)
class Rule:
    """One kind of megatron parameter and the Hugging Face tensors that it is made of.

    `layout`: "plain" (the tensor itself), "vocab" (rows padded to a multiple of the tensor-parallel size), "qkv"
    (query, key and value interleaved by key-value group, as megatron's linear_qkv has them), "gate_up" (both
    halves, each split over the ranks) or "sections" (the tensor itself, whose `sections` of rows are each split).
    `axis` is the tensor-parallel split of the megatron tensor (None: replicated); rules with {expert} in their name
    split over the expert-tensor-parallel group instead.
    """

    megatron: str  # with {layer} and {expert}, or {outer}, {inner} and {expert} for layers that predict further tokens
    hf: tuple[str, ...]  # with {layer} and {expert}
    shapes: tuple[tuple[str, ...], ...]  # one a Hugging Face tensor, in names of `Dims.size`
    layout: str = "plain"
    axis: int | None = None
    where: str = "all"  # layers that have it: "all", or one of `Dims.kinds`; "first" | "last" of a block with {outer}
    sections: tuple[tuple[str, str], ...] = ()  # (name in a distributed checkpoint, size in names of `Dims.size`)
    needs: str = ""  # a size in `Dims.extra`: models where it is 0 lack the parameter
    constant: bool = False  # a buffer in float32 that training leaves as it is

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
    sections: tuple[tuple[str, int], ...] = ()  # (name, rows) of the parts that are split for themselves
    kind: str = "dense"  # of its layer, as in `Dims.kinds`


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
    """Global megatron name -> Entry, in model order (embedding, layers, final norm, head, further-token layers)."""
    table: dict[str, Entry] = {}
    rules = [r for r in rules if not r.needs or dims.has(r.needs)]

    def add(rule: Rule, layer: int | None, expert: int | None, kind: str = "dense") -> None:
        outer, inner = divmod(layer or 0, dims.mtp_block)
        names = {"layer": layer, "expert": expert, "outer": outer, "inner": inner}
        shapes = tuple(tuple(dims.size(d) for d in shape) for shape in rule.shapes)
        hf = tuple(n.format(**names) for n in rule.hf)
        sections = tuple((part, dims.size(d)) for part, d in rule.sections)
        number = None if "{outer}" in rule.megatron else layer
        table[rule.megatron.format(**names)] = Entry(rule, hf, shapes, number, expert, sections, kind)

    def layers(mark: str, kinds: Sequence[str], block: int) -> None:
        marked = [r for r in rules if mark in r.megatron]
        for layer, kind in enumerate(kinds):
            places = {"all", kind} | {p for p, at in (("first", 0), ("last", block - 1)) if layer % block == at}
            for rule in (r for r in marked if r.where in places):
                for expert in range(dims.experts) if rule.expert else (None,):
                    add(rule, layer, expert, kind)

    single = [r for r in rules if "{layer}" not in r.megatron and "{outer}" not in r.megatron]
    for rule in single:
        if rule.megatron.startswith("embedding."):
            add(rule, None, None)
    layers("{layer}", [dims.kind(i) for i in range(dims.layers)], dims.layers)
    for rule in single:
        tied_head = dims.tied and rule.megatron == "output_layer.weight"
        if not rule.megatron.startswith("embedding.") and not tied_head:
            add(rule, None, None)
    layers("{outer}", dims.mtp_kinds, dims.mtp_block)
    return table


_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")
# Transformer Engine keeps a norm in the linear layer after it, and all experts in one module.
_FUSED = (
    (re.compile(r"self_attention\.linear_qkv\.layer_norm_weight$"), "input_layernorm.weight"),
    (re.compile(r"mlp\.linear_fc1\.layer_norm_weight$"), "pre_mlp_layernorm.weight"),
    (re.compile(r"experts\.(linear_fc[12])\.weight(\d+)$"), r"experts.local_experts.\2.\1.weight"),
)


def global_name(local: str, place: Place, dims: Dims) -> str:
    """Global megatron name of a rank's parameter: its layer and expert numbers count over all stages and ranks."""
    for pattern, canonical in _FUSED:
        local = pattern.sub(canonical, local)
    name = _LAYER.sub(lambda m: str(int(m[0]) + place.layer_offset), local)
    if dims.hybrid:
        name = _hybrid_name(name, dims)
    return _EXPERT.sub(lambda m: str(int(m[0]) + place.ep_rank * (dims.experts // place.ep_size)), name)


def _hybrid_name(name: str, dims: Dims) -> str:
    """megatron-core's hybrid model calls parts otherwise than its GPT model, which the policy's hybrid is."""
    layer = _LAYER.search(name)
    if layer is None:
        return name.replace("decoder.final_layernorm.", "decoder.final_norm.")
    if dims.kind(int(layer[0])) != "mamba":
        return name
    return name.replace(".input_layernorm.", ".norm.").replace(".self_attention.", ".mixer.")


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


def _arrange(layout: str, tensors: Sequence[Tensor], dims: Dims) -> Tensor:
    """Rows of an entry's Hugging Face tensors in the order of its megatron tensor; any width."""
    if layout == "qkv":
        groups, d = dims.kv_heads, dims.head_dim
        q, k, v = tensors  # [heads * d, h], [kv_heads * d, h], [kv_heads * d, h]; biases without h
        rest = q.shape[1:]
        parts = [q.reshape(groups, -1, *rest), k.reshape(groups, d, *rest), v.reshape(groups, d, *rest)]
        return torch.cat(parts, 1).reshape(-1, *rest)  # [(heads + 2 * kv_heads) * d, h]
    if layout == "gate_up":
        return torch.cat(list(tensors), 0)  # [2 * ffn, h]
    return tensors[0]


def pack(entry: Entry, tensors: Sequence[Tensor], dims: Dims) -> Tensor:
    """Hugging Face tensors of an entry -> the full megatron tensor (before any split)."""
    for name, tensor, shape in zip(entry.hf, tensors, entry.shapes, strict=True):
        if tuple(tensor.shape) != shape:
            raise UserError(f"tensor {name} has shape {list(tensor.shape)}; {list(shape)} was expected")
    return _arrange(entry.rule.layout, tensors, dims)


@dataclass(frozen=True)
class Run:
    """`count` rows of an entry's Hugging Face tensor number `part`, from `hf`, are megatron's rows from `megatron`."""

    part: int
    hf: int
    megatron: int
    count: int


def row_runs(entry: Entry, dims: Dims) -> tuple[Run, ...]:
    """Which rows of an entry's Hugging Face tensors are which rows of its megatron tensor, in megatron's order.

    Found by sending row numbers through `pack`'s own arrangement, so that bytes can be copied where tensors need not
    be held, and one mapping stays the only one.
    """
    return _row_runs(entry.rule.layout, tuple(shape[0] for shape in entry.shapes), dims)


@lru_cache(maxsize=256)
def _row_runs(layout: str, rows: tuple[int, ...], dims: Dims) -> tuple[Run, ...]:
    if len(rows) == 1:
        return (Run(0, 0, 0, rows[0]),)
    numbers = torch.arange(sum(rows), device="cpu")[:, None]
    order = _arrange(layout, numbers.split(list(rows)), dims)[:, 0]
    starts = [0, *((order.diff() != 1).nonzero()[:, 0] + 1).tolist(), len(order)]
    first = [sum(rows[:i]) for i in range(len(rows) + 1)]
    runs: list[Run] = []
    for start, end in pairwise(starts):
        number = int(order[start])
        while start < end:  # rows that follow on each other may cross from one tensor into the next
            part = bisect_right(first, number) - 1
            count = min(end - start, first[part + 1] - number)
            runs.append(Run(part, number - first[part], start, count))
            start, number = start + count, number + count
    return tuple(runs)


def unpack(entry: Entry, full: Tensor, dims: Dims) -> list[tuple[str, Tensor]]:
    """The full megatron tensor of an entry -> its Hugging Face (name, tensor) pairs; the inverse of `pack`."""
    if tuple(full.shape) != (rows := sum(shape[0] for shape in entry.shapes), *entry.shapes[0][1:]):
        expected = [rows, *entry.shapes[0][1:]]
        raise ValueError(f"{', '.join(entry.hf)}: gathered {list(full.shape)}, expected {expected}: a shard is missing")
    parts: list[list[Tensor]] = [[] for _ in entry.hf]
    for run in row_runs(entry, dims):
        parts[run.part].append(full.narrow(0, run.megatron, run.count))
    return [(n, p[0] if len(p) == 1 else torch.cat(p)) for n, p in zip(entry.hf, parts, strict=True)]


def split(entry: Entry, full: Tensor, rank: int, size: int) -> Tensor:
    """The part of a full megatron tensor that `rank` of `size` holds."""
    rule = entry.rule
    if size == 1 or rule.axis is None:
        return full
    if rule.layout == "vocab":
        padded = -full.shape[0] % size  # rows of zeros that no token id reaches
        full = torch.cat([full, full.new_zeros(padded, *full.shape[1:])]) if padded else full
    parts = _parts(entry, full)
    if any(p.shape[rule.axis] % size for p in parts):
        raise UserError(
            f"{entry.hf}: {list(full.shape)} cannot be split over {size} ranks; choose a parallel size that divides it"
        )
    return torch.cat([p.chunk(size, rule.axis)[rank] for p in parts], 0)


def _parts(entry: Entry, tensor: Tensor, ranks: int = 1) -> Sequence[Tensor]:
    """The row sections of a tensor (or of one rank's shard of it) that are each split over the ranks."""
    if entry.rule.layout == "gate_up":
        return tensor.chunk(2, 0)
    if entry.rule.layout == "sections":
        return tensor.split([rows // ranks for _, rows in entry.sections], 0)
    return (tensor,)


def merge(entry: Entry, shards: Sequence[Tensor]) -> Tensor:
    """Shards of all ranks, in order -> the full megatron tensor; the inverse of `split`."""
    rule = entry.rule
    if len(shards) == 1 or rule.axis is None:
        return shards[0]
    if rule.layout in ("gate_up", "sections"):
        of_rank = [_parts(entry, s, len(shards)) for s in shards]
        return torch.cat([part[i] for i in range(len(of_rank[0])) for part in of_rank], 0)
    full = torch.cat(list(shards), rule.axis)
    return full[: entry.shapes[0][0]] if rule.layout == "vocab" else full


def local_shard(
    local: str, table: Mapping[str, Entry], dims: Dims, place: Place, source: Callable[[str], Tensor]
) -> Tensor:
    """A rank's shard of its parameter `local`, from Hugging Face tensors by name.

    Raises KeyError for a parameter that no rule maps. A head that is a copy of a tied embedding (last pipeline
    stage) takes the embedding's tensor.
    """
    name = global_name(local, place, dims)
    if dims.tied and name == "output_layer.weight":
        name = "embedding.word_embeddings.weight"
    if name not in table:
        raise KeyError(f"no rule maps the megatron parameter {name}")
    entry = table[name]
    return split(entry, pack(entry, [source(n) for n in entry.hf], dims), *place.split(entry.rule))
