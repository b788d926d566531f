"""Run under torchrun by test_rollout_ranks.py: who samples, who verifies, and that all ranks hold the same."""

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

from pivotrl.generation.base import StatefulEngine  # noqa: E402
from pivotrl.generation.data_parallel import gather_groups, share  # noqa: E402
from pivotrl.generation.engine import Completion, OnFinished, Sampling  # noqa: E402
from pivotrl.local_rollouts import LocalRoller, State  # noqa: E402
from pivotrl.policy import agree  # noqa: E402
from pivotrl.refit.layout import EngineLayout  # noqa: E402
from pivotrl.training.aside import ServerHandover  # noqa: E402
from pivotrl.trajectories.schema import Action  # noqa: E402
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
    the_first_rank_samples_for_all()
    agree.wait()
