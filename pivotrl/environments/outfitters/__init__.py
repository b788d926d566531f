"""Outfitters: the order desk of an outdoor-gear shop, a conversational tool-use environment (docs/environment.md)."""

from __future__ import annotations

from pivotrl.environments.base import Task
from pivotrl.environments.outfitters import tasks
from pivotrl.environments.outfitters.episode import OutfittersEpisode
from pivotrl.environments.outfitters.expert import Expert
from pivotrl.environments.procedural import demonstration
from pivotrl.trajectories.schema import Trajectory


class Outfitters:
    """See environments.base.Environment."""

    name = tasks.NAME
    version = f"{tasks.VERSION}.1"  # tasks and words are drawn by the first number

    def tasks(self, split: str, count: int, seed: int = 0) -> list[Task]:
        return tasks.MAKER.tasks(split, count, seed)

    def task(self, task_id: str) -> Task:
        """The task of an id. Raises UserError for an id that is not this environment's."""
        return tasks.MAKER.task(task_id)

    def reset(self, task: Task, max_turns: int) -> OutfittersEpisode:
        return OutfittersEpisode(task, max_turns)

    def expert(self, task: Task, run: int = 0) -> Trajectory:
        return demonstration(Expert(task, run).play(), task, run, self.name, "conversational_tool_use")
