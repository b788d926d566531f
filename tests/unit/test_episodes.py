"""The batched roll-out driver and equivalence by execution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pivotrl.environments.base import Outcome, Task
from pivotrl.environments.equivalence import action_of, effect, equivalent, replay
from pivotrl.environments.outfitters import Outfitters
from pivotrl.environments.registry import draw_tasks, get_environment
from pivotrl.environments.rollout import episodes_of, run_episodes
from pivotrl.errors import UserError
from pivotrl.trajectories.schema import Action, JsonDict, ToolCall

ENV = Outfitters()
TASKS = ENV.tasks("train", 28)


def expert_act(states: Sequence[tuple[list[JsonDict], list[JsonDict]]]) -> list[Action | None]:
    """Plays each expert's next turn, found by its messages so far."""
    actions: list[Action | None] = []
    for messages, tools in states:
        assert messages[-1]["role"] in ("user", "tool")
        assert len(tools) == 8
        rest = next(t.messages for t in EXPERTS if t.messages[: len(messages)] == messages)
        actions.append(action_of(rest[len(messages)]))
    return actions


EXPERTS = [ENV.expert(task) for task in TASKS]


def test_experts_actions_in_lockstep() -> None:
    sizes = []

    def act(states: Any) -> list[Action | None]:
        sizes.append(len(states))
        return expert_act(states)

    results = run_episodes(ENV, episodes_of(TASKS, 2), act, max_turns=12)
    assert [(r.task.id, r.trial) for r in results] == [(t.id, k) for t in TASKS for k in range(2)]
    assert all(r.outcome is not None and r.outcome.success and r.error is None for r in results)
    for result, expert in zip(results[::2], EXPERTS, strict=True):
        assert result.messages == expert.messages
        assert result.turns == sum(m["role"] == "assistant" for m in expert.messages)
    assert sizes[0] == 56
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) == max(r.turns for r in results)


class _Broken:
    """An environment that breaks at chosen places."""

    name, version = "broken", "0"

    def __init__(self, where: dict[str, str]) -> None:
        self.where = where

    def tasks(self, split: str, count: int, seed: int = 0) -> list[Task]:
        return TASKS[:count]

    def reset(self, task: Task, max_turns: int) -> Any:
        if self.where.get(task.id) == "reset":
            raise KeyError("no such row")
        episode = ENV.reset(task, max_turns)
        if self.where.get(task.id) == "step":
            episode.step = self._fail  # type: ignore[method-assign]
        elif self.where.get(task.id) == "outcome":
            episode.outcome = self._fail  # type: ignore[method-assign]
        elif self.where.get(task.id) == "endless":
            episode.step = lambda action: None  # type: ignore[method-assign]
        return episode

    def _fail(self, *_: Any) -> Any:
        raise ZeroDivisionError("inside")

    def expert(self, task: Task, run: int = 0) -> Any:
        return ENV.expert(task, run)


def test_a_broken_episode_is_an_error_and_ends_no_other() -> None:
    where = dict(zip([t.id for t in TASKS], ("reset", "step", "outcome", "endless"), strict=False))
    skipped = {t.id for t in TASKS[:4]}

    def act(states: Any) -> list[Action | None]:
        return [expert_act([s])[0] if len(s[0]) < 40 else None for s in states]

    results = run_episodes(_Broken(where), episodes_of(TASKS), act, max_turns=12)
    for result in results:
        if result.task.id in skipped:
            assert result.outcome is None
            assert result.error
        else:
            assert result.outcome is not None
            assert result.outcome.success
    assert "KeyError" in str(results[0].error)
    assert "ZeroDivisionError" in str(results[1].error)
    assert "did not end" in str(results[3].error)


def test_a_full_context_is_a_failure_of_the_policy() -> None:
    results = run_episodes(ENV, episodes_of(TASKS[:3]), lambda states: [None] * len(states), max_turns=4)
    assert [r.outcome for r in results] == [Outcome(False, "context_full", {"turns": 0})] * 3
    assert all(r.turns == 0 and r.error is None for r in results)


def test_the_engines_own_errors_are_passed_on() -> None:
    def down(states: Any) -> list[Action | None]:
        raise ConnectionError("engine down")

    with pytest.raises(ConnectionError):
        run_episodes(ENV, episodes_of(TASKS[:2]), down, max_turns=4)
    with pytest.raises(ValueError, match="1 actions for 2"):
        run_episodes(ENV, episodes_of(TASKS[:2]), lambda states: [Action("hi")], max_turns=4)


def test_act_cannot_change_an_episode_through_its_messages() -> None:
    def act(states: Any) -> list[Action | None]:
        for messages, _ in states:
            messages.append({"role": "user", "content": "injected"})
        return [Action("Hello")] * len(states)

    for result in run_episodes(ENV, episodes_of(TASKS[:2]), act, max_turns=2):
        assert all(m["content"] != "injected" for m in result.messages)


# Equivalence


def states(trajectory: Any) -> list[tuple[list[JsonDict], Action]]:
    rows = trajectory.messages
    return [(rows[:i], action_of(m)) for i, m in enumerate(rows) if m["role"] == "assistant"]


def test_an_action_is_equivalent_to_itself_in_every_state() -> None:
    for expert in EXPERTS:
        for messages, action in states(expert):
            assert replay(ENV, expert.task_id, messages).messages == messages
            assert equivalent(ENV, expert.task_id, messages, action, action)
            assert not effect(ENV, expert.task_id, messages, action).failed


def test_equivalence_sees_order_of_items_wording_and_wrong_values() -> None:
    def find(tool: str) -> tuple[str, list[JsonDict], Action]:
        return next(
            (e.task_id, messages, action)
            for e in EXPERTS
            for messages, action in states(e)
            if action.tool_calls and action.tool_calls[0].name == tool
        )

    task_id, messages, action = find("return_items")
    arguments = action.tool_calls[0].arguments
    turned = ToolCall("return_items", {**dict(reversed(arguments.items())), "items": arguments["items"][::-1]})
    assert equivalent(ENV, task_id, messages, action, Action(tool_calls=(turned,)))
    other = {"card": "credit", "credit": "card"}[arguments["to"]]
    wrong = Action(tool_calls=(ToolCall("return_items", {**arguments, "to": other}),))
    assert not equivalent(ENV, task_id, messages, action, wrong)

    # Reads and failed writes leave the state alone: the results tell them apart.
    read = Action(tool_calls=(ToolCall("get_order", {"order": arguments["order"]}),))
    failed = Action(tool_calls=(ToolCall("cancel_order", {"order": "W0"}),))
    assert effect(ENV, task_id, messages, read).state_hash == effect(ENV, task_id, messages, failed).state_hash
    assert not equivalent(ENV, task_id, messages, read, failed)
    assert effect(ENV, task_id, messages, failed).failed
    malformed = Action(problems=("unclosed tag",))
    assert not equivalent(ENV, task_id, messages, malformed, malformed)

    # Texts by what they bring about: any wording of the right proposal gets the yes.
    task_id, messages, action = find("cancel_order")
    messages, proposal = messages[:-2], action_of(messages[-2])
    order = action.tool_calls[0].arguments["order"]
    assert equivalent(ENV, task_id, messages, proposal, Action(text=f"So, cancel {order}, yes?"))
    assert not equivalent(ENV, task_id, messages, proposal, Action(text="One moment."))


def test_a_record_of_another_version_is_refused() -> None:
    messages = [dict(m) for m in EXPERTS[0].messages[:-1]]
    messages[1]["content"] = "Where is my parcel?"
    with pytest.raises(UserError, match="message 1"):
        replay(ENV, EXPERTS[0].task_id, messages)
    with pytest.raises(UserError, match="no task"):
        replay(ENV, "elsewhere-1", messages)


def test_tasks_of_some_families_only() -> None:
    environment = get_environment("outfitters")
    tasks = draw_tasks(environment, "test", 10, 0, ["cancel_order", "refuse_rules"])
    assert [t.family for t in tasks] == ["cancel_order", "refuse_rules"] * 5
    assert [t.id for t in tasks[:4]] == [
        t.id for t in draw_tasks(environment, "test", 4, 0, ["cancel_order", "refuse_rules"])
    ]
    assert draw_tasks(environment, "test", 9, 0) == environment.tasks("test", 9, 0)
    for wrong in (["cancel_orders"], []):
        with pytest.raises(UserError, match="families"):
            draw_tasks(environment, "test", 2, 0, wrong)
