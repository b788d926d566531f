"""Curves during training: when the policy is looked at, and what is written."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from pivotrl.configuration import load_config, subset
from pivotrl.evaluation import watch
from pivotrl.generation.engine import Completion, Sampling
from pivotrl.io import read_jsonl
from pivotrl.trajectories.schema import Action
from pivotrl.turns_stage import run_turns
from pivotrl.validation import conflicts


class Renderer:
    def prompt_ids(self, messages: list[Any], tools: list[Any]) -> list[int]:
        return [1] * len(messages)

    def parse(self, ids: Any, tools: Any = ()) -> Action:
        return Action(text="I cannot say.")


class Engine:
    temperatures: ClassVar[list[float]] = []

    def generate(self, prompts: Any, sampling: Any, n: int, seeds: Any) -> list[list[Completion]]:
        self.temperatures.append(sampling.temperature)
        return [[Completion((5,), (0.0,), "stop", 0)] for _ in prompts]


def watcher(tmp_path: Path, *overrides: str) -> watch.Watcher:
    cfg = load_config(["experiment=study_outfitters", "trajectories.tasks=40", f"run_dir={tmp_path}", *overrides])
    if not (tmp_path / "turns").exists():
        run_turns(cfg, tmp_path)
    bench = SimpleNamespace(renderer=Renderer(), sampling=Sampling(max_new_tokens=8))
    return watch.Watcher(cfg, tmp_path, bench, tmp_path / "train")  # type: ignore[arg-type]


def test_looks_every_n_steps_and_at_last(tmp_path: Path):
    watched = watcher(tmp_path, "watch.every=2", "watch.tasks=3")
    for step in range(6):
        success = watched.look(Engine(), step, 10 * step, last=step == 5)  # type: ignore[arg-type]
        assert success == (None if step in (1, 3) else 0.0)
    rows = list(read_jsonl(tmp_path / "train" / watch.CURVE))
    assert [(r["step"], r["rollouts"], r["n"], r["split"]) for r in rows] == [
        *((s, 10 * s, 3, "validation") for s in (0, 2, 4, 5))
    ]
    assert set(Engine.temperatures) == {0.0}


def test_off_means_nothing_is_loaded_or_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watch, "get_environment", lambda name: pytest.fail("loaded"))
    watcher(tmp_path, "watch.every=0").look(Engine(), 0, 0)  # type: ignore[arg-type]
    assert not (tmp_path / "train").exists()


def test_a_curve_needs_an_environment():
    cfg = load_config(["watch.every=5", "trajectories.path=x"])
    assert any("watch.every" in text for text in conflicts(cfg))


def test_the_best_is_chosen_among_looks():
    for overrides in ([], ["watch.every=2", "watch.split=test"]):
        cfg = load_config(["watch.export_best=true", "environment=outfitters", *overrides])
        assert any("watch.export_best" in text for text in conflicts(cfg))


@pytest.mark.parametrize("stage", ["train", "e2e"])
def test_watching_matters_where_it_chooses_what_is_exported(stage: str):
    rare, often, best = (
        subset(load_config(["environment=outfitters", *overrides]), stage)
        for overrides in (["watch.every=5"], ["watch.every=2"], ["watch.every=2", "watch.export_best=true"])
    )
    assert rare == often
    assert {key for key in best if key not in often} == {
        "watch.every",
        "watch.tasks",
        "watch.split",
        "watch.export_best",
    }
