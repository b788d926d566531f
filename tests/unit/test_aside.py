"""Training beside a server engine: what is sampled when, from which weights, and what a run that continues finds."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pivotrl.config import Algorithm, Config, Experts, Generation, Reprofile
from pivotrl.generation.base import StatefulEngine
from pivotrl.generation.engine import Completion, EngineStateError
from pivotrl.local_rollouts import State
from pivotrl.refit.layout import EngineLayout
from pivotrl.rollouts import Rollout
from pivotrl.training.aside import ServerHandover, recorded_rollouts
from pivotrl.training.handover import Handover, check_weight_version
from pivotrl.trajectories.schema import Action
from pivotrl.validation import conflicts
from pivotrl.verifiers.base import Verdict

STEPS = 4


class Server(StatefulEngine):
    """Samples what its weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.serves = "whatever was there"

    def sample(self, step: int) -> tuple[int, str, int]:
        self._state.require_generate()
        return step, self.serves, self.weight_version

    def _sleep(self, discard_weights: bool) -> None: ...

    def _wake(self) -> None: ...

    def _load(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        self.serves = dict(weights)["w"]

    def _close(self) -> None: ...


class Trainer:
    memory = None

    def __init__(self) -> None:
        self.weights = "w0"

    def weights_for(self, layout: EngineLayout) -> Iterator[tuple[str, str]]:
        yield "w", self.weights


class Run:
    """The loop of `pivotrl train` without what is trained. Each update waits until the next rollouts are there."""

    def __init__(self, ahead: bool) -> None:
        self.engine, self.trainer = Server(), Trainer()
        self.handover = ServerHandover(self.trainer, STEPS, ahead)
        self.sampled: dict[int, tuple[int, str, int]] = {}
        self.arrived = {step: threading.Event() for step in range(STEPS)}

    def sample(self, step: int) -> tuple[int, str, int]:
        self.sampled[step] = self.engine.sample(step)
        self.arrived[step].set()
        return self.sampled[step]

    def step(self, step: int) -> tuple[int, str, int]:
        found = self.handover.rollouts(self.engine, self.sample, step)
        with self.handover.training():
            if self.handover.lags and step + 1 < STEPS:
                assert self.arrived[step + 1].wait(120), "the next rollouts are not sampled beside the update"
            self.trainer.weights = f"w{step + 1}"
        self.told = self.handover.settle()
        self.handover.to_engine(self.engine, step + 1)
        return found


def test_rollouts_come_from_the_weights_before_the_update() -> None:
    run = Run(ahead=True)
    run.handover.begin(run.engine, 0, lambda: None)
    assert run.engine.serves == "w0"
    found = [run.step(0)]
    assert run.told["seconds_beside"] > 0
    found += [run.step(s) for s in range(1, STEPS)]
    assert found == [(0, "w0", 0), (1, "w0", 0), (2, "w1", 1), (3, "w2", 2)]
    assert set(run.told) == {"seconds_generate"}
    assert sorted(run.sampled) == [0, 1, 2, 3]  # nothing for a step that never comes


def test_without_it_they_come_from_the_trainers_own() -> None:
    run = Run(ahead=False)
    run.handover.begin(run.engine, 0, lambda: None)
    assert [run.step(s) for s in range(STEPS)] == [(s, f"w{s}", s) for s in range(STEPS)]
    assert not run.handover.lags and not Handover(run.trainer, moves=False).lags


def test_a_run_that_continues_takes_what_was_sampled() -> None:
    run = Run(ahead=True)
    run.trainer.weights = "w2"
    run.handover.begin(run.engine, 2, lambda: (2, "w1", 1))
    assert [run.step(s) for s in (2, 3)] == [(2, "w1", 1), (3, "w2", 2)]
    run = Run(ahead=True)
    run.trainer.weights = "w3"
    run.handover.begin(run.engine, 3, lambda: None)  # it was to end there
    assert run.step(3) == (3, "w3", 3)


def test_what_was_sampled_is_found_in_the_log(tmp_path: Path) -> None:
    states = [State(SimpleNamespace(id=f"t{i}"), (1, 2)) for i in range(3)]  # type: ignore[arg-type]

    def rollout(turn: str, index: int) -> Rollout:
        return Rollout(turn, index, 2, Completion((5, index), (-0.5, -0.25), "stop", 3), Action("x"), Verdict(1.0, "x"))

    drawn_twice = [rollout(turn, index) for turn in ("t1", "t1", "t2") for index in (0, 1)]
    rows = [(3, rollout("t0", 0)), *((4, r) for r in drawn_twice)]
    log = tmp_path / "rollouts.jsonl"
    log.write_text("".join(json.dumps({"step": step, **r.to_json()}) + "\n" for step, r in rows))
    found = recorded_rollouts(log, 4, states)
    assert found is not None
    assert [s.turn.id for s in found[0]] == ["t1", "t1", "t2"]
    assert [r for group in found[1] for r in group] == drawn_twice and len(found[1]) == 3
    assert recorded_rollouts(log, 9, states) is None and recorded_rollouts(tmp_path / "none", 4, states) is None


def test_what_fails_beside_the_update_is_raised_after_it() -> None:
    run = Run(ahead=True)
    run.handover.begin(run.engine, 0, lambda: None)

    def sample(step: int) -> str:
        if step:
            raise EngineStateError("the server is gone")
        return "first"

    assert run.handover.rollouts(run.engine, sample, 0) == "first"  # type: ignore[arg-type]
    with pytest.raises(EngineStateError, match="the server is gone"):
        run.handover.settle()


def test_how_old_rollouts_may_be() -> None:
    def group(*versions: int) -> list[Rollout]:
        completions = [Completion((1,), (-0.5,), "stop", version) for version in versions]
        return [Rollout("t", i, 2, c, Action(), Verdict(1.0, "x")) for i, c in enumerate(completions)]

    assert check_weight_version([group(3, 3)], 3) == {"staleness": 0.0}
    assert check_weight_version([group(2, 2), group(2)], 3, lags=True) == {"staleness": 1.0}
    assert check_weight_version([group(3)], 3, lags=True) == {"staleness": 0.0}
    for versions, lags in (((2, 2), False), ((4,), True), ((1,), True), ((3, 2), True)):
        with pytest.raises(RuntimeError, match="a refit was missed"):
            check_weight_version([group(*versions)], 3, lags)


def test_what_cannot_be_had_with_it_is_refused() -> None:
    def said(**changes: Any) -> list[str]:
        a = Algorithm(**{"one_step_off": True, "importance_correction": "truncated", **changes})
        cfg = Config(generation=Generation(server="http://x"), algorithm=a)
        return [text for text in conflicts(cfg, "train", 1, cuda=False) if "one_step_off" in text]

    assert said() == []
    assert "importance_correction" in said(importance_correction="none")[0]
    assert "re-profile" in said(reprofile=Reprofile(every_steps=5))[0]
    cfg = Config(algorithm=Algorithm(one_step_off=True, importance_correction="truncated"))
    found = [text for text in conflicts(cfg, "train", 1, cuda=False) if "one_step_off" in text]
    assert len(found) == 1 and "take turns on the same accelerators" in found[0]
    cfg.generation = Generation(server="http://x", routed_experts=True)
    cfg.experts = Experts(replay=True)
    found = [text for text in conflicts(cfg, "train", 1, cuda=False) if "one_step_off" in text]
    assert len(found) == 1 and "does not keep the experts" in found[0]


def test_a_server_is_for_profiles_and_training() -> None:
    cfg = Config(generation=Generation(server="http://x"))
    assert not [t for s in ("profile", "train") for t in conflicts(cfg, s, 1, cuda=False) if "generation.server" in t]
    for stage in ("evaluate", "e2e"):
        found = [t for t in conflicts(cfg, stage, 1, cuda=False) if "generation.server" in t]
        assert len(found) == 1 and stage in found[0]
