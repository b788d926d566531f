"""Which tasks of an environment are evaluated: test tasks, or held-out ones of the train side to make choices on."""

from __future__ import annotations

from pathlib import Path

from pivotrl.config import Config
from pivotrl.environments.base import Environment, Task
from pivotrl.environments.registry import draw_tasks
from pivotrl.errors import UserError
from pivotrl.io import read_jsonl


def evaluation_tasks(cfg: Config, run_dir: Path, environment: Environment, split: str, count: int) -> list[Task]:
    """`count` test tasks, or the first `count` tasks of the run's validation split (fewer where it has fewer).

    Validation tasks are those that `pivotrl turns` held out of warm-up and training: never a test task. Raises
    UserError when there is none.
    """
    if split == "test":
        return draw_tasks(environment, "test", count, cfg.seed, cfg.environment.families)
    ids = task_ids(run_dir, "validation")
    if not ids:
        raise UserError(
            f"{run_dir / 'turns'}: no task is in the validation split; raise trajectories.validation_fraction, "
            "or evaluate on split=test"
        )
    return [environment.task(task_id) for task_id in ids[:count]]


def task_ids(run_dir: Path, split: str) -> list[str]:
    """Tasks of a split of the run's trajectories, each once, in file order."""
    path = run_dir / "turns" / "turns.jsonl"
    if not path.exists():
        raise UserError(f"{path} does not exist: run `pivotrl turns run_dir={run_dir}` first")
    return list(dict.fromkeys(row["task_id"] for row in read_jsonl(path) if row["split"] == split))
