"""Run by test_paper_world.py: ranks of large worlds, with groups that only count and weights that have no memory.

Builds megatron-core's model of a sample of ranks that covers every pipeline stage, tensor and expert rank, and compares
each with what `pivotrl.models.holdings` and `pivotrl.refit.layout` say. Prints one JSON line: the sum of parameters
over all ranks (a rank of the sample stands for those of its stage, replicas once), seconds of the slowest rank.
"""

from __future__ import annotations

import json
import time
import warnings
from dataclasses import replace
from fractions import Fraction
from typing import Any

warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from pivotrl.config import Parallel  # noqa: E402
from pivotrl.layout import Layout  # noqa: E402
from pivotrl.models.holdings import holdings, unique  # noqa: E402
from pivotrl.models.mapping import plan  # noqa: E402
from pivotrl.models.registry import family_for  # noqa: E402
from pivotrl.models.rope import Rope  # noqa: E402
from pivotrl.policy import cpu_shim, distributed  # noqa: E402
from pivotrl.policy.model import build_chunks, transformer_config  # noqa: E402
from pivotrl.policy.weights import named_parameters, place_of, stage_layers_of  # noqa: E402
from pivotrl.refit.layout import TrainerLayout  # noqa: E402
from tests.true_configs import NEMOTRON_3_SUPER, QWEN3_30B_A3B, QWEN3_235B_A22B  # noqa: E402

CASES = {
    "30B on 256": (
        QWEN3_30B_A3B,
        256,
        Parallel(tensor=2, pipeline=4, context=2, expert=8, sequence=True, virtual_pipeline=2),
    ),
    "235B on 1024": (
        QWEN3_235B_A22B,
        1024,
        Parallel(4, 8, expert=8, sequence=True, first_stage_layers=11, last_stage_layers=11),
    ),
    "120B hybrid on 512": (
        NEMOTRON_3_SUPER,
        512,
        Parallel(tensor=2, pipeline=4, context=8, expert=32, sequence=True),
    ),
}


def check(config: dict[str, Any], world: int, parallel: Parallel) -> dict[str, Any]:
    family = family_for(config)
    dims = replace(family.dims(config), mtp_kinds=())
    table = {name: entry for name, entry in plan(family.rules, dims).items() if not entry.rule.constant}
    layout = Layout.of(parallel, world)
    everyone = holdings(layout, table, dims)
    settings = transformer_settings(family, config, dims, parallel)
    held: set[str] = set()  # by ranks of the sample
    parameters = Fraction()
    slowest, ranks = 0.0, sampled(layout)
    for rank in ranks:
        clock = time.monotonic()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        distributed.initialise(parallel)
        with cpu_shim.scope(), torch.device("meta"):
            chunks = build_chunks(settings(), dims, Rope(1e6), 32768)
        slowest = max(slowest, time.monotonic() - clock)
        place, at = place_of(chunks[0]), layout.coordinates(rank)
        assert (place.tp_rank, place.ep_rank, place.etp_rank) == (at.tensor, at.expert, at.expert_tensor)
        refit = TrainerLayout(
            world,
            parallel.tensor,
            parallel.pipeline,
            parallel.expert,
            parallel.expert_tensor,
            parallel.virtual_pipeline,
            stage_layers=stage_layers_of(chunks[0]),
        )
        total = 0
        for name, parameter in named_parameters(chunks, dims):
            assert parameter.is_meta, name
            entry = table[name]
            shard = place.split(entry.rule)[0] if entry.rule.axis is not None else 0
            stage, expert_rank = refit.stage(entry, dims), refit.expert_rank(entry, dims)
            assert rank in refit.holders(entry, stage, expert_rank, shard), (rank, name)
            shards = refit.shards(entry) * (parallel.expert if entry.rule.expert else 1)
            alike = sum(layout.coordinates(r).pipeline == stage for r in ranks)
            parameters += Fraction(parameter.numel() * shards, alike)
            held.add(name)
            total += parameter.numel()
        assert total == everyone[at.pipeline].total, (rank, total, everyone[at.pipeline])
        distributed.shutdown_groups()
        dist.destroy_process_group()
    first = {name for name, e in table.items() if refit.stage(e, dims) == 0}
    assert held >= first, sorted(first - held)[:3]
    assert parameters.denominator == 1
    return {
        "ranks": len(ranks),
        "slowest": slowest,
        "parameters": int(parameters),
        "counted": unique(layout, everyone),
    }


def transformer_settings(family: Any, config: dict[str, Any], dims: Any, parallel: Parallel) -> Any:
    return lambda: transformer_config(
        family.to_megatron_kwargs(config), dims, parallel, torch.bfloat16, recompute=False
    )


def sampled(layout: Layout) -> list[int]:
    """Every (tensor, expert, expert tensor) rank of the first stage, another one of each later stage."""
    p = layout.parallel
    first = max(p.tensor, p.expert * p.expert_tensor)
    per_stage = layout.world // p.pipeline
    return [*range(first), *(stage * per_stage + 7 * stage for stage in range(1, p.pipeline))]


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({name: check(*case) for name, case in CASES.items()}))
