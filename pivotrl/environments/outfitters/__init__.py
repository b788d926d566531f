"""Outfitters: the order desk of an outdoor-gear shop, a conversational tool-use environment (docs/environment.md)."""

from __future__ import annotations

from pivotrl.environments.base import Task
from pivotrl.environments.outfitters import tasks
from pivotrl.environments.outfitters.episode import OutfittersEpisode
from pivotrl.environments.outfitters.expert import Expert
from pivotrl.trajectories.schema import Trajectory


class Outfitters:
    """See environments.base.Environment."""

    name = tasks.NAME
    version = tasks.VERSION

    def tasks(self, split: str, count: int, seed: int = 0) -> list[Task]:
        return tasks.make_tasks(split, count, seed)

    def task(self, task_id: str) -> Task:
        """The task of an id. Raises UserError for an id that is not this environment's."""
        return tasks.task_by_id(task_id)

    def reset(self, task: Task, max_turns: int) -> OutfittersEpisode:
        return OutfittersEpisode(task, max_turns)

    def expert(self, task: Task, run: int = 0) -> Trajectory:
        episode = Expert(task, run).play()
        outcome = episode.outcome()
        if not outcome.success:
            raise RuntimeError(f"the expert failed {task.id} run {run}: {outcome.reason}")  # a bug here, not bad input
        return Trajectory(
            id=f"{task.id}/{run}",
            domain="conversational_tool_use",
            messages=episode.messages,
            tools=episode.tools,
            task_id=task.id,
            meta={"task_id": task.id, "reward": 1.0, "family": task.family},
            source=f"environment:{self.name}",
        )
