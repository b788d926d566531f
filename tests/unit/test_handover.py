"""The order in which trainer and engine hand memory over, against a fake accelerator of 100 units (field report K1)."""

from __future__ import annotations

import itertools

import pytest

from pivotrl.generation.base import StatefulEngine
from pivotrl.training.handover import CYCLE, Handover, LedgerError, MemoryLedger

OPTIMIZER, GRADIENTS, PARAMETERS, WEIGHTS, CACHE = 35, 15, 10, 30, 50
BUDGET = 100


class Device:
    """Counts what is on it, and remembers the most; `reset`/`peak` make it the ledger's meter."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self.most = 0
        self.log: list[str] = []

    def put(self, what: str, size: int) -> None:
        assert what not in self.held, f"{what} twice"
        self.held[what] = size
        self.most = max(self.most, sum(self.held.values()))
        self.log.append(f"+{what}")

    def drop(self, what: str) -> None:
        del self.held[what]
        self.log.append(f"-{what}")

    def reset(self) -> None:
        self.most = sum(self.held.values())

    def peak(self) -> int:
        return self.most


SIZES = {"parameters": PARAMETERS, "gradients": GRADIENTS, "optimizer": OPTIMIZER}


class FakeMemory:
    def __init__(self, device: Device) -> None:
        self.device = device
        for name, size in SIZES.items():
            device.put(name, size)

    def release(self, *kinds: str, keep_gradients: bool) -> None:
        for kind in kinds:
            self.device.drop(kind)

    def restore(self, *kinds: str) -> None:
        for kind in kinds:
            self.device.put(kind, SIZES[kind])


class FakeTrainer:
    def __init__(self, device: Device) -> None:
        self.memory, self.device = FakeMemory(device), device

    def weights_for(self, layout: object) -> list[tuple[str, float]]:
        assert "parameters" in self.device.held, "the refit reads parameters that have left"
        return [("w", 1.0)]


class FakeEngine(StatefulEngine):
    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device
        device.put("weights", WEIGHTS)
        device.put("cache", CACHE)

    def generate(self) -> str:
        self._state.require_generate()
        assert {"weights", "cache"} <= self.device.held.keys()
        return "rollouts"

    def _sleep(self, discard_weights: bool) -> None:
        self.device.drop("weights")
        self.device.drop("cache")

    def _wake_weights(self) -> None:
        self.device.put("weights", WEIGHTS)

    def _wake(self) -> None:
        self.device.put("cache", CACHE)

    def _load(self, weights: object, version: int) -> None:
        assert "weights" in self.device.held

    def _close(self) -> None:
        pass


def test_three_steps_stay_within_the_budget_and_log_their_peaks() -> None:
    device = Device()
    handover = Handover(FakeTrainer(device), MemoryLedger(device, BUDGET), moves=True)
    engine = FakeEngine(device)
    for step in range(3):
        assert handover.generate(engine, engine.generate) == "rollouts"
        with handover.training():
            assert set(device.held) == {"parameters", "gradients", "optimizer"}
        handover.to_engine(engine, step + 1)
        assert engine.weight_version == step + 1 == handover.refits
    peaks = handover.ledger.peaks
    assert peaks["generate"] == WEIGHTS + CACHE
    assert peaks["train"] == OPTIMIZER + GRADIENTS + PARAMETERS
    assert peaks["refit"] == PARAMETERS + WEIGHTS
    assert peaks["wake_cache"] == WEIGHTS + CACHE
    assert set(peaks) == {"start", *CYCLE}
    assert handover.ledger.metrics()["memory_gib_refit"] == peaks["refit"] / 2**30


def test_the_whole_cycle_has_the_documented_order() -> None:
    device = Device()
    handover = Handover(FakeTrainer(device), MemoryLedger(device), moves=True)
    engine = FakeEngine(device)
    device.log.clear()
    handover.generate(engine, engine.generate)
    with handover.training():
        pass
    handover.to_engine(engine, 1)
    gone, come = ["-weights", "-cache"], ["+parameters", "+gradients", "+optimizer"]
    assert device.log == [*gone, *come, "-gradients", "-optimizer", "+weights", "-parameters", "+cache"]


@pytest.mark.parametrize("first", ["wake_cache", "refit", "sleep", "train"])
def test_a_phase_out_of_turn_is_refused_before_it_does_anything(first: str) -> None:
    device = Device()
    ledger = MemoryLedger(device)
    with ledger.phase("start"):
        pass
    with (
        pytest.raises(LedgerError, match=f"'{first}' after 'start'; the next phase is 'generate'"),
        ledger.phase(first),
    ):
        device.put("x", 1)
    assert not device.held


def test_every_other_order_of_the_hand_over_is_refused() -> None:
    phases = ("offload", "wake_weights", "refit", "free_staging", "wake_cache")
    for order in itertools.permutations(phases):
        ledger = MemoryLedger(Device())
        for name in ("start", *CYCLE[: CYCLE.index("offload")]):
            with ledger.phase(name):
                pass
        done = []
        try:
            for name in order:
                with ledger.phase(name):
                    done.append(name)
        except LedgerError:
            assert order != phases and tuple(done) == phases[: len(done)]
        else:
            assert order == phases


def test_the_wrong_order_is_over_the_budget() -> None:
    """The KV cache before the trainer left: what the order is for."""
    device = Device()
    ledger = MemoryLedger(device, BUDGET)
    FakeMemory(device)
    with pytest.raises(LedgerError, match=r"'start' reached .* the budget is"), ledger.phase("start"):
        FakeEngine(device)


def test_a_phase_that_fails_is_not_done() -> None:
    ledger = MemoryLedger(Device())
    with pytest.raises(ValueError), ledger.phase("start"):
        raise ValueError
    assert ledger.last is None and not ledger.peaks
