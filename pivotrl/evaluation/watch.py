"""Success of a policy while it trains: rows of <stage>/curve.jsonl, from the engine that trains it anyway."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from pivotrl.config import Config
from pivotrl.environments.registry import get_environment
from pivotrl.evaluation.in_domain import EngineActor, episode_summary, play_together
from pivotrl.evaluation.tasks import evaluation_tasks
from pivotrl.generation.engine import Engine
from pivotrl.io import append_jsonl
from pivotrl.setup import Workbench

CURVE = "curve.jsonl"


class Watcher:
    """Plays `watch.tasks` tasks greedily every `watch.every` steps. With `every: 0` it does nothing.

    Its episodes cost the run nothing in the books: they are evaluation, not training.
    """

    def __init__(self, cfg: Config, run_dir: Path, bench: Workbench, directory: Path) -> None:
        self.cfg, self.bench, self.path = cfg, bench, directory / CURVE
        self.every, self.steps = cfg.watch.every, 0
        if self.every:
            assert cfg.environment.name is not None  # pivotrl.validation has refused it
            self.environment = get_environment(cfg.environment.name, cfg.environment.options)
            self.tasks = evaluation_tasks(cfg, run_dir, self.environment, cfg.watch.split, cfg.watch.tasks)

    def look(self, engine: Engine, step: int, rollouts: int, last: bool = False) -> float | None:
        """After `step` steps, for which `rollouts` turns were generated in all: every n steps, and at last.

        Returns the success, the same in every process; None where it did not look, or every episode broke.
        """
        if not self.every or (step % self.every and not last):
            return None
        started = time.monotonic()
        cfg = self.cfg
        greedy = replace(self.bench.sampling, temperature=0.0)
        actor = EngineActor(engine, self.bench.renderer, greedy, cfg.model.context_length, cfg.seed)
        found = episode_summary(play_together(self.environment, self.tasks, actor, cfg.environment.max_turns))
        kept = {name: found[name] for name in ("success", "ci", "n", "errors", "by_family")}
        row = {"step": step, "rollouts": rollouts, "split": cfg.watch.split, **kept}
        append_jsonl(self.path, [{**row, "seconds_watch": time.monotonic() - started}])
        success: float | None = found["success"]
        return success
