"""Refits of engines that do what real ones have done: backups, one-time layouts, new parameters (A1, A2, A3, A15).

The engine is a fake with vLLM's calls; the refit in front of it is the real one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from pivotrl.config import Generation
from pivotrl.generation.base import StatefulEngine
from pivotrl.generation.direct_load import DirectLoader
from pivotrl.generation.engine import EngineStateError, RefitError
from pivotrl.generation.vllm_refit import VllmRefit

Weights = dict[str, torch.Tensor]
PARTS = ("gate_proj.weight", "up_proj.weight")


def weights(seed: int) -> Weights:
    g = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(4, 6, generator=g) for name in PARTS}
    return made | {"norm.weight": torch.randn(6, generator=g)}


class FakeModel(nn.Module):
    """Serves gate and up fused. `swaps`: its kernel wants up first, and a load that finds them unswapped swaps them."""

    packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}  # noqa: RUF012

    def __init__(self, swaps: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(6, 8, bias=False)
        self.norm = nn.LayerNorm(6, bias=False)
        self.swaps, self.swapped = swaps, False

    def load(self, stream: Iterator[tuple[str, torch.Tensor]]) -> None:
        rows = dict(zip(PARTS, (slice(0, 4), slice(4, 8)), strict=True))
        for name, tensor in stream:
            if name in rows:
                self.gate_up_proj.weight.data[rows[name]] = tensor
            else:
                self.norm.weight.data.copy_(tensor)
        if self.swaps and not self.swapped:
            self.gate_up_proj.weight.data = self.gate_up_proj.weight.data.roll(4, 0)
            self.swapped = True

    def served(self) -> Weights:
        """As the kernel reads it."""
        fused = self.gate_up_proj.weight.data
        gate, up = (fused[4:], fused[:4]) if self.swapped else (fused[:4], fused[4:])
        return {"gate_proj.weight": gate, "up_proj.weight": up, "norm.weight": self.norm.weight.data}


class FakeLlm:
    """`reload`: what its reload_weights does with (model, stream)."""

    def __init__(self, model: FakeModel, reload: Callable[[FakeModel, Any], None]) -> None:
        self.model, self.reload = model, reload
        self.llm_engine = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32))

    def apply_model(self, work: Callable[[Any], Any]) -> list[Any]:
        return [None if work == DirectLoader.of else work(self.model)]

    def collective_rpc(self, call: str, kwargs: dict[str, Any]) -> None:
        assert call == "reload_weights"
        self.reload(self.model, kwargs["weights_iterator"])


class FakeSetup:
    def __init__(self) -> None:
        self.broken = 0

    def quiet(self) -> Any:
        return nullcontext()

    def repack_heads(self, model: Any) -> None:
        pass

    def finish_broken_reload(self, model: Any, config: Any) -> None:
        self.broken += 1


def refit_of(folder: Path, llm: FakeLlm, verify: str = "always") -> tuple[VllmRefit, FakeSetup]:
    save_file(weights(0), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
    setup = FakeSetup()
    return VllmRefit(llm, setup, folder, Generation(verify_refit=verify), 0), setup  # type: ignore[arg-type]


def proper(model: FakeModel, stream: Any) -> None:
    """What vLLM's reload does: load in the checkpoint's layout, then transform again."""
    model.swapped = False
    model.load(stream)


def test_a_layout_made_once_is_made_anew_by_each_refit(tmp_path: Path) -> None:
    """A2: a fresh load and every later one serve the same; a raw second load would not."""
    model = FakeModel(swaps=True)
    model.load(iter(weights(0).items()))
    refit, _ = refit_of(tmp_path, FakeLlm(model, proper), verify="off")  # the swap is not to be seen in sums by row
    for version in (1, 2, 1):
        refit.run(iter(weights(version).items()), version)
        assert model.swapped and all(torch.equal(t, weights(version)[n]) for n, t in model.served().items())
    model.load(iter(weights(2).items()))
    assert not torch.equal(model.served()[PARTS[0]], weights(2)[PARTS[0]])


def test_parameters_made_anew_are_loaded_by_the_reload_alone(tmp_path: Path) -> None:
    """A3: parameters that the first load replaced have lost their loaders."""

    def recreate(model: FakeModel, stream: Any) -> None:
        model.gate_up_proj.weight = nn.Parameter(torch.zeros(8, 6), requires_grad=False)
        model.load(stream)

    model = FakeModel()
    refit, _ = refit_of(tmp_path, FakeLlm(model, recreate))
    kept = model.gate_up_proj.weight
    for version in (1, 2):
        refit.run(iter(weights(version).items()), version)
        assert model.gate_up_proj.weight is not kept
        assert all(torch.equal(t, weights(version)[n]) for n, t in model.served().items())


@pytest.mark.parametrize("fault", ["lost loader", "another rank"])
def test_a_reload_that_fails_is_one_error_naming_the_weight(tmp_path: Path, fault: str) -> None:
    """A3, A15: also on all ranks, since it is a RefitError."""

    def fail(model: FakeModel, stream: Any) -> None:
        for name, tensor in stream:
            if name == PARTS[1]:
                if fault == "lost loader":
                    raise AttributeError("'Parameter' object has no attribute 'weight_loader'")
                torch.zeros(2, 2, 2, 2).copy_(tensor)

    refit, setup = refit_of(tmp_path, FakeLlm(FakeModel(), fail))
    stream = iter(weights(1).items())
    with pytest.raises(RefitError, match=r"could not load 'up_proj.weight': \w+Error: .*(weight_loader|size|shape)"):
        refit.run(stream, 1)
    assert next(stream, None) is None  # consumed to its end: it is a collective
    assert setup.broken == 1


class BackupEngine(StatefulEngine):
    """vLLM's level-1 sleep: weights go to a copy in RAM, which comes back when the engine wakes."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: Weights | None = weights(0)
        self.backup: Weights | None = None

    def _sleep(self, discard_weights: bool) -> None:
        self.backup, self.weights = (None if discard_weights else self.weights), None

    def _wake_weights(self) -> None:
        self.weights = self.backup or {name: torch.full_like(t, torch.nan) for name, t in weights(0).items()}
        self.backup = None

    def _wake(self) -> None:
        if self.weights is None:
            self._wake_weights()

    def _load(self, sent: Any, version: int) -> None:
        assert self.weights is not None, "loaded into memory that is not there"
        self.weights = dict(sent)

    def _close(self) -> None:
        pass


@pytest.mark.parametrize("discard", [True, False])
@pytest.mark.parametrize("explicit", [True, False])
def test_a_backup_never_comes_back_over_new_weights(discard: bool, explicit: bool) -> None:
    """A1: sleep, refit, wake serves the refit's weights in every order that is allowed."""
    engine = BackupEngine()
    engine.sleep(discard_weights=discard)
    if explicit:
        engine.wake_weights()
    engine.refit(weights(1).items(), 1)
    engine.wake()
    assert engine.weights is not None and all(torch.equal(t, weights(1)[n]) for n, t in engine.weights.items())
    with pytest.raises(EngineStateError):
        engine.wake()  # a second wake would restore it


def test_a_wake_without_a_refit_keeps_kept_weights_and_refuses_discarded_ones() -> None:
    engine = BackupEngine()
    engine.sleep(discard_weights=False)
    engine.wake()
    assert engine.weights is not None and all(torch.equal(t, weights(0)[n]) for n, t in engine.weights.items())
    engine.sleep()
    engine.wake_weights()
    with pytest.raises(EngineStateError, match="discarded"):
        engine.wake()
