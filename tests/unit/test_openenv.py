"""Episodes on a server of OpenEnv: a counter that answers as the package's own server does (0.10, as recorded)."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pivotrl.environments.base import NoExpert
from pivotrl.environments.openenv import OpenEnv
from pivotrl.environments.registry import get_environment
from pivotrl.environments.rollout import EpisodeResult, episodes_of, run_episodes
from pivotrl.errors import UserError
from pivotrl.io import write_jsonl
from pivotrl.trajectories.schema import Action, JsonDict, ToolCall

pytest.importorskip("websockets", reason="pip install 'pivotrl[openenv]'")
SYSTEM = {"role": "system", "content": "Count."}
ADD: JsonDict = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
SUBMIT: JsonDict = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}


def row(goal: int) -> JsonDict:
    return {"messages": [SYSTEM], "reset": {"goal": goal}}


@dataclass
class Counter:
    """A counter a connection; `answers` replaces what a tool gives back, `reward` what submitting is worth."""

    url: str = ""
    room: int = 99
    open: int = 0
    most_open: int = 0
    answers: dict[str, JsonDict] = field(default_factory=dict)
    reward: float | None = 1.0
    step_reward: float | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def serve(self, socket: Any) -> None:
        with self.lock:
            full = self.open >= self.room
            self.open += 1
            self.most_open = max(self.most_open, self.open)
        try:
            if full:
                data = {"message": "Server at capacity", "code": "CAPACITY_REACHED"}
                socket.send(json.dumps({"type": "error", "data": data}))
                return
            session: JsonDict = {}
            for message in socket:
                socket.send(json.dumps(self.respond(session, **json.loads(message))))
        finally:
            with self.lock:
                self.open -= 1

    def respond(self, session: JsonDict, type: str, data: JsonDict) -> JsonDict:
        if type == "reset":
            session.update(value=0, goal=data["goal"])
            return answer({"metadata": {"question": f"Bring the counter to {data['goal']}."}}, reward=0.0)
        if data["type"] == "list_tools":
            listed = [("add", "Adds n.", ADD), ("submit", "Ends.", SUBMIT)]
            return answer({"tools": [{"name": n, "description": d, "input_schema": s} for n, d, s in listed]})
        name, given = data["tool_name"], data["arguments"]
        if name in self.answers:
            return self.answers[name]
        if name == "add" and isinstance(given.get("n"), int):
            session["value"] += given["n"]
            return result(name, f"value {session['value']}", self.step_reward)
        if name == "submit":
            right = session["value"] == session["goal"] and given["answer"] == "It is done."
            return result(name, "submitted", self.reward and self.reward * right, done=True)
        kind = "execution_error" if name == "add" else "tool_not_found"
        return answer({"tool_name": name, "result": None, "error": {"error_type": kind, "message": f"no: {name}"}})


def answer(observation: JsonDict, reward: float | None = None, done: bool = False) -> JsonDict:
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}


def result(name: str, text: str, reward: float | None, done: bool = False) -> JsonDict:
    content = [{"type": "text", "text": text, "annotations": None, "meta": None}]
    found = {"content": content, "structured_content": {"result": text}, "data": text, "is_error": False}
    return answer({"metadata": {}, "tool_name": name, "result": found, "error": None}, reward, done)


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    from websockets.sync.server import serve

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    made = Counter()
    with serve(made.serve, "127.0.0.1", 0) as server:
        made.url = f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield made
        server.shutdown()


@pytest.fixture
def options(counter: Counter, tmp_path: Path) -> JsonDict:
    for split, goals in (("train", (1, 2, 3)), ("test", (4, 5))):
        write_jsonl(tmp_path / f"{split}.jsonl", map(row, goals))
    files = {split: str(tmp_path / f"{split}.jsonl") for split in ("train", "test")}
    return {"url": counter.url, **files, "prompt_field": "metadata.question", "answer_tool": "submit"}


def add(n: Any) -> Action:
    return Action(tool_calls=(ToolCall("add", {"n": n}),))


DONE = Action(text="It is done.")
SUBMIT_AND_ADD = Action(tool_calls=(ToolCall("submit", {"answer": "no"}), ToolCall("add", {"n": 1})))


def play(options: JsonDict, *actions: Action, most: int = 9) -> EpisodeResult:
    world, left = get_environment("openenv", options), list(actions)
    episodes = episodes_of([world.task("openenv-test-0")])
    (played,) = run_episodes(world, episodes, lambda states: [left.pop(0) for _ in states], most)
    return played


def test_an_episode_is_a_connection(options: JsonDict, counter: Counter) -> None:
    wrong = Action(tool_calls=(ToolCall("add", {"n": "x"}), ToolCall("close", {})))
    done = play(options, wrong, add(4), DONE)
    assert done.outcome is not None, done.error
    assert (done.outcome.success, done.outcome.reason, done.outcome.details) == (True, "ok", {"reward": 1.0})
    assert done.messages[:2] == [SYSTEM, {"role": "user", "content": "Bring the counter to 4."}]
    told = [m["content"] for m in done.messages if m["role"] == "tool"]
    assert told == ['{"error": "no: add"}', '{"error": "no: close"}', "value 4"]
    tools = OpenEnv(**options).reset(OpenEnv(**options).task("openenv-train-0"), 3).tools
    assert [t["function"]["name"] for t in tools] == ["add", "submit"]
    assert tools[0]["function"]["parameters"] == ADD


def test_episodes_side_by_side_share_nothing_and_leave_nothing_open(options: JsonDict, counter: Counter) -> None:
    world = OpenEnv(**options)

    def act(states: Any) -> list[Action]:
        goals = [int(messages[1]["content"].rsplit(" ", 1)[1][:-1]) for messages, _ in states]
        return [add(g) if m[-1]["role"] == "user" else DONE for g, (m, _) in zip(goals, states, strict=True)]

    results = run_episodes(world, episodes_of(world.tasks("train", 3), 4), act, 5)
    assert [r.outcome is not None and r.outcome.success for r in results] == [True] * 12
    assert counter.most_open == 12
    until = time.monotonic() + 30  # the server's threads end after ours have hung up
    while counter.open and time.monotonic() < until:
        time.sleep(0.01)
    assert counter.open == 0


@pytest.mark.parametrize(
    ("actions", "most", "reason"),
    [
        ((DONE,), 9, "low_reward"),
        ((add(4), add(0)), 2, "too_many_turns"),
        ((add(4), SUBMIT_AND_ADD), 9, "low_reward"),
    ],
)
def test_what_fails(options: JsonDict, actions: tuple[Action, ...], most: int, reason: str) -> None:
    played = play(options, *actions, most=most)
    assert played.outcome is not None, played.error
    assert (played.outcome.success, played.outcome.reason) == (False, reason)
    assert played.outcome.details == {"reward": 0.0}


def test_calls_after_the_end_are_not_carried_out(options: JsonDict) -> None:
    played = play(options, SUBMIT_AND_ADD)
    assert [m["content"] for m in played.messages[-2:]] == ["submitted", '{"error": "the episode is over"}']


@pytest.mark.parametrize(("how", "reward"), [("last", 1.0), ("sum", 1.5)])
def test_rewards_of_steps(options: JsonDict, counter: Counter, how: str, reward: float) -> None:
    counter.step_reward = 0.25
    played = play(options | {"reward": how, "success_reward": reward}, add(1), add(3), DONE)
    assert played.outcome is not None
    assert (played.outcome.success, played.outcome.details) == (True, {"reward": reward})


def test_a_plain_message_ends_where_no_tool_takes_it(options: JsonDict) -> None:
    played = play(options | {"answer_tool": ""}, add(4), DONE)
    assert played.outcome is not None
    assert (played.outcome.reason, played.turns) == ("low_reward", 2)


BROKEN = answer({"tool_name": "add", "result": None, "error": {"error_type": "timeout", "message": "slow"}})


@pytest.mark.parametrize(
    ("change", "given", "told"),
    [
        ({"reward": None}, {}, "is over, and has no reward"),
        ({"answers": {"add": BROKEN}}, {}, "slow"),
        ({"answers": {"add": {"type": "error", "data": {"message": "boom", "code": "EXECUTION_ERROR"}}}}, {}, "boom"),
        ({"room": 0}, {}, "Server at capacity; raise the server's max_concurrent_envs"),
        ({}, {"url": "http://127.0.0.1:9"}, "no connection"),
        ({}, {"prompt_field": "metadata.task"}, "prompt_field=metadata.task"),
        ({}, {"answer_tool": "finish"}, "no tool 'finish' of one argument"),
    ],
)
def test_what_the_server_breaks_is_no_failure(
    options: JsonDict, counter: Counter, change: JsonDict, given: JsonDict, told: str
) -> None:
    for name, value in change.items():
        setattr(counter, name, value)
    played = play(options | given, add(4), DONE)
    assert played.outcome is None
    assert told in str(played.error)


def test_a_server_that_hangs_up_is_no_failure(options: JsonDict, counter: Counter) -> None:
    counter.answers = {"add": {}}
    played = play(options, add(4), DONE)
    assert played.outcome is None
    world = OpenEnv(**options)
    episode = world.reset(world.task("openenv-test-0"), 9)
    counter.answers = {"add": {"no": {1}}}  # not JSON: its handler dies, and the connection with it
    with pytest.raises(RuntimeError, match="no answer to step"):
        episode.step(add(4))


def test_tasks(options: JsonDict) -> None:
    world = OpenEnv(**options)
    assert sorted(t.spec["reset"]["goal"] for t in world.tasks("train", 99)) == [1, 2, 3]
    assert world.tasks("test", 1)[0] == world.tasks("test", 2)[0]
    with pytest.raises(UserError, match="no task of environment openenv"):
        world.task("openenv-test-2")
    with pytest.raises(NoExpert):
        world.expert(world.task("openenv-train-0"))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "no JSON"),
        ("[]", "no JSON object"),
        ('{"reset": 3}', "reset is no object"),
        ('{"messages": [{"role": "tool", "content": "x"}]}', "messages is no list of"),
        ('{"messages": [{"role": "system", "content": "x"}]}', "do not end with the user's"),
    ],
)
def test_rows_that_are_no_tasks(tmp_path: Path, line: str, told: str) -> None:
    good = json.dumps({"messages": [{"role": "user", "content": "x"}]})
    (tmp_path / "t.jsonl").write_text(f"{good}\n\n{line}\n")
    with pytest.raises(UserError, match=rf"t\.jsonl:3: .*{told}"):
        OpenEnv(url="http://h", test=str(tmp_path / "t.jsonl"))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"url": "http://h", "prompt": "x"}, "Did you mean 'prompt_field'"),
        ({"url": "h:80"}, "give the address"),
        ({"url": "http://h"}, "needs train and test"),
        ({"url": "http://h", "reward": "mean"}, "one of last, sum"),
    ],
)
def test_wrong_options(given: JsonDict, told: str) -> None:
    with pytest.raises(UserError, match=told):
        OpenEnv(**given)
