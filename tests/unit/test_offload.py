"""Storages that are given back and taken again: to the bit, views included, without a leak."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

from pivotrl.policy.offload import Stash, TrainerMemory, distinct_storages


def test_views_find_their_values_again() -> None:
    buffer = torch.randn(100)
    views = [buffer[:40].view(4, 10), buffer[40:]]
    want = [v.clone() for v in views]
    stash = Stash()
    assert stash.release(views) == 400 and stash.released
    assert buffer.untyped_storage().nbytes() == 0
    assert stash.restore() == 400 and not stash.released
    assert all(torch.equal(v, w) for v, w in zip(views, want, strict=True))
    assert views[0].data_ptr() == buffer.data_ptr()  # still views of one storage


def test_special_values_and_dtypes_come_back_to_the_bit() -> None:
    tensors = [
        torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
        torch.randn(7).to(torch.bfloat16),
        torch.arange(5),
    ]
    want = [t.clone().view(torch.uint8) for t in tensors]
    stash = Stash()
    stash.release(tensors)
    stash.restore()
    assert all(torch.equal(t.view(torch.uint8), w) for t, w in zip(tensors, want, strict=True))


def test_discarded_values_come_back_as_zeros_and_twice_is_refused() -> None:
    tensor, stash = torch.ones(8), Stash()
    stash.release([tensor], discard=True)
    with pytest.raises(RuntimeError, match="restore"):
        stash.release([tensor])
    stash.restore()
    assert torch.equal(tensor, torch.zeros(8))


def test_each_storage_once() -> None:
    buffer = torch.zeros(10)
    assert len(list(distinct_storages([buffer, buffer[2:], torch.zeros(3), torch.zeros(0)]))) == 2


def test_host_buffers_are_used_again() -> None:
    tensors, stash = [torch.randn(64) for _ in range(3)], Stash()
    for _ in range(50):
        for tensor in tensors:
            tensor.add_(1)
        want = [t.clone() for t in tensors]
        stash.release(tensors)
        stash.restore()
        assert all(torch.equal(t, w) for t, w in zip(tensors, want, strict=True))
    assert len(stash._buffers) == 3
    gc.collect()


def test_kinds_of_a_small_trainer() -> None:
    model = torch.nn.Linear(4, 3)
    model(torch.ones(2, 4)).sum().backward()
    states = {p: {n: torch.randn_like(p) for n in ("exp_avg", "exp_avg_sq")} for p in model.parameters()}
    optimizer = SimpleNamespace(state=states, param_groups=[{"params": list(model.parameters())}])
    memory = TrainerMemory(model, SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=optimizer)]))
    before = [t.clone() for t in (*model.parameters(), *(p.grad for p in model.parameters()))]
    moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
    assert memory.release("gradients", "optimizer") == 60 + 2 * 60
    assert memory.released == ["gradients", "optimizer"]
    assert memory.release("parameters", "optimizer") == 60  # what is gone already is left alone
    assert memory.restore("parameters", "gradients", "optimizer") == 240
    after = [*model.parameters(), *(p.grad for p in model.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert all(torch.equal(s["exp_avg"], m) for s, m in zip(optimizer.state.values(), moments, strict=True))
