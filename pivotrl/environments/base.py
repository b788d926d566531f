"""The environment interface: stateful tasks for evaluation, local execution and end-to-end RL. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from pivotrl.trajectories.schema import Action, JsonDict, Trajectory


@dataclass(frozen=True)
class Task:
    """One task; `id` is stable for an environment version and names its split."""

    id: str
    family: str
    spec: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How an episode ended. `success` is judged by the final state and by what the user was told."""

    success: bool
    reason: str  # machine name: "ok", "wrong_state", "user_not_told", "too_many_turns"...
    details: dict[str, Any] = field(default_factory=dict)


class Episode(Protocol):
    """One run of a task. `messages` always ends with a user or tool message while `done` is False."""

    messages: list[JsonDict]  # message shape of trajectories.schema
    tools: list[JsonDict]
    done: bool

    def step(self, action: Action) -> None:
        """Append the assistant turn and what follows (tool results, or the user's reply). Total for any action."""
        ...

    def outcome(self) -> Outcome: ...

    def state_hash(self) -> str: ...


class NoExpert(Exception):
    """What `Environment.expert` raises for a task that it cannot demonstrate: audited, and no failure of any policy."""


class Environment(Protocol):
    """What training, verification and evaluation need of a world of tasks.

    An exception that an environment raises is its own fault: roll-outs record it as an error beside the outcomes.
    Where an attribute `waits` is true, episodes ask others (a model that plays the user) and are stepped in threads.
    """

    name: str
    version: str  # changes whenever an episode could go another way

    def tasks(self, split: str, count: int, seed: int = 0) -> list[Task]:
        """`split`: "train" or "test", which share no task. Families in equal shares. Fewer where there are fewer."""
        ...

    def task(self, task_id: str) -> Task:
        """The task that an id names. Raises UserError for an unknown one."""
        ...

    def reset(self, task: Task, max_turns: int) -> Episode: ...

    def expert(self, task: Task, run: int = 0) -> Trajectory:
        """A successful demonstration; `run` varies the way. Raises NoExpert where there is none."""
        ...
