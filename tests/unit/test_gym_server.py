"""Episodes on a resources server of NeMo-Gym: a small one of our own that keeps sessions by cookie, as theirs do."""

from __future__ import annotations

from collections.abc import Iterator
from email.message import Message
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any

import pytest
from json_server import serving

from pivotrl.environments.base import NoExpert
from pivotrl.environments.gym_server import GymServer
from pivotrl.environments.registry import get_environment
from pivotrl.environments.rollout import EpisodeResult, episodes_of, run_episodes
from pivotrl.errors import UserError
from pivotrl.io import write_jsonl
from pivotrl.trajectories.schema import Action, JsonDict, ToolCall

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}}


def row(goal: int) -> JsonDict:
    head = [{"role": "system", "content": "Count."}, {"role": "user", "content": f"Bring the counter to {goal}."}]
    return {"responses_create_params": {"input": head, "tools": [TOOL]}, "goal": goal}


class Counter:
    """A counter a session; verified by its value and by what the last message says."""

    def __init__(self) -> None:
        self.sessions: dict[str, int] = {}
        self.verified: list[JsonDict] = []
        self.answer: JsonDict = {}
        self.url = ""

    def respond(self, path: str, body: JsonDict, headers: Message) -> tuple[int, JsonDict, dict[str, str]]:
        session = SimpleCookie(headers.get("Cookie", "")).get("session")
        if path == "/seed_session":
            made = f"s{len(self.sessions)}"
            self.sessions[made] = 0
            return 200, {}, {"Set-Cookie": f"session={made}; path=/"}
        if session is None:
            return 500, {}, {}
        if path == "/add":
            if not isinstance(body.get("n"), int):
                return 422, {"detail": "n is no integer"}, {}
            self.sessions[session.value] += body["n"]
            return 200, {"value": self.sessions[session.value]}, {}
        assert path == "/verify", path
        self.verified.append(body)
        said = body["response"]["output"][-1]
        told = said["type"] == "message" and "done" in said["content"][0]["text"]
        reward = float(self.sessions[session.value] == body["goal"]) * (1.0 if told else 0.5)
        return 200, {"reward": reward, **self.answer}, {}


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    made = Counter()
    with serving(made.respond) as made.url:
        yield made


@pytest.fixture
def world(counter: Counter, tmp_path: Path) -> GymServer:
    for split, goals in (("train", (1, 2, 3)), ("test", (4, 5))):
        write_jsonl(tmp_path / f"{split}.jsonl", map(row, goals))
    files = {split: str(tmp_path / f"{split}.jsonl") for split in ("train", "test")}
    made = get_environment("nemo_gym", {"url": counter.url, **files})
    assert isinstance(made, GymServer)
    return made


def add(n: Any) -> Action:
    return Action(tool_calls=(ToolCall("add", {"n": n}),))


def play(world: GymServer, *actions: Action, task: str = "nemo_gym-test-0", most: int = 9) -> EpisodeResult:
    left = list(actions)
    return run_episodes(world, episodes_of([world.task(task)]), lambda states: [left.pop(0) for _ in states], most)[0]


DONE = Action(text="It is done.")


def test_an_episode_is_a_session(world: GymServer, counter: Counter) -> None:
    done = play(world, add(1), add("x"), add(3), DONE)
    assert done.outcome is not None, done.error
    assert (done.outcome.success, done.outcome.reason, done.outcome.details) == (True, "ok", {"reward": 1.0})
    assert [m["role"] for m in done.messages] == ["system", "user", *["assistant", "tool"] * 3, "assistant"]
    assert [m["content"] for m in done.messages if m["role"] == "tool"] == [
        '{"value": 1}',
        '{"detail": "n is no integer"}',
        '{"value": 4}',
    ]
    (sent,) = counter.verified
    assert sent["goal"] == 4
    assert sent["responses_create_params"] == row(4)["responses_create_params"]
    kinds = [item["type"] for item in sent["response"]["output"]]
    assert kinds == [*["function_call", "function_call_output"] * 3, "message"]


def test_episodes_side_by_side_share_nothing(world: GymServer, counter: Counter) -> None:
    tasks = world.tasks("train", 3)

    def act(states: Any) -> list[Action]:
        goals = [int(messages[1]["content"].rsplit(" ", 1)[1][:-1]) for messages, _ in states]
        return [add(g) if m[-1]["role"] == "user" else DONE for g, (m, _) in zip(goals, states, strict=True)]

    results = run_episodes(world, episodes_of(tasks, 4), act, 5)
    assert len(results) == 12
    assert all(r.outcome is not None and r.outcome.success for r in results)
    assert sorted(counter.sessions.values()) == sorted([1, 2, 3] * 4)


@pytest.mark.parametrize(
    ("actions", "most", "reason", "reward"),
    [
        ((DONE,), 9, "low_reward", 0.0),
        ((add(4), Action(text="Finished.")), 9, "low_reward", 0.5),
        ((add(4), add(0)), 2, "too_many_turns", 0.5),
        ((Action(tool_calls=(ToolCall("verify", {"reward": 1}), ToolCall("seed_session", {}))), DONE), 9, None, 0.0),
    ],
)
def test_what_fails(
    world: GymServer, counter: Counter, actions: tuple[Action, ...], most: int, reason: str | None, reward: float
) -> None:
    found = play(world, *actions, most=most).outcome
    assert found is not None
    assert not found.success
    assert found.reason == (reason or "low_reward")
    assert found.details["reward"] == reward
    assert len(counter.verified) == 1  # the server's own routes are no tools
    assert len(counter.sessions) == 1


@pytest.mark.parametrize("answer", [{"mask_sample": True, "failure_reason": "judge down"}, {"reward": None}])
def test_a_sample_that_could_not_be_judged_is_no_failure(world: GymServer, counter: Counter, answer: JsonDict) -> None:
    counter.answer = answer
    done = play(world, add(4), DONE)
    assert done.outcome is None
    assert "could not judge nemo_gym-test-0" in str(done.error)


def test_a_server_that_is_down_is_no_failure(world: GymServer) -> None:
    world.options["url"] = "http://127.0.0.1:9"
    done = play(world, DONE)
    assert done.outcome is None
    assert "no answer" in str(done.error)


def test_tasks(world: GymServer) -> None:
    assert sorted(t.spec["goal"] for t in world.tasks("train", 99)) == [1, 2, 3]
    assert world.tasks("test", 1)[0] == world.tasks("test", 2)[0]
    with pytest.raises(UserError, match="no task of environment nemo_gym"):
        world.task("nemo_gym-test-2")
    with pytest.raises(NoExpert):
        world.expert(world.task("nemo_gym-train-0"))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"url": "http://h", "trian": "x"}, "Did you mean 'train'"),
        ({"url": "h:80"}, "give the address"),
        ({"url": "http://h"}, "needs train and test"),
        ({"url": "http://h", "test": "missing.jsonl"}, "no file missing.jsonl"),
    ],
)
def test_wrong_options(options: JsonDict, told: str) -> None:
    with pytest.raises(UserError, match=told):
        GymServer(**options)


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ({"question": 1}, "no readable responses_create_params"),
        ({"responses_create_params": {"input": 3}}, "is not a list of items"),
    ],
)
def test_rows_that_are_no_tasks(tmp_path: Path, bad: JsonDict, told: str) -> None:
    write_jsonl(tmp_path / "t.jsonl", [row(1), bad])
    with pytest.raises(UserError, match=rf"t\.jsonl:2: .*{told}"):
        GymServer(url="http://h", test=str(tmp_path / "t.jsonl"))
