"""What each rank of a parallel layout holds, counted and printed from the tensor mapping. No megatron.

Which shard of which tensor it is: `pivotrl.refit.layout.TrainerLayout`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from pivotrl.config import Parallel
from pivotrl.errors import UserError
from pivotrl.layout import Layout, layer_places, stage_layers
from pivotrl.models.dims import Dims
from pivotrl.models.mapping import Entry


@dataclass(frozen=True)
class Holding:
    """Parameters of one rank of a pipeline stage; every rank of a stage holds as many."""

    stage: int
    layers: tuple[tuple[int, int], ...]  # of each of its chunks: first and one past the last
    ranks: tuple[int, int]
    split: int  # parameters split over the tensor-parallel ranks (with rows of vocabulary padding)
    replicated: int  # norms and routers: the same on every rank of the stage
    experts: int  # of this rank's experts
    padding: int  # rows that no token has, over all tensor-parallel ranks
    copied: int  # of `split`: a tied head's copy of the embedding

    @property
    def dense(self) -> int:
        return self.split + self.replicated

    @property
    def total(self) -> int:
        return self.dense + self.experts


def holdings(layout: Layout, table: Mapping[str, Entry], dims: Dims) -> list[Holding]:
    """What a rank of each pipeline stage holds. Raises UserError where layers or tensors cannot be split."""
    p = layout.parallel
    places = layer_places(stage_layers(p, dims.layers), p.virtual_pipeline)
    stages = [place.stage for place in places]
    per_stage, chunks = layout.world // p.pipeline, p.virtual_pipeline
    found = []
    for stage in range(p.pipeline):
        own = list(_stage_entries(table.values(), stage, stages, dims.tied))
        split = replicated = experts = padding = copied = 0
        for entry, copy in own:
            size, padded = _shard_size(entry, p)
            if entry.rule.expert:
                experts += size
            elif entry.rule.axis is None:
                replicated += size
            else:
                split, padding = split + size, padding + (0 if copy else padded)
                copied += size if copy else 0
        if experts % p.expert or (dims.experts and dims.experts % p.expert):
            raise UserError(f"parallel.expert={p.expert} does not divide the model's {dims.experts} experts")
        ranks = (stage * per_stage, (stage + 1) * per_stage)
        of_chunk = [
            [i for i, at in enumerate(places) if (at.stage, at.chunk) == (stage, chunk)] for chunk in range(chunks)
        ]
        layers = tuple((held[0], held[-1] + 1) for held in of_chunk)
        found.append(Holding(stage, layers, ranks, split, replicated, experts // p.expert, padding, copied))
    return found


def unique(layout: Layout, holdings: Iterable[Holding]) -> int:
    """Parameters over all ranks, each once: without replicas, padding and copies of a tied embedding."""
    p = layout.parallel
    return sum(
        (h.split - h.copied) * p.tensor + h.replicated + h.experts * p.expert * p.expert_tensor - h.padding
        for h in holdings
    )


def describe(layout: Layout, table: Mapping[str, Entry], dims: Dims, bytes_each: int, rank: int | None = None) -> str:
    """A table for people: a line a pipeline stage, or one rank's place. `bytes_each`: of a parameter."""
    p, everyone = layout.parallel, holdings(layout, table, dims)
    lines = [
        f"{layout.world} ranks = tensor {p.tensor} x context {p.context} x data {layout.data} x pipeline {p.pipeline}"
        + (f" of {p.virtual_pipeline} chunks" if p.virtual_pipeline > 1 else "")
        + (", sequence parallel" if p.sequence else "")
    ]
    if dims.experts:
        lines.append(
            f"experts: expert tensor {p.expert_tensor} x expert {p.expert} x data {layout.expert_data} "
            f"x pipeline {p.pipeline}; {dims.experts // p.expert} of {dims.experts} experts a rank"
        )
    lines.append(f"parameters of the model: {unique(layout, everyone):,}")
    lines.append(f"{'stage':>5} {'ranks':>11} {'layers':>8} {'dense/rank':>15} {'experts/rank':>15} {'GiB':>7}")
    shown = everyone
    if rank is not None:
        at = layout.coordinates(rank)
        shown = [everyone[at.pipeline]]
    for h in shown:
        ranks, *spans = (f"{a}-{b - 1}" for a, b in (h.ranks, *h.layers))
        layers = ",".join(spans)
        gib = h.total * bytes_each / 2**30
        lines.append(f"{h.stage:>5} {ranks:>11} {layers:>8} {h.dense:>15,} {h.experts:>15,} {gib:>7.2f}")
    if rank is not None:
        place = ", ".join(f"{name} {value}" for name, value in vars(at).items())
        lines.append(f"rank {rank}: {place}")
        if dims.experts:
            each = dims.experts // p.expert
            lines.append(f"experts {at.expert * each}-{(at.expert + 1) * each - 1} of every layer with experts")
    return "\n".join(lines)


def _stage_entries(entries: Iterable[Entry], stage: int, stages: list[int], tied: bool) -> Iterable[tuple[Entry, bool]]:
    """(entry, whether it is a copy of a tied embedding) of a stage. `stages`: that of each layer."""
    last = max(stages)
    for entry in entries:
        embedding = entry.rule.megatron.startswith("embedding.")
        if entry.layer is not None:
            if stages[entry.layer] == stage:
                yield entry, False
        elif stage == (0 if embedding else last):
            yield entry, False
        if tied and embedding and stage == last and last > 0:
            yield entry, True


def _shard_size(entry: Entry, parallel: Parallel) -> tuple[int, int]:
    """(parameters of one rank's shard, padding in the shards of all ranks)."""
    rows, rest = sum(s[0] for s in entry.shapes), prod(entry.shapes[0][1:])
    size = rows * rest
    if entry.rule.axis is None:
        return size, 0
    ranks = parallel.expert_tensor if entry.rule.expert else parallel.tensor
    if entry.rule.layout == "vocab":
        padded = -(-rows // ranks) * ranks
        return padded // ranks * rest, (padded - rows) * rest
    dimension = (s[entry.rule.axis] for s in entry.shapes)
    if any(n % ranks for n in dimension):
        raise UserError(f"{entry.hf[0]}: {list(entry.shapes[0])} cannot be split over {ranks} ranks")
    return size // ranks, 0
