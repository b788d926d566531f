"""Kinds of faults of refits (field reports A2, A9, A14, A15): what the checks after a load see; sizes of buckets."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pivotrl.generation.direct_load import Workspace, _misfit, _write_plain, joined
from pivotrl.generation.engine import RefitError
from pivotrl.generation.refit_verify import RefitVerifier
from pivotrl.generation.served import Served, served_parameters
from pivotrl.models.dims import Dims
from pivotrl.models.mapping import Entry, Rule
from pivotrl.refit.layout import EngineLayout, TrainerLayout
from pivotrl.refit.plan import RefitPlan


class FakeServed(nn.Module):
    """A served model in vLLM's shape: one fused matrix, one norm."""

    packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}  # noqa: RUF012

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(6, 8, bias=False)
        self.norm = nn.LayerNorm(6, bias=False)
        self.load(weights)

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        self.gate_up_proj.weight.data = torch.cat([weights["gate_proj.weight"], weights["up_proj.weight"]])
        self.norm.weight.data = weights["norm.weight"].clone()


def weights(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {"gate_proj.weight": torch.randn(4, 6), "up_proj.weight": torch.randn(4, 6), "norm.weight": torch.randn(6)}


def different(model: FakeServed, sent: dict[str, torch.Tensor], version: int = 0) -> list[str]:
    verifier = RefitVerifier(sent, torch.float32, version)
    for name, tensor in sent.items():
        verifier.sent(name, tensor)
    report = verifier.compare(model)
    assert not report.unverified
    return report.different


def test_a_right_refit_is_seen_to_be_right_twice() -> None:
    model = FakeServed(weights(0))
    for seed in (1, 2):
        model.load(weights(seed))
        assert different(model, weights(seed), seed) == []


def test_a_layout_swapped_by_a_second_load_is_seen() -> None:
    """A2: a kernel that wants up before gate; the sums are the same, the places are not."""
    model = FakeServed(weights(1))
    model.gate_up_proj.weight.data = model.gate_up_proj.weight.data.roll(4, 0)
    assert different(model, weights(1)) == ["gate_up_proj.weight"]


@pytest.mark.parametrize("stale", ["gate_proj.weight", "up_proj.weight", "norm.weight"])
def test_one_stale_part_is_seen(stale: str) -> None:
    served = {**weights(1), stale: weights(0)[stale]}
    assert len(different(FakeServed(served), weights(1))) == 1


def test_one_flipped_bit_is_seen() -> None:
    model = FakeServed(weights(1))
    model.norm.weight.data.view(torch.int32)[3] ^= 1
    assert different(model, weights(1)) == ["norm.weight"]


def test_a_weight_that_was_not_sent_is_not_called_verified() -> None:
    model = FakeServed(weights(1))
    verifier = RefitVerifier(weights(1), torch.float32, 0)
    verifier.sent("norm.weight", weights(1)["norm.weight"])
    assert verifier.compare(model).unverified == ["gate_up_proj.weight"]


def test_a_served_parameter_of_another_rank_names_both_shapes() -> None:
    """A15: a kernel that made the parameter four-dimensional."""
    served = Served("w13", nn.Identity(), "weight", torch.zeros(2, 2, 2, 2), ["gate", "up"])
    with pytest.raises(RefitError, match=r"gate, up of shapes \[\(4, 2\), \(4, 2\)\] do not fit w13 \(2, 2, 2, 2\)"):
        _write_plain(served, [torch.zeros(4, 2), torch.zeros(4, 2)], Workspace())
    assert "fit w13" in str(_misfit(served, [torch.zeros(1)], (3,)))


def test_joined_rows_are_viewed_where_they_lie_together_and_copied_elsewhere() -> None:
    whole = torch.arange(24.0).view(6, 4)
    space = Workspace()
    together = joined([whole[:2], whole[2:]], torch.float32, space)
    assert torch.equal(together, whole) and together.data_ptr() == whole.data_ptr()
    for parts in ([whole[2:], whole[:2]], [whole[:2], whole[3:]], [whole[:2].clone(), whole[2:]]):
        got = joined(parts, torch.float32, space)
        assert torch.equal(got, torch.cat(parts)) and got.untyped_storage().data_ptr() != whole.data_ptr()
    assert torch.equal(joined([whole[:, :2]], torch.float32, space), whole[:, :2])
    assert torch.equal(joined([whole], torch.bfloat16, space), whole.to(torch.bfloat16))


def test_fused_names_come_in_the_order_of_their_rows() -> None:
    found = {s.name: s.sources for s in served_parameters(FakeServed(weights(0)))}
    assert found == {"gate_up_proj.weight": ["gate_proj.weight", "up_proj.weight"], "norm.weight": ["norm.weight"]}


HF_NORM = "model.layers.{layer}.input_layernorm.weight"
NORM = Rule("decoder.layers.{layer}.input_layernorm.weight", (HF_NORM,), (("q",),))


def vectors(sizes: list[int]) -> tuple[dict[str, Entry], Dims]:
    """A table of vectors of these sizes, one a layer."""
    table = {
        NORM.megatron.format(layer=i): Entry(NORM, (HF_NORM.format(layer=i),), ((n,),), i, None)
        for i, n in enumerate(sizes)
    }
    return table, Dims(len(sizes), 1, 1, 1, 1, 1, 1)


@pytest.mark.parametrize(
    ("sizes", "most", "name"),
    [([1024] * 1000, 4, "1000 of 4 KiB"), ([1024, 768 * 1024, 1024], 3, "3 MiB alone"), ([], 0, "none")],
)
def test_small_tensors_share_a_bucket_and_a_large_one_goes_alone(sizes: list[int], most: int, name: str) -> None:
    """A14: buckets of 1 MiB of float32, from rank 0 to rank 1."""
    table, dims = vectors(sizes)
    plan = RefitPlan(table, dims, TrainerLayout(1), EngineLayout(first_rank=1), bucket_elements=2**18)
    assert len(plan.rounds) == most, name
    assert [n for r in plan.rounds for n in r] == list(table)
    assert plan.traffic.sent.tolist() == [sum(sizes), 0]
