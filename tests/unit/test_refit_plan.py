"""The refit plan: right on small tensors in every layout (all ranks simulated), and quick at real sizes (A6, A7)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pivotrl.errors import UserError
from pivotrl.models.dims import Dims
from pivotrl.models.families import llama, qwen3, qwen3_moe
from pivotrl.models.mapping import Entry, pack, plan, split
from pivotrl.refit.execute import RankRefit, Shard
from pivotrl.refit.layout import EngineLayout, TrainerLayout
from pivotrl.refit.plan import RefitPlan
from pivotrl.refit.transport import NoTransport

DENSE = Dims(layers=4, hidden=8, vocab=121, heads=8, kv_heads=4, head_dim=2, ffn=16)
MOE = Dims(4, 8, 121, 8, 4, 2, 16, moe_ffn=8, experts=16, kinds=("dense", "moe", "moe", "moe"))
BIASED = Dims(**{**DENSE.__dict__, "extra": (("qkv_bias", 1), ("o_bias", 1))})
TABLES = {
    "tied": (plan(llama.RULES, Dims(**{**DENSE.__dict__, "tied": True})), Dims(**{**DENSE.__dict__, "tied": True})),
    "untied": (plan(qwen3.RULES, DENSE), DENSE),
    "moe": (plan(qwen3_moe.RULES, MOE), MOE),
    "biased": (plan(llama.RULES, BIASED), BIASED),
}


def full_tensors(table: Mapping[str, Entry]) -> dict[str, Tensor]:
    """Every element of the model has a value of its own."""
    out, count = {}, 0
    for entry in table.values():
        for name, shape in zip(entry.hf, entry.shapes, strict=True):
            size = int(np.prod(shape))
            out[name] = torch.arange(count, count + size, dtype=torch.float64).view(shape)
            count += size
    return out


def trainer_shards(
    table: Mapping[str, Entry], dims: Dims, layout: TrainerLayout, hf: Mapping[str, Tensor]
) -> list[dict[str, Tensor]]:
    """What each rank holds, by the mapping that loads checkpoints and by megatron-core's order of ranks."""
    ranks: list[dict[str, Tensor]] = [{} for _ in range(layout.world)]
    per_stage = layout.world // layout.pipeline
    chunks = layout.pipeline * layout.virtual_pipeline
    counts = layout.stage_layers or [dims.layers // chunks] * chunks
    stages = [n % layout.pipeline for n, count in enumerate(counts) for _ in range(count)]
    for name, entry in table.items():
        full = pack(entry, [hf[n] for n in entry.hf], dims)
        if entry.layer is not None:
            stage = stages[entry.layer]
        else:
            stage = 0 if name.startswith("embedding") else layout.pipeline - 1
        for local in range(per_stage):
            if entry.expert is None:
                shard, size = local % layout.tensor, layout.tensor
            else:
                shard, size = local % layout.expert_tensor, layout.expert_tensor
                if entry.expert // (dims.experts // layout.expert) != local // layout.expert_tensor % layout.expert:
                    continue
            ranks[stage * per_stage + local][name] = split(entry, full, shard, size)
    return ranks


def served(name: str, full: Tensor, dims: Dims, t: int, size: int, expert: int) -> Tensor | None:
    """What vLLM's tensor rank `t` serves of a Hugging Face tensor, written down independently."""
    if ".experts." in name and expert > 1:
        number = int(name.split(".experts.")[1].split(".")[0])
        return full if number // (dims.experts // expert) == t else None
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        rows = 128 // size
        return full[t * rows : (t + 1) * rows]
    if name.endswith(("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias")) and size > dims.kv_heads:
        return full.chunk(dims.kv_heads, 0)[t * dims.kv_heads // size]
    columns = [f"{x}_proj.weight" for x in ("q", "k", "v", "gate", "up")]
    if name.endswith((*columns, "q_proj.bias", "k_proj.bias", "v_proj.bias")):
        return full.chunk(size, 0)[t]
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return full.chunk(size, 1)[t]
    return full


def simulate(refit: RefitPlan, shards: list[dict[str, Tensor]]) -> list[dict[str, Tensor | Shard]]:
    """All ranks in one process, in lockstep: pack everywhere, deliver, paste everywhere."""
    ranks = [RankRefit(refit, rank) for rank in range(refit.world)]
    steps = [refit.steps(rank) for rank in range(refit.world)]
    arrived: list[dict[str, Tensor | Shard]] = [{} for _ in ranks]
    sources = shards + [{} for _ in range(refit.world - len(shards))]
    for number in range(len(refit.rounds)):
        posted = [rank.pack(s[number], source) for rank, s, source in zip(ranks, steps, sources, strict=True)]
        for me, rank in enumerate(ranks):
            expected = rank.expect(steps[me][number])
            got = {sender: posted[sender][me] for sender in expected}
            assert {sender: len(tensor) for sender, tensor in got.items()} == expected
            assert sum(me in post for post in posted) == len(got)  # nothing is sent that nobody takes
            for name, tensor in rank.paste(steps[me][number], sources[me], got):
                assert name not in arrived[me]
                arrived[me][name] = tensor
    return arrived


def check(kind: str, trainer: TrainerLayout, engine: EngineLayout, **options: int) -> RefitPlan:
    table, dims = TABLES[kind]
    hf = full_tensors(table)
    refit = RefitPlan(table, dims, trainer, engine, **options)
    got = simulate(refit, trainer_shards(table, dims, trainer, hf))
    received = np.zeros(refit.world, np.int64)
    for rank, tensors in enumerate(got):
        if rank not in engine.ranks:
            assert not tensors
            continue
        for name, full in hf.items():
            want = served(name, full, dims, engine.tensor_rank(rank), engine.tensor, engine.expert)
            if want is None:
                assert name not in tensors
                continue
            found = tensors[name]
            if isinstance(found, Shard):
                assert found.full_shape == tuple(full.shape)
                view = full[tuple(slice(a, b) for a, b in found.box)]
                assert torch.equal(view, want)
                found = found.tensor
            assert torch.equal(found, want), name
            received[rank] += want.numel()
        assert set(tensors) <= set(hf)
    traffic = refit.traffic
    assert (traffic.needed == received).all() and traffic.sent.sum() == traffic.received.sum()
    assert traffic.ratio == 1.0  # nothing arrives twice or in vain
    return refit


@settings(max_examples=40)
@given(st.data())
def test_every_engine_rank_gets_exactly_its_shard(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["tied", "untied", "moe", "biased"]))
    moe = kind == "moe"
    size = st.sampled_from([1, 2, 4])
    tensor, pipeline, virtual = data.draw(size), data.draw(st.sampled_from([1, 2])), data.draw(st.sampled_from([1, 2]))
    expert, expert_tensor = (data.draw(size), data.draw(st.sampled_from([1, 2]))) if moe else (1, 1)
    world = pipeline * max(tensor, expert * expert_tensor) * data.draw(st.sampled_from([1, 2]))
    trainer = TrainerLayout(world, tensor, pipeline, expert, expert_tensor, virtual)
    engine_tensor = data.draw(st.sampled_from([1, 2, 4, 8]))
    engine = EngineLayout(
        engines=data.draw(st.integers(1, 2)),
        tensor=engine_tensor,
        expert=engine_tensor if moe and data.draw(st.booleans()) else 1,
        first_rank=data.draw(st.sampled_from([0, world])),
    )
    check(kind, trainer, engine, bucket_elements=data.draw(st.sampled_from([1, 500, 10**6])), ranks_per_node=2)


@pytest.mark.parametrize(
    ("trainer", "engine"),
    [
        (TrainerLayout(64, 2, 2, 8), EngineLayout(16, 4)),
        (TrainerLayout(64, 2, 2, 8, stage_layers=(1, 3)), EngineLayout(16, 4, expert=4)),
        (TrainerLayout(512, 4, 4, 16), EngineLayout(64, 8)),
    ],
)
def test_large_layouts_on_small_tensors(trainer: TrainerLayout, engine: EngineLayout) -> None:
    check("moe", trainer, engine)


QWEN3_30B = Dims(48, 2048, 151936, 32, 4, 128, 6144, moe_ffn=768, experts=128, kinds=("moe",) * 48)
QWEN3_235B = Dims(94, 4096, 151936, 64, 4, 128, 12288, moe_ffn=1536, experts=128, kinds=("moe",) * 94)


@pytest.mark.parametrize(
    ("dims", "trainer", "engine"),
    [
        (QWEN3_30B, TrainerLayout(64, 2, 2, 8), EngineLayout(16, 4)),
        (QWEN3_235B, TrainerLayout(512, 4, 4, 16, stage_layers=(23, 24, 24, 23)), EngineLayout(64, 8)),
    ],
)
def test_plan_at_real_sizes(dims: Dims, trainer: TrainerLayout, engine: EngineLayout) -> None:
    table = plan(qwen3_moe.RULES, dims)
    refit = RefitPlan(table, dims, trainer, engine)
    assert RankRefit(refit, trainer.world - 1)._rounds
    traffic = refit.traffic
    assert traffic.ratio < 1.05
    # no rank sends more than 5% over what the world sends on average
    assert traffic.sent.max() <= 1.05 * traffic.sent.mean()


def test_layouts_that_cannot_be_are_refused() -> None:
    with pytest.raises(UserError, match="4 does not divide 6"):
        TrainerLayout(6, 2, 2)
    with pytest.raises(UserError, match=r"expert=2 must be 1 or tensor=4"):
        EngineLayout(1, 4, expert=2)
    table, dims = TABLES["untied"]
    with pytest.raises(UserError, match="tensor_parallel=3 does not divide the vocabulary, padded to 128"):
        RefitPlan(table, dims, TrainerLayout(1), EngineLayout(1, 3))
    for stage_layers, message in ((None, "4 layers do not divide into 3"), ((1, 1, 1), "do not add up to 4")):
        with pytest.raises(UserError, match=message):
            RefitPlan(table, dims, TrainerLayout(3, pipeline=3, stage_layers=stage_layers), EngineLayout(1, 1))
    with pytest.raises(UserError, match="not those of 3 stages"):
        TrainerLayout(3, pipeline=3, stage_layers=(2, 2))


def test_a_missing_piece_is_an_error_and_never_shipped() -> None:
    table, dims = TABLES["untied"]
    refit = RefitPlan(table, dims, TrainerLayout(1), EngineLayout(1, 1))
    rank = RankRefit(refit, 0)
    step = next(s for s in rank._rounds[0] if "linear_qkv" in s.name)
    step.into[0] = (0, step.into[0][1][:-1])
    source = trainer_shards(table, dims, TrainerLayout(1), full_tensors(table))[0]
    with pytest.raises(RuntimeError, match=r"elements of model.layers.0.self_attn.v_proj.weight arrived"):
        list(rank.stream(source, NoTransport()))


def test_buckets_bound_what_a_rank_holds(limit: int = 400) -> None:
    table, dims = TABLES["moe"]
    trainer, engine = TrainerLayout(8, 2, 2, 2), EngineLayout(4, 2)
    whole, small = RefitPlan(table, dims, trainer, engine), RefitPlan(table, dims, trainer, engine, limit)
    assert len(whole.rounds) == 1 < len(small.rounds)
    assert sorted(n for r in small.rounds for n in r) == sorted(table)
    largest = max(max(m.sent.max(), m.received.max()) for m in small._classes.values())
    for names in small.rounds:
        received = sum(small._class_of[n].received for n in names)
        assert received.max() <= max(limit, largest)


def test_stages_and_expert_ranks_take_turns() -> None:
    """Else one stage would send while the others wait."""
    table, dims = TABLES["moe"]
    order = [n for r in RefitPlan(table, dims, TrainerLayout(8, 1, 2, 4), EngineLayout(8, 1)).rounds for n in r]
    layers = [table[n].layer for n in order if table[n].layer is not None]
    assert layers.index(2) < layers.index(1)
    experts = [table[n].expert for n in order if table[n].expert is not None and table[n].layer == 3]
    assert experts[:8:2] == [0, 4, 8, 12]


@pytest.mark.parametrize(("stages", "virtual"), list(product([1, 2], [1, 2])))
def test_pipeline_stage_of_a_layer(stages: int, virtual: int) -> None:
    table, dims = TABLES["untied"]
    layout = TrainerLayout(stages, pipeline=stages, virtual_pipeline=virtual)
    found = [layout.stage(e, dims) for n, e in table.items() if n.endswith("linear_qkv.weight")]
    assert found == {(1, 1): [0] * 4, (1, 2): [0] * 4, (2, 1): [0, 0, 1, 1], (2, 2): [0, 1, 0, 1]}[(stages, virtual)]
