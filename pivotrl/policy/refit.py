"""The trainer's side of a refit: this rank's megatron shards, sent by plan to the ranks whose engines need them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state as groups
from torch import Tensor

from pivotrl.models.dims import Dims
from pivotrl.models.mapping import Entry
from pivotrl.policy.model import PolicyModel
from pivotrl.policy.weights import full_weights, named_parameters, place_of, stage_layers_of
from pivotrl.refit.execute import RankRefit, Shard
from pivotrl.refit.layout import EngineLayout, TrainerLayout
from pivotrl.refit.plan import BUCKET_BYTES, RefitPlan
from pivotrl.refit.transport import ProcessTransport, Transport


class RefitSource:
    """Streams a model's weights to engines. The plan of each engine layout is made once."""

    def __init__(self, chunks: Sequence[PolicyModel], dims: Dims, table: dict[str, Entry]) -> None:
        self._chunks, self._model, self._dims, self._table = chunks, chunks[0], dims, table
        self._plans: dict[EngineLayout, tuple[RefitPlan, RankRefit]] = {}
        self._transport: Transport | None = None

    def stream(self, engine: EngineLayout) -> Iterator[tuple[str, Tensor | Shard]]:
        """(Hugging Face name, what this rank's engine serves of it). Every rank must consume it to the end, in step."""
        if dist.get_world_size() == 1:
            return full_weights(self._chunks, self._dims, self._table)
        _, mine = self._plan(engine)
        if self._transport is None:
            parameter = next(self._model.parameters())
            self._transport = ProcessTransport(parameter.dtype, parameter.device)
        return mine.stream(self._own(), self._transport)

    def traffic(self, engine: EngineLayout) -> dict[str, float]:
        """MB that this rank received and sent in the last stream, and the least that it had to receive. Empty where
        one process is trainer and engine: nothing travels."""
        if dist.get_world_size() == 1:
            return {}
        plan, mine = self._plan(engine)
        size = next(self._model.parameters()).element_size()
        bound = int(plan.traffic.bound[mine.rank]) * size
        return {"received_mb": mine.received / 1e6, "sent_mb": mine.sent / 1e6, "bound_mb": bound / 1e6}

    def _own(self) -> dict[str, Tensor]:
        return {n: p.detach() for n, p in named_parameters(self._chunks, self._dims)}

    def _plan(self, engine: EngineLayout) -> tuple[RefitPlan, RankRefit]:
        if engine not in self._plans:
            layout = TrainerLayout(
                dist.get_world_size(),
                groups.get_tensor_model_parallel_world_size(),
                groups.get_pipeline_model_parallel_world_size(),
                groups.get_expert_model_parallel_world_size(),
                groups.get_expert_tensor_parallel_world_size(),
                self._model.config.virtual_pipeline_model_parallel_size or 1,
                stage_layers=stage_layers_of(self._model),
            )
            self._check_place(layout)
            size = next(self._model.parameters()).element_size()
            per_node = max(1, torch.cuda.device_count())
            plan = RefitPlan(self._table, self._dims, layout, engine, BUCKET_BYTES // size, per_node)
            self._plans[engine] = (plan, RankRefit(plan, dist.get_rank()))
        return self._plans[engine]

    def _check_place(self, layout: TrainerLayout) -> None:
        """The plan's idea of who holds what must be megatron-core's."""
        place, rank = place_of(self._model), dist.get_rank()
        checked = set()
        for name in self._own():
            entry = self._table.get(name)
            if entry is None:  # a tied head's copy on the last stage
                continue
            stage, expert_rank = layout.stage(entry, self._dims), layout.expert_rank(entry, self._dims)
            key = (entry.rule, stage, expert_rank)
            if key in checked:
                continue
            checked.add(key)
            shard = place.split(entry.rule)[0] if entry.rule.axis is not None else 0
            if rank not in layout.holders(entry, stage, expert_rank, shard):
                raise RuntimeError(f"refit plan: rank {rank} holds {name} in another place than {layout} says")
