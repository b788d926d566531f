"""Which part of which Hugging Face tensor each rank holds (trainer) or needs (engine). Pure arithmetic, no torch.

A part is a box: one (start, stop) a dimension. Trainer ranks are in megatron-core's order (tensor fastest, then
context and data, pipeline slowest; for experts: expert tensor, expert, data, pipeline), engine ranks in vLLM's (tensor
fastest). The engine's boxes are those that vLLM's own loaders cut out of a whole tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pivotrl.errors import UserError
from pivotrl.layout import layer_places

if TYPE_CHECKING:
    from pivotrl.models.dims import Dims
    from pivotrl.models.mapping import Entry

Box = tuple[tuple[int, int], ...]
VOCABULARY_MULTIPLE = 64  # vLLM pads the vocabulary to a multiple of this before it splits it


@dataclass(frozen=True)
class TrainerLayout:
    """Sizes of the trainer's groups; data (and context) parallel is what remains of `world`."""

    world: int
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int = 1
    virtual_pipeline: int = 1  # model chunks of a pipeline stage
    stage_layers: tuple[int, ...] | None = None  # layers of each stage where they differ

    def __post_init__(self) -> None:
        counts = self.stage_layers or ()
        if counts and (len(counts) != self.pipeline or any(n % self.virtual_pipeline for n in counts)):
            raise UserError(
                f"trainer layout: stage_layers {counts} are not those of {self.pipeline} stages"
                f" of {self.virtual_pipeline} chunks"
            )
        for what, size in (
            ("tensor x pipeline", self.tensor * self.pipeline),
            ("expert x expert_tensor x pipeline", self.expert * self.expert_tensor * self.pipeline),
        ):
            if self.world % size:
                raise UserError(f"trainer layout: {what} = {size} does not divide {self.world} ranks")

    def stage(self, entry: Entry, dims: Dims) -> int:
        """Pipeline stage of a parameter."""
        if entry.layer is None:
            return 0 if entry.rule.megatron.startswith("embedding.") else self.pipeline - 1
        return self.place(entry.layer, dims)[0]

    def place(self, layer: int, dims: Dims) -> tuple[int, int]:
        """(stage, position among the stage's layers)."""
        counts, chunks = self.stage_layers, self.pipeline * self.virtual_pipeline
        if counts and sum(counts) != dims.layers:
            raise UserError(f"trainer layout: stage_layers {counts} do not add up to {dims.layers}")
        if not counts and dims.layers % chunks:
            raise UserError(
                f"trainer layout: {dims.layers} layers do not divide into {chunks} pipeline chunks; give stage_layers"
            )
        at = layer_places(counts or (dims.layers // self.pipeline,) * self.pipeline, self.virtual_pipeline)[layer]
        return at.stage, at.position

    def expert_rank(self, entry: Entry, dims: Dims) -> int | None:
        """Expert-parallel rank that holds an expert's parameter; None for others."""
        return None if entry.expert is None else entry.expert // (dims.experts // self.expert)

    def shards(self, entry: Entry) -> int:
        """Parts that the parameter is split into."""
        if entry.rule.axis is None:
            return 1
        return self.expert_tensor if entry.rule.expert else self.tensor

    def holders(self, entry: Entry, stage: int, expert_rank: int | None, shard: int) -> list[int]:
        """Ranks that hold this shard, all alike."""
        per_stage, first = self.world // self.pipeline, stage * (self.world // self.pipeline)
        if expert_rank is None:
            if entry.rule.axis is None:
                return list(range(first, first + per_stage))
            return list(range(first + shard, first + per_stage, self.tensor))
        block = self.expert * self.expert_tensor
        inside = expert_rank * self.expert_tensor + shard
        return list(range(first + inside, first + per_stage, block))


@dataclass(frozen=True)
class EngineLayout:
    """`engines` engines of `tensor` consecutive ranks each. `expert`: experts are split over the engine's ranks (whole
    experts, `expert` = `tensor`) or each expert is split like a dense MLP (`expert` = 1)."""

    engines: int = 1
    tensor: int = 1
    expert: int = 1
    first_rank: int = 0  # of the engines in the common world; the trainer's ranks start at 0

    def __post_init__(self) -> None:
        if self.expert not in (1, self.tensor):
            raise UserError(f"engine layout: expert={self.expert} must be 1 or tensor={self.tensor}")

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.engines * self.tensor)

    def tensor_rank(self, rank: int) -> int:
        return (rank - self.first_rank) % self.tensor

    def expert_owner(self, expert: int | None, dims: Dims) -> int | None:
        """Tensor rank that serves an expert alone; None if all ranks serve a part of it."""
        if expert is None or self.expert == 1:
            return None
        base, extra = divmod(dims.experts, self.expert)  # the first `extra` ranks serve one more
        split = extra * (base + 1)
        return expert // (base + 1) if expert < split else extra + (expert - split) // base

    def needs(self, entry: Entry, dims: Dims, tensor_rank: int) -> list[Box | None]:
        """The box of each Hugging Face tensor of the entry that a rank serves; None: nothing of it.

        Raises UserError where vLLM could not split the model so.
        """
        owner = self.expert_owner(entry.expert, dims)
        if owner is not None:
            return [whole(shape) if owner == tensor_rank else None for shape in entry.shapes]
        if self.tensor == 1 or entry.rule.axis is None:
            return [whole(shape) for shape in entry.shapes]
        layout, t, size = entry.rule.layout, tensor_rank, self.tensor
        if layout == "sections":  # a rank serves a part of each, which is no box: its loader cuts them out of the whole
            return [whole(shape) for shape in entry.shapes]
        if layout == "vocab":
            return [_rows(shape, *_padded_split(shape[0], t, size)) for shape in entry.shapes]
        if layout == "qkv":
            q, k, v = entry.shapes
            return [_even(q, 0, t, size, entry), *(_key_value(s, dims, t, size, entry) for s in (k, v))]
        return [_even(shape, entry.rule.axis, t, size, entry) for shape in entry.shapes]


@dataclass(frozen=True)
class Piece:
    """A box of Hugging Face tensor number `tensor` of an entry, and where it lies in a rank's megatron shard."""

    tensor: int
    box: Box
    local: Box


def pieces(entry: Entry, dims: Dims, shard: int, size: int) -> list[Piece]:
    """What shard `shard` of `size` of a megatron parameter holds, without padding."""
    rule, shapes = entry.rule, entry.shapes
    if rule.layout == "qkv":
        return _qkv_pieces(entry, dims, shard, size)
    if rule.layout == "gate_up":
        rows = shapes[0][0] // size
        return [
            Piece(i, _rows(s, shard * rows, (shard + 1) * rows), _rows(s, i * rows, (i + 1) * rows))
            for i, s in enumerate(shapes)
        ]
    shape = shapes[0]
    if size == 1 or rule.axis is None:
        return [Piece(0, whole(shape), whole(shape))]
    if rule.layout == "sections":
        return _section_pieces(entry, shard, size)
    if rule.layout == "vocab":
        rows = -(-shape[0] // size)
        start, stop = min(shard * rows, shape[0]), min((shard + 1) * rows, shape[0])
        return [Piece(0, _rows(shape, start, stop), _rows(shape, 0, stop - start))] if stop > start else []
    box = _even(shape, rule.axis, shard, size, entry)
    return [Piece(0, box, tuple((0, stop - start) for start, stop in box))]


def _section_pieces(entry: Entry, shard: int, size: int) -> list[Piece]:
    """A shard holds its share of each section of rows, one after another."""
    shape, out, start, local = entry.shapes[0], [], 0, 0
    for _, rows in entry.sections:
        part = rows // size
        first = start + shard * part
        out.append(Piece(0, _rows(shape, first, first + part), _rows(shape, local, local + part)))
        start, local = start + rows, local + part
    return out


def _qkv_pieces(entry: Entry, dims: Dims, shard: int, size: int) -> list[Piece]:
    """linear_qkv holds, for each key-value group, its query rows, then key, then value."""
    d, per = dims.head_dim, dims.heads // dims.kv_heads
    groups = dims.kv_heads // size
    out = []
    for g in range(groups):
        base, group = g * (per + 2) * d, shard * groups + g
        for i, (rows, offset) in enumerate(((per * d, 0), (d, per * d), (d, (per + 1) * d))):
            s = entry.shapes[i]
            local = _rows(s, base + offset, base + offset + rows)
            out.append(Piece(i, _rows(s, group * rows, (group + 1) * rows), local))
    return out


def whole(shape: tuple[int, ...]) -> Box:
    return tuple((0, n) for n in shape)


def intersection(a: Box, b: Box) -> Box | None:
    out = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return out if all(start < stop for start, stop in out) else None


def inside(box: Box, outer: Box) -> Box:
    """`box` in coordinates that start at `outer`."""
    return tuple((p - r, q - r) for (p, q), (r, _) in zip(box, outer, strict=True))


def moved(box: Box, origin: Box, target: Box) -> Box:
    """`box`, a part of `origin`, as the same part of `target`."""
    return tuple((p - o + t, q - o + t) for (p, q), (o, _), (t, _) in zip(box, origin, target, strict=True))


def numel(box: Box) -> int:
    size = 1
    for start, stop in box:
        size *= stop - start
    return size


def _rows(shape: tuple[int, ...], start: int, stop: int) -> Box:
    return ((start, stop), *((0, n) for n in shape[1:]))


def _even(shape: tuple[int, ...], axis: int, rank: int, size: int, entry: Entry) -> Box:
    if shape[axis] % size:
        raise UserError(
            f"{entry.hf[0]}: {list(shape)} cannot be split over {size} ranks; choose a size that divides it"
        )
    part = shape[axis] // size
    return tuple((rank * part, (rank + 1) * part) if i == axis else (0, n) for i, n in enumerate(shape))


def _padded_split(vocabulary: int, rank: int, size: int) -> tuple[int, int]:
    padded = -(-vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    if padded % size:
        raise UserError(f"generation.tensor_parallel={size} does not divide the vocabulary, padded to {padded}")
    rows = padded // size
    return min(rank * rows, vocabulary), min((rank + 1) * rows, vocabulary)


def _key_value(shape: tuple[int, ...], dims: Dims, rank: int, size: int, entry: Entry) -> Box:
    """Key-value heads are split over the ranks, or repeated where there are more ranks than heads."""
    if size <= dims.kv_heads:
        return _even(shape, 0, rank, size, entry)
    if size % dims.kv_heads:
        raise UserError(f"generation.tensor_parallel={size} is not a multiple of {dims.kv_heads} key-value heads")
    head = rank // (size // dims.kv_heads)
    return _rows(shape, head * dims.head_dim, (head + 1) * dims.head_dim)
