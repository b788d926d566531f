"""The shell environment: tasks, expert, sandboxed episodes, and equivalence by execution in it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from pivotrl.config import VerifierConfig
from pivotrl.environments import registry
from pivotrl.environments.base import Outcome, Task
from pivotrl.environments.equivalence import action_of, replay
from pivotrl.environments.registry import draw_tasks, get_environment
from pivotrl.environments.rollout import episodes_of, run_episodes
from pivotrl.environments.shell_tasks import machine
from pivotrl.environments.shell_tasks.tasks import FAMILIES, MAKER
from pivotrl.errors import UserError
from pivotrl.trajectories.schema import Action, ToolCall, Turn
from pivotrl.trajectories.turns import split_turns
from pivotrl.verifiers import sandbox
from pivotrl.verifiers.registry import get_verifier

needs_sandbox = pytest.mark.skipif(sandbox.unusable() is not None, reason=str(sandbox.unusable()))
TRAIN, TEST = MAKER.tasks("train", 210, 0), MAKER.tasks("test", 70, 0)


def bash(command: str) -> Action:
    return Action(tool_calls=(ToolCall("bash", {"command": command}),))


def task_of(family: str, tasks: list[Task] = TRAIN, number: int = 0) -> Task:
    return [t for t in tasks if t.family == family][number]


@pytest.fixture(scope="module")
def environment() -> Any:
    return get_environment("shell_tasks")


def play(environment: Any, task: Task, *actions: Action, max_turns: int = 6) -> Any:
    episode = environment.reset(task, max_turns)
    for action in actions:
        episode.step(action)
    return episode


# Tasks


def test_families_have_equal_shares_and_a_prefix_is_stable() -> None:
    assert Counter(task.family for task in TRAIN) == dict.fromkeys(FAMILIES, 30)
    assert MAKER.tasks("train", 10, 0) == TRAIN[:10]
    assert MAKER.task(TRAIN[33].id) == TRAIN[33]
    for wrong in ("outfitters-train-0-1", "shell_tasks-dev-0-1", "shell_tasks-train-0", ""):
        with pytest.raises(UserError, match="shell_tasks"):
            MAKER.task(wrong)
    with pytest.raises(UserError, match="dev"):
        MAKER.tasks("dev", 1, 0)


def test_train_and_test_share_no_file_name_and_no_task() -> None:
    names = [{name for task in tasks for name in task.spec["files"]} for tasks in (TRAIN, TEST)]
    assert not names[0] & names[1]
    assert len({str(task.spec) for task in [*TRAIN, *TEST]}) == len(TRAIN) + len(TEST)


def test_every_task_asks_for_a_change_or_an_answer() -> None:
    for task in [*TRAIN, *TEST]:
        kept = {n: c for n, c in task.spec["files"].items() if not n.endswith("/")}
        assert (task.spec["goal"] == task.spec["files"]) is (task.spec["answer"] is not None)
        assert task.spec["answer"] is not None or task.spec["goal"] != kept


# Episodes


@needs_sandbox
def test_the_expert_solves_every_family_in_several_ways(environment: Any) -> None:
    ways: dict[str, set[str]] = {}
    for family in FAMILIES:
        for number, tasks in ((1, TRAIN), (0, TEST)):
            trajectory = environment.expert(task_of(family, tasks, number))
            assert trajectory.meta["family"] == family
            assert 2 <= sum(m["role"] == "assistant" for m in trajectory.messages) <= 4
        task = task_of(family)
        for run in range(4):
            calls = [c for m in environment.expert(task, run).messages for c in m.get("tool_calls", ())]
            ways.setdefault(family, set()).add(" ; ".join(c["arguments"]["command"] for c in calls))
    assert {family: len(found) > 1 for family, found in ways.items()} == dict.fromkeys(FAMILIES, True)


@needs_sandbox
def test_other_right_ways_succeed_and_wrong_ones_say_why(environment: Any) -> None:
    def reason(task: Task, *actions: Action) -> str:
        return str(play(environment, task, *actions).outcome().reason)

    task = task_of("sort_unique")
    source, target = task.spec["ask"]["source"], task.spec["ask"]["target"]
    done = Action(text="Done.")
    assert reason(task, bash(f"awk '!s[$0]++' {source} | sort > {target}"), done) == "ok"
    assert reason(task, bash(f"sort {source} > {target}"), done) == "wrong_content"
    assert reason(task, bash(f"sort -u {source} > {target}; touch more"), done) == "surplus_file"
    assert reason(task, bash(f"mv {source} {target}"), done) == "file_lost"
    assert reason(task, bash("ls"), done) == "nothing_done"
    assert reason(task, done) == "nothing_done"
    assert reason(task, *[bash("ls")] * 9) == "too_many_turns"
    assert reason(task, bash(f"sort -u {source} > {target}")) == "unfinished"
    move = task_of("move_files")
    assert reason(move, bash("rm -rf *"), done) == "file_lost"


@needs_sandbox
def test_an_answer_must_be_looked_up_and_be_one(environment: Any) -> None:
    task = task_of("count_matches")
    path, word, right = task.spec["ask"]["path"], task.spec["ask"]["word"], task.spec["answer"]
    look = bash(f"grep -c {word} {path}")

    def reason(text: str, *before: Action) -> str:
        return str(play(environment, task, *before, Action(text=text)).outcome().reason)

    assert reason(f"There are {right}.", look) == "ok"
    assert reason(f"{path} has {right} of them.", bash(f"cat {path}")) == "ok"  # counted by eye
    assert reason(f"There are {right}.") == "answer_not_looked_up"
    assert reason("1 2 3 4 5 6 7 8", look) == "wrong_answer"
    assert reason("Some.", look) == "wrong_answer"
    found = task_of("find_file")
    everything = " ".join(found.spec["files"])
    episode = play(environment, found, bash(f"ls {found.spec['ask']['directory']}"), Action(text=everything))
    assert episode.outcome().reason == "wrong_answer"


@needs_sandbox
def test_states_go_on_from_command_to_command(environment: Any) -> None:
    task = task_of("count_matches")
    episode = play(environment, task)
    before = episode.state_hash()
    episode.step(bash("mkdir -p a/b && echo 'echo hi' > a/run.sh && chmod +x a/run.sh && ln -s run.sh a/link"))
    assert episode.state_hash() != before
    episode.step(bash("test -d a/b && ./a/link; pwd"))
    assert '"out":"hi\\n/work"' in episode.messages[-1]["content"]
    episode.step(bash("rm -r a"))
    assert episode.state_hash() == before
    episode.step(bash("nonsense --please"))
    assert '"exit":127' in episode.messages[-1]["content"]
    assert '"error":' in episode.messages[-1]["content"]


@needs_sandbox
def test_any_action_is_answered(environment: Any) -> None:
    strange = [
        Action(text="  "),
        Action(text="x", problems=("unclosed",)),
        Action(tool_calls=(ToolCall("python", {"code": "1"}),)),
        Action(tool_calls=(ToolCall("bash", {"command": 3}),)),
        Action(tool_calls=(ToolCall("bash", {"command": "ls", "shell": "zsh"}),)),
        Action(tool_calls=(ToolCall("bash", {"command": "echo \0"}),)),
        Action(tool_calls=(ToolCall("bash", {"command": "touch y"}),), problems=("broken",)),
        bash("seq 1 100000"),
    ]
    episode = play(environment, task_of("find_file"), max_turns=20)
    before = episode.state_hash()
    for action in strange:
        episode.step(action)
        assert episode.messages[-1]["role"] in ("user", "tool")
        assert len(episode.messages[-1]["content"]) < 900
    assert episode.state_hash() == before
    assert not episode.done


@needs_sandbox
def test_loops_and_waits_end(environment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "LIMITS", sandbox.Limits(seconds=1.0, cpu_seconds=1))
    episode = play(environment, task_of("find_file"), bash("sleep 30"))
    assert "timed out" in episode.messages[-1]["content"]


@needs_sandbox
def test_a_broken_sandbox_is_an_error_and_no_failure(environment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = sandbox.Effect(125, b"", b"no space left", {})
    monkeypatch.setattr(sandbox, "run", lambda *_: broken)
    found = episodes_of([task_of("find_file")])
    results = run_episodes(environment, found, lambda states: [bash("ls -R .")], max_turns=3)
    assert results[0].outcome is None
    assert "no space left" in str(results[0].error)


def test_without_a_sandbox_the_environment_refuses_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "unusable", lambda: "bwrap is not installed")
    with pytest.raises(UserError, match="bwrap is not installed"):
        get_environment("shell_tasks")


# Verification by execution


@needs_sandbox
def test_equivalence_by_execution(environment: Any) -> None:
    trajectories = [environment.expert(task_of(family), 1) for family in FAMILIES]
    turns = [t for trajectory in trajectories for t in split_turns(trajectory, "train") if isinstance(t, Turn)]
    verifier = get_verifier(VerifierConfig("execution", {"environment": "shell_tasks"}))
    assert {verifier.verify(t, t.demonstration).reward for t in turns} == {1.0}
    assert {verifier.verify(t, bash("true")).reward for t in turns} == {0.0}
    counting = next(t for t in turns if "count" in t.task_id or t.task_id == task_of("count_matches").id)
    ask = task_of("count_matches").spec["ask"]
    other_way = bash(f"awk '/{ask['word']}/ {{n++}} END {{print n}}' {ask['path']}")
    assert verifier.verify(counting, other_way).reward == 1.0
    last = [t for t in turns if t.task_id == counting.task_id][-1]
    answer = task_of("count_matches").spec["answer"]
    assert verifier.verify(last, Action(text=f"The count is {answer}")).reward == 1.0
    assert verifier.verify(last, Action(text="The count is 99")).reward == 0.0
    edited = replace(last, id="edited", messages=[*last.messages[:-1], {**last.messages[-1], "content": "{}"}])
    assert verifier.verify(edited, edited.demonstration).reason == "not_replayable"


@needs_sandbox
def test_a_recorded_episode_replays(environment: Any) -> None:
    trajectory = environment.expert(task_of("move_files", number=2))
    for i, message in enumerate(trajectory.messages):
        if message["role"] == "assistant":
            episode = replay(environment, trajectory.task_id, trajectory.messages[:i])
            episode.step(action_of(message))
    assert episode.outcome() == Outcome(True, "ok", {"turns": episode.turns})


# Registry


class Tiny:
    """An environment of a user's, by import path."""

    name, version = "tiny", "1"

    def tasks(self, split: str, count: int, seed: int = 0) -> list[Task]:
        return [Task(f"{split}-{i}", "one") for i in range(count)]

    def task(self, task_id: str) -> Task:
        return Task(task_id, "one")

    def reset(self, task: Task, max_turns: int) -> Any:
        raise NotImplementedError

    def expert(self, task: Task, run: int = 0) -> Any:
        raise NotImplementedError


def test_environments_by_import_path() -> None:
    found = get_environment("tests.unit.test_shell_tasks:Tiny")
    assert [t.id for t in draw_tasks(found, "train", 2, 0)] == ["train-0", "train-1"]
    for wrong, message in (
        ("outfiters", "known: nemo_gym, openenv, outfitters, shell_tasks, tau2"),
        ("no.such.module:X", "cannot be imported"),
        ("tests.unit.test_shell_tasks:Missing", "cannot be imported"),
        ("tests.unit.test_shell_tasks:bash_environment", "lacks name, version, tasks, task, reset, expert"),
    ):
        with pytest.raises(UserError, match=message):
            get_environment(wrong)
    assert registry.get_environment("outfitters").name == "outfitters"


def bash_environment() -> object:
    return object()
