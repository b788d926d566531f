"""Episodes of the order desk for tests: tasks by family, and actions played to the customer."""

from __future__ import annotations

from pivotrl.environments.base import Task
from pivotrl.environments.outfitters import Outfitters, shop
from pivotrl.environments.outfitters.episode import OutfittersEpisode
from pivotrl.trajectories.schema import Action, ToolCall, Trajectory

ENV = Outfitters()
TRAIN = ENV.tasks("train", 700)


def say(text: str) -> Action:
    return Action(text=text)


def call(tool: str, /, **arguments: object) -> Action:
    return Action(tool_calls=(ToolCall(tool, arguments),))


def tasks_of(family: str, kind: str | None = None) -> list[Task]:
    return [t for t in TRAIN if t.family == family and kind in (None, t.spec["request"]["kind"])]


def play(task: Task, *actions: Action, max_turns: int = 12) -> OutfittersEpisode:
    episode = ENV.reset(task, max_turns)
    for action in actions:
        episode.step(action)
    return episode


def actions_of(trajectory: Trajectory) -> list[Action]:
    rows = [m for m in trajectory.messages if m["role"] == "assistant"]
    return [
        Action(m.get("content", ""), "", tuple(ToolCall(c["name"], c["arguments"]) for c in m.get("tool_calls", ())))
        for m in rows
    ]


def swap_write(task: Task, change: dict[str, object]) -> OutfittersEpisode:
    """The expert's episode, with arguments of its write changed."""
    actions = []
    for action in actions_of(ENV.expert(task)):
        calls = tuple(
            ToolCall(c.name, {**c.arguments, **change}) if c.name in shop.WRITES else c for c in action.tool_calls
        )
        actions.append(Action(action.text, "", calls))
    return play(task, *actions, say("Bye."))  # where the expert's words no longer fit, the customer asks once more
