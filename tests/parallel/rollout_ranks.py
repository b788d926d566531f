"""Run under torchrun by test_rollout_ranks.py: who samples, verifies and plays, and that all ranks hold the same."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from verifier_doubles import Scripted, act, turn  # noqa: E402

from pivotrl.environments.base import Outcome, Task  # noqa: E402
from pivotrl.environments.rollout import EpisodeResult  # noqa: E402
from pivotrl.evaluation.in_domain import EngineActor, play_together  # noqa: E402
from pivotrl.generation.base import StatefulEngine  # noqa: E402
from pivotrl.generation.data_parallel import gather_groups, share  # noqa: E402
from pivotrl.generation.engine import Completion, OnFinished, Sampling  # noqa: E402
from pivotrl.generation.scripted import ScriptedEngine  # noqa: E402
from pivotrl.local_rollouts import LocalRoller, State  # noqa: E402
from pivotrl.policy import agree  # noqa: E402
from pivotrl.refit.layout import EngineLayout  # noqa: E402
from pivotrl.training.aside import ServerHandover  # noqa: E402
from pivotrl.trajectories.schema import Action, JsonDict  # noqa: E402
from pivotrl.verifiers.runner import VerifierRunner  # noqa: E402

TEXTS = [[f"text {i} {k}" for k in range(2)] for i in range(5)]


class Pair(StatefulEngine):
    """Two engines of one rank each, which say TEXTS."""

    layout = EngineLayout(engines=2)

    def generate(
        self, prompts: Any, sampling: Sampling, n: int, seeds: Any, on_finished: OnFinished | None = None
    ) -> list[list[Completion]]:
        mine = share(range(len(prompts)), agree.rank(), 2)

        def sample() -> list[list[Completion]]:
            groups: list[list[Completion]] = [[] for _ in prompts]
            for i in mine:
                for k in range(n):
                    ids = tuple(map(ord, TEXTS[i][k]))
                    groups[i].append(Completion(ids, (0.0,) * len(ids), "stop", 0))
                    assert on_finished is not None
                    on_finished(i, k, groups[i][k])
            return groups

        return gather_groups(len(prompts), mine, sample)


class Letters:
    def parse(self, ids: Sequence[int], tools: Sequence[Any] = ()) -> Action:
        return Action("".join(map(chr, ids)))


class Broken(Letters):
    def parse(self, ids: Sequence[int], tools: Sequence[Any] = ()) -> Action:
        if agree.rank() == 1:
            raise ValueError("rank 1 cannot read this")
        return super().parse(ids, tools)


def each_rollout_is_verified_once() -> None:
    states = [State(turn(act(text="x"), id=f"t{i}#0"), (1, 2)) for i in range(5)]
    with VerifierRunner(Scripted, workers=1, timeout_seconds=120) as runner:
        groups = LocalRoller(Pair(), Letters(), runner, Sampling()).groups(states, 2, range(5))  # type: ignore[arg-type]
        counted = runner.metrics()["pairs"]
        assert [[r.action.text for r in group] for group in groups] == TEXTS
        everyone = agree.everyone([[r.to_json() for r in group] for group in groups])
        assert everyone[0] == everyone[1]
        assert agree.everyone(counted) == [4, 6]  # 2 and 3 of 5 prompts
        pids = {r.verdict.details["pid"] for group in groups for r in group}
        assert len(pids) == 2 and os.getpid() not in pids
        try:
            LocalRoller(Pair(), Broken(), runner, Sampling()).groups(states, 2, range(5))  # type: ignore[arg-type]
        except ValueError as error:
            assert str(error) == "rank 1 cannot read this"  # on both ranks
        else:
            raise AssertionError("the error of one rank was lost")


class Chat(Letters):
    def prompt_ids(self, messages: Sequence[JsonDict], tools: Sequence[Any]) -> list[int]:
        if messages[0]["content"] == "unreadable" and agree.rank() == 1:
            raise ValueError("rank 1 cannot render this")
        return [len(messages), *map(ord, messages[0]["content"])]


class Moody:
    """A world whose user says in which process it lives, and talks longer in the second one."""

    name, version = "moody", "0"

    def __init__(self, alike: bool = False) -> None:
        self.alike, self.begun = alike, 0

    def reset(self, task: Task, max_turns: int) -> Talk:
        self.begun += 1
        return Talk(task.id, 2 if self.alike else 1 + 2 * agree.rank(), "me" if self.alike else str(os.getpid()))


class Talk:
    def __init__(self, text: str, turns: int, name: str) -> None:
        self.tools: list[JsonDict] = []
        self.messages: list[JsonDict] = [{"role": "user", "content": text}]
        self.left, self.name = turns, name

    @property
    def done(self) -> bool:
        return self.left == 0

    def step(self, action: Action) -> None:
        self.left -= 1
        self.messages += [{"role": "assistant", "content": action.text}, {"role": "user", "content": self.name}]

    def outcome(self) -> Outcome:
        return Outcome(True, "ok", {})


def each_episode_is_played_once() -> None:
    tasks = [Task(f"task {i}", "f") for i in range(5)]
    asked: list[tuple[tuple[int, ...], int]] = []

    def script(prompt: Sequence[int], k: int, seed: int) -> list[int]:
        asked.append((tuple(prompt), seed))
        return [65 + seed % 26]

    def play(world: Any, chosen: Sequence[Task] = tasks) -> tuple[list[EpisodeResult], EngineActor]:
        actor = EngineActor(ScriptedEngine(script), Chat(), Sampling(max_new_tokens=4), 64, 0)  # type: ignore[arg-type]
        return play_together(world, chosen, actor, max_turns=4, trials=2), actor

    world = Moody()
    results, actor = play(world)
    assert agree.everyone(world.begun) == [5, 5]
    everyone = agree.everyone([(r.task.id, r.trial, r.messages) for r in results])
    assert everyone[0] == everyone[1]
    assert [(r.task.id, r.trial) for r in results] == [(t.id, k) for t in tasks for k in range(2)]
    names = [{m["content"] for m in r.messages[2::2]} for r in results]
    assert all(len(n) == 1 for n in names) and len(set.union(*names)) == 2
    assert [r.turns for r in results] == [1] * 5 + [3] * 5
    assert actor.spent.rollouts == actor.validity.turns == 20
    # the same prompts, seeds and episodes as one process alone has
    asked.clear()
    shared, together = play(Moody(alike=True))[0], list(asked)
    asked.clear()
    os.environ["WORLD_SIZE"] = "1"
    assert play(Moody(alike=True))[0] == shared and asked == together
    os.environ["WORLD_SIZE"] = "2"
    try:
        play(world, [Task("fine", "f"), Task("unreadable", "f")])
    except ValueError as error:
        assert str(error) == "rank 1 cannot render this"  # on both ranks
    else:
        raise AssertionError("the error of one rank was lost")


class Server(StatefulEngine):
    def _sleep(self, discard_weights: bool) -> None: ...

    def _wake(self) -> None: ...

    def _load(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        list(weights)


class Trainer:
    memory = None

    def weights_for(self, layout: EngineLayout) -> Iterator[tuple[str, int]]:
        yield "w", 1


def the_first_rank_samples_for_all() -> None:
    handover, engine, calls = ServerHandover(Trainer(), 3, ahead=True), Server(), []

    def sample(step: int) -> list[int]:
        calls.append(step)
        if step == 2:
            raise ValueError("the server is gone")
        return [step, os.getpid()]

    handover.begin(engine, 0, lambda: None)
    found = [handover.rollouts(engine, sample, 0)]
    handover.settle()
    handover.to_engine(engine, 1)
    found.append(handover.rollouts(engine, sample, 1))
    assert agree.everyone(found) == [found, found] and [f[0] for f in found] == [0, 1]
    try:
        handover.settle()
    except ValueError as error:
        assert str(error) == "the server is gone"
    else:
        raise AssertionError("the error of the sampling rank was lost")
    assert agree.everyone(calls) == [[0, 1, 2], []]


if __name__ == "__main__":
    agree.join()
    each_rollout_is_verified_once()
    each_episode_is_played_once()
    the_first_rank_samples_for_all()
    agree.wait()
