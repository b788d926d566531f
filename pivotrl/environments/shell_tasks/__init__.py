"""Shell tasks: small jobs at a bash prompt, run in a bubblewrap sandbox (docs/environment.md)."""

from __future__ import annotations

from pivotrl.environments.base import Task
from pivotrl.environments.procedural import demonstration
from pivotrl.environments.shell_tasks import tasks
from pivotrl.environments.shell_tasks.episode import ShellEpisode
from pivotrl.environments.shell_tasks.expert import Expert
from pivotrl.environments.shell_tasks.machine import Machine
from pivotrl.errors import UserError
from pivotrl.trajectories.schema import Trajectory
from pivotrl.verifiers import sandbox


class ShellTasks:
    """See environments.base.Environment. Raises UserError at once where there is no working sandbox."""

    name = tasks.NAME
    version = tasks.VERSION

    def __init__(self) -> None:
        if reason := sandbox.unusable():
            raise UserError(f"environment.name={self.name} runs commands, and only in a sandbox: {reason}")
        self._machine = Machine()

    def tasks(self, split: str, count: int, seed: int = 0) -> list[Task]:
        return tasks.MAKER.tasks(split, count, seed)

    def task(self, task_id: str) -> Task:
        """The task of an id. Raises UserError for an id that is not this environment's."""
        return tasks.MAKER.task(task_id)

    def reset(self, task: Task, max_turns: int) -> ShellEpisode:
        return ShellEpisode(task, max_turns, self._machine)

    def expert(self, task: Task, run: int = 0) -> Trajectory:
        return demonstration(Expert(task, run, self._machine).play(), task, run, self.name, "terminal")
