"""Tasks that an environment's expert cannot show, or breaks on, are audited; held-out tasks are never test tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pivotrl.configuration import load_config
from pivotrl.environments.base import NoExpert, Task
from pivotrl.environments.outfitters import Outfitters
from pivotrl.environments.registry import get_environment
from pivotrl.errors import UserError
from pivotrl.evaluation.tasks import evaluation_tasks, task_ids
from pivotrl.io import read_jsonl
from pivotrl.turns_stage import run_turns


class Partial(Outfitters):
    """Outfitters whose expert knows no exchange and breaks on questions."""

    name = "partial"

    def expert(self, task: Task, run: int = 0) -> Any:
        if task.family == "exchange_item":
            raise NoExpert("exchanges are not scripted")
        if task.family == "answer_question":
            raise KeyError("stock")
        return super().expert(task, run)


class Mute(Outfitters):
    def expert(self, task: Task, run: int = 0) -> Any:
        raise NoExpert("nobody knows")


def config(tmp_path: Path, environment: str, *overrides: str) -> Any:
    return load_config([f"environment.name={environment}", "trajectories.tasks=28", f"run_dir={tmp_path}", *overrides])


def test_tasks_without_a_demonstration_are_audited(tmp_path: Path) -> None:
    summary = run_turns(config(tmp_path, "tests.unit.test_expert_audit:Partial"), tmp_path)
    assert summary["trajectories"] == {
        "read": 28,
        "kept": 20,
        "skipped": {"environment_error": 4, "no_expert": 4},
    }
    rows = [row for row in read_jsonl(tmp_path / "turns" / "skipped.jsonl") if row["kind"] == "trajectory"]
    assert {row["detail"] for row in rows} == {"NoExpert: exchanges are not scripted", "KeyError: 'stock'"}
    assert all(row["id"].startswith("outfitters-train-0-") for row in rows)


def test_an_environment_without_any_demonstration_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none of 28 tasks; the first: NoExpert: nobody knows"):
        run_turns(config(tmp_path, "tests.unit.test_expert_audit:Mute"), tmp_path)
    assert len(list(read_jsonl(tmp_path / "turns" / "skipped.jsonl"))) == 28


def test_validation_tasks_are_held_out_of_training_and_no_test_tasks(tmp_path: Path) -> None:
    cfg = config(tmp_path, "outfitters", "trajectories.validation_fraction=0.25")
    run_turns(cfg, tmp_path)
    environment = get_environment("outfitters")
    held = [t.id for t in evaluation_tasks(cfg, tmp_path, environment, "validation", 100)]
    assert len(held) == 7
    assert not {*task_ids(tmp_path, "train"), *task_ids(tmp_path, "warmup")} & set(held)
    test = [t.id for t in evaluation_tasks(cfg, tmp_path, environment, "test", 100)]
    assert not set(test) & set(held)
    assert len(test) == 100
    first = [t.id for t in evaluation_tasks(cfg, tmp_path, environment, "validation", 3)]
    assert first == held[:3]


def test_without_held_out_tasks_the_split_is_refused(tmp_path: Path) -> None:
    cfg = config(tmp_path, "outfitters", "trajectories.validation_fraction=0")
    run_turns(cfg, tmp_path)
    with pytest.raises(UserError, match="validation_fraction"):
        evaluation_tasks(cfg, tmp_path, get_environment("outfitters"), "validation", 3)
    with pytest.raises(UserError, match="pivotrl turns"):
        task_ids(tmp_path / "elsewhere", "train")
