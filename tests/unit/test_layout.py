"""The parallel layout as arithmetic: stages, places in groups, and what ranks hold; each parameter counted once."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pivotrl.config import Parallel
from pivotrl.errors import UserError
from pivotrl.layout import Layout, layer_places, stage_layers
from pivotrl.models.holdings import describe, holdings, unique
from pivotrl.models.mapping import plan
from pivotrl.models.registry import family_for
from tests.true_configs import QWEN3_30B_A3B

SMALL = {**QWEN3_30B_A3B, "num_hidden_layers": 12, "num_experts": 8, "vocab_size": 151, "mlp_only_layers": [2]}
SIZES = st.sampled_from([1, 2, 4])


@pytest.mark.parametrize(
    ("layers", "pipeline", "first", "last", "wanted"),
    [
        (8, 4, None, None, (2, 2, 2, 2)),
        (94, 8, 11, 11, (11, 12, 12, 12, 12, 12, 12, 11)),
        (7, 3, 1, None, (1, 3, 3)),
        (7, 2, None, 3, (4, 3)),
        (7, 2, 5, 2, (5, 2)),
        (5, 1, None, None, (5,)),
    ],
)
def test_stages(layers: int, pipeline: int, first: int | None, last: int | None, wanted: tuple[int, ...]) -> None:
    parallel = Parallel(pipeline=pipeline, first_stage_layers=first, last_stage_layers=last)
    assert stage_layers(parallel, layers) == wanted


@pytest.mark.parametrize(
    ("counts", "chunks", "wanted"),
    [
        ((2, 2), 1, "0:0 0:1 1:0 1:1"),
        ((4, 4), 2, "0:0 0:1 1:0 1:1 0:2 0:3 1:2 1:3"),
        ((2, 4, 2), 2, "0:0 1:0 1:1 2:0 0:1 1:2 1:3 2:1"),  # fewer at the ends
    ],
)
def test_layers_go_round_the_stages_once_a_chunk(counts: tuple[int, ...], chunks: int, wanted: str) -> None:
    places = layer_places(counts, chunks)
    assert " ".join(f"{at.stage}:{at.position}" for at in places) == wanted
    assert [at.chunk for at in places] == sorted(at.chunk for at in places)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (Parallel(virtual_pipeline=2), "virtual_pipeline=2 needs parallel.pipeline > 1"),
        (Parallel(pipeline=4, virtual_pipeline=3), "virtual_pipeline=3 does not divide the 2 layers"),
        (Parallel(pipeline=2, first_stage_layers=3, virtual_pipeline=3), "does not divide the 5 layers"),
    ],
)
def test_chunks_that_do_not_fit(parallel: Parallel, message: str) -> None:
    with pytest.raises(UserError, match=message):
        stage_layers(parallel, 8)


@pytest.mark.parametrize(
    ("layers", "pipeline", "first", "last"),
    [(7, 2, None, None), (7, 2, 3, 3), (7, 2, 7, None), (9, 4, 1, 1), (7, 1, 7, None), (4, 3, 3, 2)],
)
def test_stages_that_do_not_fit(layers: int, pipeline: int, first: int | None, last: int | None) -> None:
    with pytest.raises(UserError, match="parallel"):
        stage_layers(Parallel(pipeline=pipeline, first_stage_layers=first, last_stage_layers=last), layers)


@given(st.sampled_from([1, 2, 3]), SIZES, SIZES, SIZES, SIZES, st.booleans())
def test_parameters_sum_to_the_model(
    pipeline: int, tensor: int, context: int, expert: int, etp: int, tied: bool
) -> None:
    config = {**SMALL, "tie_word_embeddings": tied}
    family = family_for(config)
    dims = family.dims(config)
    table = plan(family.rules, dims)
    world = pipeline * math.lcm(tensor * context, expert * etp) * 2
    parallel = Parallel(tensor, pipeline, context, expert, etp, virtual_pipeline=2 if pipeline > 1 and tied else 1)
    layout = Layout.of(parallel, world)
    everyone = holdings(layout, table, dims)
    assert unique(layout, everyone) == sum(math.prod(s) for e in table.values() for s in e.shapes)
    places = [layout.coordinates(r) for r in range(world)]
    assert len({(p.tensor, p.context, p.data, p.pipeline) for p in places}) == world
    assert len({(p.expert_tensor, p.expert, p.expert_data, p.pipeline) for p in places}) == world


def test_a_rank_is_described() -> None:
    family = family_for(SMALL)
    dims = family.dims(SMALL)
    layout = Layout.of(Parallel(2, 3, expert=4, sequence=True), 24)
    table = plan(family.rules, dims)
    chunks = Layout.of(Parallel(1, 3, virtual_pipeline=2), 3)
    assert "0-1,6-7" in describe(chunks, table, dims, 2) and "pipeline 3 of 2 chunks" in describe(
        chunks, table, dims, 2
    )
    text = describe(layout, table, dims, 2, rank=21)
    assert "rank 21: tensor 1, context 0, data 2, pipeline 2, expert_tensor 0, expert 1, expert_data 1" in text
    assert "experts 2-3 of every layer" in text
    with pytest.raises(UserError, match="rank 24 is not one of 0 to 23"):
        layout.coordinates(24)


@pytest.mark.parametrize(
    ("parallel", "world", "message"),
    [
        (Parallel(tensor=2, context=2), 6, "tensor x pipeline x context = 4"),
        (Parallel(expert=4), 6, "expert_tensor x expert x pipeline = 4"),
    ],
)
def test_worlds_that_do_not_fit(parallel: Parallel, world: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Layout.of(parallel, world)
