"""Engines that spread whole experts over their ranks, while the trainer spreads them otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pivotrl.config import Generation
from pivotrl.generation.engine import RefitError
from pivotrl.generation.served import RankShards, served_parameters
from pivotrl.generation.vllm_refit import VllmRefit
from pivotrl.models.mapping import plan
from pivotrl.models.registry import family_for
from pivotrl.refit.layout import EngineLayout, TrainerLayout
from pivotrl.refit.plan import RefitPlan
from tests.checkpoint_makers import CONFIGS, save_hf
from tests.unit.test_refit_engines import FakeLlm, FakeSetup
from tests.unit.test_refit_plan import simulate, trainer_shards

RANKS = 2


class Spread(nn.Module):
    """What a rank of a vLLM engine with expert parallelism holds of one layer: its own experts, fused."""

    def __init__(self, layer: int, rank: int, experts: int) -> None:
        super().__init__()
        module: nn.Module = self
        for part in ("model", "layers", str(layer), "mlp", "experts"):
            module.add_module(part, made := nn.Module())
            module = made
        own = experts // RANKS
        placed = torch.full((experts,), -1, dtype=torch.int32)
        placed[rank * own : (rank + 1) * own] = torch.arange(own, dtype=torch.int32)
        module.register_buffer("_expert_map", placed, persistent=False)
        module.register_parameter("w2_weight", nn.Parameter(torch.zeros(own, 1, 1), requires_grad=False))


def setup(tmp_path: Path) -> tuple[dict[str, Tensor], dict[str, Any], Any, dict[str, Any]]:
    weights = save_hf(CONFIGS["moe"], tmp_path, torch.float32)
    config = json.loads((tmp_path / "config.json").read_text())
    family = family_for(config)
    dims = family.dims(config)
    return weights, config, dims, plan(family.rules, dims)


def alone(error: BaseException | None) -> None:
    """Instead of the agreement of several processes."""
    if error is not None:
        raise error


@pytest.mark.parametrize("rank", range(RANKS))
def test_names_of_fused_parameters_are_those_of_the_rank_s_experts(tmp_path: Path, rank: int) -> None:
    weights, _, dims, table = setup(tmp_path)
    layer = next(e.layer for e in table.values() if e.expert is not None)
    assert layer is not None
    (served,) = served_parameters(Spread(layer, rank, dims.experts))
    own = range(rank * dims.experts // RANKS, (rank + 1) * dims.experts // RANKS)
    assert served.sources == [f"model.layers.{layer}.mlp.experts.{e}.down_proj.weight" for e in own]
    shards = RankShards(tmp_path, RANKS, rank, expert_parallel=True)
    assert set(served.sources) <= weights.keys() - shards.elsewhere
    experts = {n for e in table.values() if e.expert is not None for n in e.hf}
    assert len(shards.elsewhere & experts) == len(experts) / RANKS
    # the vocabulary of this model fits into the first rank's padded half
    assert shards.elsewhere - experts == (set() if rank == 0 else {"lm_head.weight", "model.embed_tokens.weight"})


@pytest.mark.parametrize("trainer", [TrainerLayout(2), TrainerLayout(2, expert=2), TrainerLayout(4, 2, 1, 4)])
@pytest.mark.parametrize("fault", ["none", "missing", "whole"])
def test_a_refit_loads_a_rank_s_experts_and_misses_no_other(tmp_path: Path, trainer: TrainerLayout, fault: str) -> None:
    """Stream by plan from a trainer that holds the experts elsewhere; `whole`: every rank is given everything."""
    weights, _, dims, table = setup(tmp_path)
    layout = EngineLayout(trainer.world // RANKS, RANKS, RANKS)
    arrived = simulate(RefitPlan(table, dims, trainer, layout), trainer_shards(table, dims, trainer, weights))
    for rank in range(RANKS):
        loaded: dict[str, Tensor] = {}
        llm = FakeLlm(nn.Module(), lambda model, stream, into=loaded: into.update(stream))  # type: ignore[arg-type]
        generation = Generation(tensor_parallel=RANKS, expert_parallel=True, verify_refit="off")
        llm.apply_model = lambda work: [None]  # type: ignore[method-assign,assignment]
        refit = VllmRefit(llm, FakeSetup(), tmp_path, generation, rank)  # type: ignore[arg-type]
        refit._agree = alone  # type: ignore[method-assign]
        sent = dict(weights) if fault == "whole" else dict(arrived[rank])
        own = next(n for n in sent if ".experts." in n and n not in refit._expected.elsewhere)
        if fault == "missing":
            del sent[own]
            with pytest.raises(RefitError, match=rf"1 of \d+ weights were not sent: {own}"):
                refit.run(iter(sent.items()), 1)
            continue
        refit.run(iter(sent.items()), 1)
        assert loaded.keys() == weights.keys() - refit._expected.elsewhere
        assert all(torch.equal(loaded[n], weights[n]) for n in loaded if ".experts." in n)
