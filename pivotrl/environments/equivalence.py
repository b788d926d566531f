"""Functional equivalence of two actions in a state, by execution: replay the state, run each, compare what they did.

Read-only calls leave the state alone, so the hash by itself would call every read equal to every failed write: error
flags, results and hash are compared together. A text is compared by what the customer answers to it, and by whether it
ended the dialogue well.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pivotrl.environments.base import Environment, Episode, Task
from pivotrl.errors import UserError
from pivotrl.trajectories.schema import Action, JsonDict, ToolCall, Turn


class ReplayableEnvironment(Environment, Protocol):
    def task(self, task_id: str) -> Task:
        """The task that an id names. Raises UserError for an unknown one."""
        ...


@dataclass(frozen=True)
class Effect:
    """What one action did to a state. Equal effects: functionally equivalent actions."""

    results: tuple[tuple[str, bool, str], ...]  # per call: (name, error flag, result), sorted
    reply: str | None  # the user's reply to a text; None after calls, or where the dialogue ended
    done: bool
    success: bool  # of the finished dialogue; False while it goes on
    state_hash: str  # of an executor without a user: a digest of what changed, "" where nothing did

    @property
    def failed(self) -> bool:
        """Whether any call came to an error (such an action is never a good demonstration)."""
        return any(error for _, error, _ in self.results)

    @property
    def is_empty(self) -> bool:
        """Whether calls changed nothing and showed nothing (of an executor without a user)."""
        return not self.state_hash and all(result.strip() in _NOTHING for _, _, result in self.results)


class Executor(Protocol):
    """Runs an action in the state of a turn."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    @property
    def has_user(self) -> bool:
        """Whether a text can be executed: someone answers it, always the same way."""
        ...

    def effect(self, turn: Turn, action: Action) -> Effect:
        """What `action` does in the turn's state. Raises UserError, KeyError or ValueError where the state cannot be
        replayed; total in `action`."""
        ...


@dataclass(frozen=True)
class EpisodeExecutor:
    """An executor of an environment of ours: the whole dialogue is played again, with its user."""

    environment: ReplayableEnvironment
    has_user: bool = True

    @property
    def name(self) -> str:
        return self.environment.name

    @property
    def version(self) -> str:
        return self.environment.version

    def effect(self, turn: Turn, action: Action) -> Effect:
        return effect(self.environment, turn.task_id, turn.messages, action)


_NOTHING = frozenset({"", "[]", "{}", "null", "None"})


def action_of(message: JsonDict) -> Action:
    """The action that an assistant message records."""
    calls = tuple(ToolCall(call["name"], call["arguments"]) for call in message.get("tool_calls", ()))
    return Action(text=message.get("content", ""), thinking=message.get("thinking", ""), tool_calls=calls)


def replay(environment: ReplayableEnvironment, task_id: str, messages: Sequence[JsonDict]) -> Episode:
    """The episode of `task_id` after the assistant turns of `messages` (a state: it ends before an assistant turn).

    Raises UserError where the replay differs from the record (another version of the environment, or edited data).
    """
    turns = [message for message in messages if message["role"] == "assistant"]
    # One turn more than the state and its action, so that the limit on turns does not end the dialogue.
    episode = environment.reset(environment.task(task_id), len(turns) + 2)
    for message in turns:
        episode.step(action_of(message))
    for index, (ours, theirs) in enumerate(zip(episode.messages, messages, strict=False)):
        if _visible(ours) != _visible(theirs):
            raise UserError(
                f"task {task_id}, message {index}: replay in {environment.name} {environment.version} gives "
                f"{json.dumps(_visible(ours))[:200]}, the record has {json.dumps(_visible(theirs))[:200]}; "
                "make the trajectories again with this version"
            )
    if len(episode.messages) != len(messages):
        raise UserError(
            f"task {task_id}: replay gives {len(episode.messages)} messages, the record has {len(messages)}"
        )
    return episode


def effect(environment: ReplayableEnvironment, task_id: str, messages: Sequence[JsonDict], action: Action) -> Effect:
    """What `action` does in the state `messages`. Total in `action`."""
    episode = replay(environment, task_id, messages)
    episode.step(action)
    after = episode.messages[len(messages) + 1 :]
    results = tuple(
        sorted((str(m["name"]), _is_error(m["content"]), m["content"]) for m in after if m["role"] == "tool")
    )
    reply = next((m["content"] for m in after if m["role"] == "user"), None)
    success = episode.done and episode.outcome().success
    return Effect(results, reply, episode.done, success, episode.state_hash())


def equivalent(
    environment: ReplayableEnvironment, task_id: str, messages: Sequence[JsonDict], one: Action, other: Action
) -> bool:
    """Whether both actions have the same effect. Malformed actions are equivalent to nothing, themselves included."""
    if one.problems or other.problems:
        return False
    return effect(environment, task_id, messages, one) == effect(environment, task_id, messages, other)


def _is_error(content: str) -> bool:
    return "error" in json.loads(content)


def _visible(message: JsonDict) -> JsonDict:
    """What of a message both a replay and a record have (thinking and call ids may differ)."""
    calls = [(call["name"], call["arguments"]) for call in message.get("tool_calls", ())]
    return {"role": message["role"], "content": message.get("content", ""), "calls": calls}
