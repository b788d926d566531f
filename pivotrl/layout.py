"""The parallel layout of a run: sizes, checks, and where each rank stands. Pure arithmetic.

Ranks are in megatron-core's order: tensor fastest, then context and data, pipeline slowest; for experts: expert tensor,
expert, data, pipeline. `pivotrl.models.holdings` counts and prints what a rank holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from pivotrl.config import Parallel
from pivotrl.errors import UserError


def stage_layers(parallel: Parallel, layers: int) -> tuple[int, ...]:
    """Layers of each pipeline stage. Raises UserError where they cannot be dealt out."""
    stages, first, last = parallel.pipeline, parallel.first_stage_layers, parallel.last_stage_layers
    given = [n for n in (first, last) if n is not None]
    if stages == 1 and given:
        raise UserError("parallel.first_stage_layers and last_stage_layers need parallel.pipeline > 1")
    middle, rest = stages - len(given), layers - sum(given)
    if (rest > 0) != (middle > 0) or (middle and rest % middle):
        hint = "" if given else "; give the ends fewer with parallel.first_stage_layers and last_stage_layers"
        raise UserError(
            f"parallel.pipeline={stages} does not divide the model's {layers} layers"
            + (f" ({rest} are left for {middle} middle stages)" if given else "")
            + hint
        )
    found = [rest // middle if middle else 0] * stages
    found[0] = found[0] if first is None else first
    found[-1] = found[-1] if last is None else last
    if (chunks := parallel.virtual_pipeline) > 1:
        if stages == 1:
            raise UserError(f"parallel.virtual_pipeline={chunks} needs parallel.pipeline > 1")
        if odd := sorted({n for n in found if n % chunks}):
            raise UserError(
                f"parallel.virtual_pipeline={chunks} does not divide the {odd[0]} layers of a pipeline stage"
            )
    return tuple(found)


@dataclass(frozen=True)
class LayerPlace:
    """Where a layer is."""

    stage: int
    chunk: int  # of its stage's model
    position: int  # among the layers of its stage


@lru_cache(maxsize=64)
def layer_places(stage_layers: tuple[int, ...], chunks: int = 1) -> tuple[LayerPlace, ...]:
    """Place of every layer. With several chunks a stage, layers go round the stages once a chunk."""
    return tuple(
        LayerPlace(stage, chunk, chunk * (count // chunks) + i)
        for chunk in range(chunks)
        for stage, count in enumerate(stage_layers)
        for i in range(count // chunks)
    )


@dataclass(frozen=True)
class Coordinates:
    """Where a rank stands in each group."""

    tensor: int
    context: int
    data: int
    pipeline: int
    expert_tensor: int
    expert: int
    expert_data: int


@dataclass(frozen=True)
class Layout:
    """A `Parallel` on `world` ranks. `of` refuses sizes that do not fit."""

    parallel: Parallel
    world: int

    @classmethod
    def of(cls, parallel: Parallel, world: int) -> Layout:
        """Raises UserError where the groups do not divide the world."""
        found = cls(parallel, world)
        for what, size in (
            ("tensor x pipeline x context", found.dense_size),
            ("expert_tensor x expert x pipeline", found.expert_size),
        ):
            if world % size:
                raise UserError(f"parallel: {what} = {size} does not divide the world size {world}")
        return found

    @property
    def dense_size(self) -> int:
        p = self.parallel
        return p.tensor * p.pipeline * p.context

    @property
    def expert_size(self) -> int:
        p = self.parallel
        return p.expert_tensor * p.expert * p.pipeline

    @property
    def data(self) -> int:
        """Data-parallel size of the dense weights."""
        return self.world // self.dense_size

    @property
    def expert_data(self) -> int:
        """Data-parallel size of the experts."""
        return self.world // self.expert_size

    def coordinates(self, rank: int) -> Coordinates:
        """Raises UserError for a rank outside the world."""
        if not 0 <= rank < self.world:
            raise UserError(f"rank {rank} is not one of 0 to {self.world - 1}")
        p = self.parallel
        pipeline, inside = divmod(rank, self.world // p.pipeline)
        rest, tensor = divmod(inside, p.tensor)
        data, context = divmod(rest, p.context)
        block, expert_tensor = divmod(inside, p.expert_tensor)
        expert_data, expert = divmod(block, p.expert)
        return Coordinates(tensor, context, data, pipeline, expert_tensor, expert, expert_data)
