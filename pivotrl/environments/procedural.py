"""What procedural environments share: ids that say how a task was made, turns of an episode, an expert's trajectory."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from pivotrl.environments.base import Episode, Task
from pivotrl.errors import UserError
from pivotrl.trajectories.schema import Action, JsonDict, ToolCall, Trajectory

SPLITS = ("train", "test")
_NOT_RUN = '{"error":"not run: part of the message could not be read"}'


@dataclass(frozen=True)
class TaskMaker:
    """Tasks `name`-split-seed-index, of each family in turn. `make(rng, split, family)` gives the spec of one."""

    name: str
    version: str
    families: Sequence[str]
    make: Callable[[Random, str, str], JsonDict]

    def tasks(self, split: str, count: int, seed: int) -> list[Task]:
        """`count` tasks; the first n of them are the same for every count >= n."""
        if split not in SPLITS:
            raise UserError(f'environment {self.name}: no split "{split}"; use one of {", ".join(SPLITS)}')
        return [self._task(split, seed, index) for index in range(count)]

    def task(self, task_id: str) -> Task:
        """The task that an id names. Raises UserError for an id that is not this environment's."""
        name, *rest = task_id.split("-")
        if len(rest) != 3 or name != self.name or rest[0] not in SPLITS or not (rest[1] + rest[2]).isdecimal():
            raise UserError(f'"{task_id}" is no task of environment {self.name} (they read {self.name}-train-0-12)')
        return self._task(rest[0], int(rest[1]), int(rest[2]))

    def _task(self, split: str, seed: int, index: int) -> Task:
        family = self.families[index % len(self.families)]
        # A string seed: Random hashes it with SHA-512, the same in every process and Python version.
        rng = Random(f"{self.name}/{self.version}/{split}/{seed}/{index}")
        return Task(f"{self.name}-{split}-{seed}-{index}", family, self.make(rng, split, family))


class TurnEpisode(ABC):
    """An episode of at most `max_turns` assistant turns: calls of tools, or text to the user. See base.Episode."""

    def __init__(self, task: Task, max_turns: int, tools: list[JsonDict], messages: list[JsonDict]) -> None:
        self.task, self.max_turns, self.tools, self.messages = task, max_turns, tools, messages
        self.turns = 0
        self.done = False
        self._calls = 0

    @abstractmethod
    def answer(self, text: str) -> str | None:
        """The user's reply to a text that could be read; None: the episode is over."""

    @abstractmethod
    def run(self, call: ToolCall) -> str:
        """Carry out a call; returns the text of its result."""

    def step(self, action: Action) -> None:
        """Append the assistant turn and what follows it. Total; a finished episode takes no more actions."""
        if self.done:
            return
        self.turns += 1
        if action.tool_calls:
            self._call_turn(action)
        else:
            self._text_turn(action)
        if self.turns >= self.max_turns:
            self.done = True

    def _text_turn(self, action: Action) -> None:
        self.messages.append({"role": "assistant", "content": action.text})
        if action.problems:
            problem = "; ".join(map(str, action.problems))[:120]
            reply: str | None = f"[error: the last message could not be read ({problem}); write it again]"
        else:
            reply = self.answer(action.text)
        if reply is None:
            self.done = True
        else:
            self.messages.append({"role": "user", "content": reply})

    def _call_turn(self, action: Action) -> None:
        calls = []
        for call in action.tool_calls:
            calls.append({"id": f"call_{self._calls}", "name": call.name, "arguments": copy.deepcopy(call.arguments)})
            self._calls += 1
        message: JsonDict = {"role": "assistant", "tool_calls": calls}
        if action.text.strip():
            message["content"] = action.text
        self.messages.append(message)
        for row, call in zip(calls, action.tool_calls, strict=True):
            # A turn that could be read only in part is carried out not at all: its intent is not known.
            content = _NOT_RUN if action.problems else self.run(call)
            self.messages.append({"role": "tool", "tool_call_id": row["id"], "name": call.name, "content": content})


def demonstration(episode: Episode, task: Task, run: int, environment: str, domain: str) -> Trajectory:
    """The trajectory of an expert's finished episode. Raises RuntimeError where it failed: a bug, not bad input."""
    outcome = episode.outcome()
    if not outcome.success:
        raise RuntimeError(f"the expert failed {task.id} run {run}: {outcome.reason}")
    return Trajectory(
        id=f"{task.id}/{run}",
        domain=domain,
        messages=episode.messages,
        tools=episode.tools,
        task_id=task.id,
        meta={"task_id": task.id, "reward": 1.0, "family": task.family},
        source=f"environment:{environment}",
    )
