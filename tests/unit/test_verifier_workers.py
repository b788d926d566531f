"""`domain.verifier.workers`: verdicts in processes, for rollouts and rows alike; a hang costs its own pair alone."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from verifier_doubles import Scripted, act, turn

from pivotrl import cli
from pivotrl.config import Config, VerifierConfig
from pivotrl.generation.engine import Completion, OnFinished, Sampling
from pivotrl.local_rollouts import LocalRoller, State, render_states
from pivotrl.refit.layout import EngineLayout
from pivotrl.stages import STAGES
from pivotrl.trajectories.schema import Action
from pivotrl.verifiers.rows import verify_rows
from pivotrl.verifiers.runner import VerifierRunner, open_verifier
from pivotrl.verifiers.worker_process import descendants

SLOW = VerifierConfig("verifier_doubles:FromOptions", workers=2, timeout_seconds=1.0)


class Letters:
    def prompt_ids(self, messages: Any, tools: Any) -> list[int]:
        return [1, 2]

    def parse(self, ids: Sequence[int], tools: Sequence[Any] = ()) -> Action:
        return Action("".join(map(chr, ids)))


class Says:
    """An engine that says a list of texts in turn, `n` for each prompt; after each it calls `then`."""

    layout = EngineLayout()

    def __init__(self, *texts: str, then: Callable[[], None] = lambda: None) -> None:
        self.texts, self.then = texts, then

    def generate(
        self, prompts: Any, sampling: Sampling, n: int, seeds: Any, on_finished: OnFinished
    ) -> list[list[Completion]]:
        made = [Completion(tuple(map(ord, t)), (0.0,) * len(t), "stop", 0) for t in self.texts]
        for place in reversed(range(len(made))):  # the last is ready first
            on_finished(*divmod(place, n), made[place])
            self.then()
        return [made[i * n : (i + 1) * n] for i in range(len(prompts))]


def test_no_workers_is_in_process():
    found = open_verifier(VerifierConfig("verifier_doubles:FromOptions"))
    assert isinstance(found, VerifierRunner) and found.workers == 0
    assert found.verify(turn(act(text="x")), act(text="y")).details["pid"] == os.getpid()


def test_rollouts_of_all_states_wait_together():
    before = descendants(os.getpid())
    with open_verifier(SLOW) as runner:
        states = [State(turn(act(text=f"s{i}"), id=f"t{i}#0"), (1, 2)) for i in range(6)]
        texts = [text for i in range(6) for text in ("hang", f"good {i}")]
        roller = LocalRoller(Says(*texts), Letters(), runner, Sampling())  # type: ignore[arg-type]
        groups = roller.groups(states, 2, list(range(6)))
        assert [[r.verdict.reason for r in group] for group in groups] == [["timeout", "match"]] * 6
        assert [[r.verdict.reward for r in group] for group in groups] == [[None, 1.0]] * 6
        assert [[r.index for r in group] for group in groups] == [[0, 1]] * 6
        assert [group[1].action.text for group in groups] == [f"good {i}" for i in range(6)]
        assert {r.verdict.details.get("pid") for group in groups for r in group} & {os.getpid()} == set()
        pids = descendants(os.getpid()) - before
    left = pids & descendants(os.getpid())
    assert not left, left


def test_rollouts_are_scored_while_others_are_sampled(tmp_path: Path):
    """The engine goes on only when the verdict of what it has finished is being made: it would wait for ever else."""
    seen: list[bool] = []

    def wait() -> None:
        path, deadline = tmp_path / str(len(seen)), time.monotonic() + 60
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        seen.append(path.exists())

    texts = [f"touch {tmp_path / str(i)}" for i in reversed(range(4))]
    states = [State(turn(act(text=f"s{i}"), id=f"t{i}#0"), (1, 2)) for i in range(2)]
    with VerifierRunner(Scripted, workers=1, timeout_seconds=60) as runner:
        roller = LocalRoller(Says(*texts, then=wait), Letters(), runner, Sampling())  # type: ignore[arg-type]
        groups = roller.groups(states, 2, [0, 1])
    assert seen == [True] * 4
    assert [r.action.text for group in groups for r in group] == texts
    assert all(r.verdict.reward == 1.0 for group in groups for r in group)


def test_a_failed_submission_ends_what_is_being_scored():
    def fail() -> None:
        raise RuntimeError("the engine broke")

    states = [State(turn(act(text="s"), id="t#0"), (1, 2))]
    before = descendants(os.getpid())
    with VerifierRunner(Scripted, workers=1, timeout_seconds=60) as runner:
        assert runner.score([(states[0].turn, act(text="warm"))])[0].reward == 1.0
        roller = LocalRoller(Says("hang", then=fail), Letters(), runner, Sampling())  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="the engine broke"):
            roller.groups(states, 1, [0])
        assert runner.score([(states[0].turn, act(text="again"))])[0].reward == 1.0
        assert len(descendants(os.getpid()) - before) == 1  # the one that hung is gone

    class Broken(Letters):
        def parse(self, ids: Sequence[int], tools: Sequence[Any] = ()) -> Action:
            raise ValueError("no such token")

    with VerifierRunner(Scripted, workers=1, timeout_seconds=60) as runner:
        roller = LocalRoller(Says("a"), Broken(), runner, Sampling())  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="no such token"):
            roller.groups(states, 1, [0])


def test_demonstrations_are_checked_in_the_workers_too():
    with open_verifier(SLOW) as runner:
        turns = [turn(act(text="hang"), id="h#0"), turn(act(text="fine"), id="f#0")]
        states, skipped = render_states(turns, Letters(), runner, 100, 10)  # type: ignore[arg-type]
    assert [s.turn.id for s in states] == ["f#0"]
    assert [(s.turn_id, s.reason, s.detail) for s in skipped] == [("h#0", "demonstration_unscorable", "timeout")]


def test_rows():
    expected = {"role": "assistant", "content": "x"}
    rows: list[Any] = [{"id": i, "expected": expected, "completion": text} for i, text in enumerate(["hang", "good"])]
    found = list(verify_rows([*rows, "no row"], SLOW))
    assert [(r.get("id"), r["reward"], r["reason"]) for r in found] == [
        (0, None, "timeout"),
        (1, 1.0, "match"),
        (None, None, "bad_row"),
    ]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    row = {"expected": {"role": "assistant", "content": "x"}, "completion": "hang"}
    (tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n")
    overrides = ("domain.verifier.name=verifier_doubles:FromOptions", "domain.verifier.workers=1")
    code = cli.main(
        [
            *("verify", "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")),
            *overrides,
            "domain.verifier.timeout_seconds=0.5",
        ]
    )
    assert code == 0
    assert json.loads((tmp_path / "out.jsonl").read_text())["reason"] == "timeout"


def test_workers_change_no_result():
    """They may change on resume, and no profile depends on them."""
    from pivotrl.configuration import subset

    few, many = Config(), Config()
    many.domain.verifier.workers, many.domain.verifier.timeout_seconds = 8, 5.0
    assert all(subset(few, stage) == subset(many, stage) for stage in STAGES)
