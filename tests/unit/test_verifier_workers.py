"""`domain.verifier.workers`: verdicts in processes, for rollouts and rows alike; a hang costs its own pair alone."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from verifier_doubles import act, turn

from pivotrl import cli
from pivotrl.config import Config, VerifierConfig
from pivotrl.generation.engine import Completion, Sampling
from pivotrl.local_rollouts import LocalRoller, State, render_states
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
    """An engine that says a list of texts in turn, `n` for each prompt."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def generate(self, prompts: Any, sampling: Sampling, n: int, seeds: Any) -> list[list[Completion]]:
        made = iter(self.texts)
        return [
            [
                Completion(tuple(map(ord, text)), (0.0,) * len(text), "stop", 0)
                for text in (next(made) for _ in range(n))
            ]
            for _ in prompts
        ]


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
        started = time.monotonic()
        groups = roller.groups(states, 2, list(range(6)))
        assert time.monotonic() - started < 6 * SLOW.timeout_seconds + 20  # of 6 hangs, at most two at a time wait
        assert [[r.verdict.reason for r in group] for group in groups] == [["timeout", "match"]] * 6
        assert [[r.verdict.reward for r in group] for group in groups] == [[None, 1.0]] * 6
        assert [[r.index for r in group] for group in groups] == [[0, 1]] * 6
        assert [group[1].action.text for group in groups] == [f"good {i}" for i in range(6)]
        assert {r.verdict.details.get("pid") for group in groups for r in group} & {os.getpid()} == set()
        pids = descendants(os.getpid()) - before
    left = pids & descendants(os.getpid())
    assert not left, left


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
