"""Experts from the engine to the trainer's replay (R3), on a real tiny Qwen3-MoE whose first layer is dense.

GPU builds of vLLM give the experts back. CPU builds do not: there the real engine samples, the choices of its own
routers are recorded, and they are put where GPU builds put them, in their form: all layers, all but the last token.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pivotrl.config import Algorithm, Experts, Generation, Optimizer, Parallel, Precision
from pivotrl.errors import UserError
from pivotrl.generation.engine import Completion, Sampling
from pivotrl.generation.routed import RoutedLayers
from pivotrl.local_rollouts import LocalRoller, State
from pivotrl.policy.policy import MegatronPolicy
from pivotrl.training.batch import make_batch
from pivotrl.trajectories.schema import Action
from pivotrl.verifiers.base import Verdict
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.engine
LAYERS, EXPERTS, K = 3, 8, 2
SAMPLING = Sampling(temperature=0.7, max_new_tokens=6)
PROMPTS = [tuple(range(10, 30)), (*range(10, 22), 77, 78)]


def record(model: torch.nn.Module, seen: dict[int, list[torch.Tensor]]) -> None:
    """Have each router add its choices [tokens, k] to `seen[layer]`."""
    for module in model.modules():
        router = getattr(module, "router", None)
        if hasattr(router, "set_capture_fn"):
            layer = seen.setdefault(module.layer_id, [])
            router.set_capture_fn(lambda chosen, layer=layer: layer.append(chosen.detach().clone()))


def choices(engine: Any, prompt: tuple[int, ...], completion: tuple[int, ...]) -> np.ndarray:
    """Of all tokens but the last: uint8 [tokens - 1, all layers, k]."""
    seen: dict[int, list[torch.Tensor]] = {}
    engine._llm.reset_prefix_cache()
    engine._llm.apply_model(lambda model: record(model, seen))
    engine.score([prompt], [completion])
    rows = len(prompt) + len(completion) - 1
    out = np.zeros((rows, LAYERS, K), dtype=np.uint8)
    for layer, parts in seen.items():
        out[:, layer] = torch.cat(parts)[:rows].numpy()
    return out


class Returns:
    """The engine, as a GPU build behaves: outputs come with the experts of their tokens."""

    def __init__(self, engine: Any, folder: Path) -> None:
        self.engine, self.run = engine, engine._as_they_finish
        self.known: dict[tuple[int, ...], np.ndarray] = {}
        engine._routed = RoutedLayers.of_folder(folder)
        engine._as_they_finish = self._as_they_finish

    def _as_they_finish(self, requests: list[Any], params: list[Any]) -> Generator[tuple[int, Any]]:
        for number, output in list(self.run(requests, params)):
            sample = output.outputs[0]
            prompt = tuple(requests[number]["prompt_token_ids"])
            sample.routed_experts = choices(self.engine, prompt, tuple(sample.token_ids))
            yield number, output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("routed") / "moe"
    save_tiny("qwen3_moe", path, head_dim=32, moe_intermediate_size=64, vocab_size=320)
    return path


class Everything:
    name, version = "all", "1"

    def verify(self, turn: Any, action: Action) -> Verdict:
        return Verdict(1.0, "ok")


def test_what_the_engine_chose_is_what_the_trainer_computes(folder: Path) -> None:
    pytest.importorskip("vllm")
    from pivotrl.generation.vllm_engine import VllmEngine

    gpu = torch.cuda.is_available()
    settings = Generation(max_sequences=8, routed_experts=gpu, gpu_memory_utilization=0.2)
    engine = VllmEngine(folder, settings, "fp32", 64, 0, [])
    if not gpu:
        Returns(engine, folder)
    renderer: Any = SimpleNamespace(parse=lambda ids, tools: Action("x"))
    states = [State(SimpleNamespace(id=f"t{i}#0", tools=[]), p) for i, p in enumerate(PROMPTS)]  # type: ignore[arg-type]
    try:
        groups = LocalRoller(engine, renderer, Everything(), SAMPLING).groups(states, 3, [1, 2])  # type: ignore[arg-type]
    finally:
        engine.close()
    for group, prompt in zip(groups, PROMPTS, strict=True):
        for rollout in group:
            experts = rollout.completion.routed_experts
            assert experts is not None
            assert experts.shape == (len(prompt) + len(rollout.completion.token_ids) - 1, LAYERS - 1, K)
            assert experts.max() < EXPERTS and (experts[..., 0] != experts[..., 1]).all()
    batch = make_batch(states, groups, Algorithm(), replay=True)
    policy = MegatronPolicy.load(
        folder, Parallel(), Precision(policy="fp32"), Optimizer(), 64, 10, 0, experts=Experts(replay=True)
    )

    def mismatch(shift: int) -> float:
        """Against the engine's log-probs, when every choice is moved by `shift` experts."""
        rows = [s.sequence for s in batch.rollouts]
        moved = [type(r)(r.token_ids, r.targets, (np.asarray(r.experts, np.int64) + shift) % EXPERTS) for r in rows]
        got = policy.logprobs(moved, SAMPLING.temperature)
        return max((a - torch.tensor(s.logprobs)).abs().max().item() for a, s in zip(got, batch.rollouts, strict=True))

    assert len(batch.rollouts) == 6
    assert mismatch(0) < 1e-4
    assert mismatch(1) > 1e-2  # the trainer goes where it is told


def test_layers_are_counted_as_the_engine_counts(folder: Path, tmp_path: Path) -> None:
    layers = RoutedLayers.of_folder(folder)
    assert layers == RoutedLayers(3, (1, 2))
    given = np.arange(4 * 3 * 2).reshape(4, 3, 2)
    assert np.array_equal(layers.pick(given), given[:, 1:])
    with pytest.raises(UserError, match=r"shape \[4, 2, 2\]; \[tokens, 3 layers, k\] was expected"):
        layers.pick(given[:, 1:])
    with pytest.raises(UserError, match="enable-return-routed-experts"):
        layers.pick(None)
    save_tiny("llama", tmp_path / "dense")
    with pytest.raises(UserError, match="is a dense model"):
        RoutedLayers.of_folder(tmp_path / "dense")


def test_experts_that_are_missing_are_an_error() -> None:
    from pivotrl.training.replay import replayed

    completion = Completion((5,), (-0.5,), "stop", 0)
    assert replayed("t#0/1", completion, replay=False) is None
    with pytest.raises(UserError, match="gave no routed experts for t#0/1"):
        replayed("t#0/1", completion, replay=True)
