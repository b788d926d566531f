"""Does the static tool-call verifier agree with execution? `python -m benchmarks.verifier_agreement [--json]`

Every tool-call turn of the recorded tau2 and tau-bench runs ($PIVOTRL_SHARED/data) is mutated; each mutated action and
the demonstration are executed from the recorded state in tau2's environments, and the verdict of `domain=tau2` is held
against what they did. Ends with 1 where false positives reach 1 % or false negatives 5 %.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pivotrl.audit_stage import ExecutionTruth
from pivotrl.configuration import load_config
from pivotrl.trajectories.reader import read_trajectories
from pivotrl.trajectories.schema import Trajectory, Turn
from pivotrl.trajectories.turns import split_turns
from pivotrl.verifiers.audit import DEMONSTRATION, AuditReport, audit
from pivotrl.verifiers.base import Verifier
from pivotrl.verifiers.mutations import PRESERVING
from pivotrl.verifiers.registry import get_verifier

FILES = (
    "tau2/retail_oracle_replay.jsonl",
    "tau2/airline_oracle_replay.jsonl",
    "tau2/gym_rollouts_chat.jsonl",
    "tau_bench/airline_sft.jsonl",
    "tau_bench/airline_sft_compact.jsonl",
    "tau_bench/airline_failed.jsonl",
)
MOST = {"false_positives": 0.01, "false_negatives": 0.05}


@dataclass
class Agreement:
    """Counts of mutated actions whose meaning execution told; the demonstration itself is not among them."""

    source: str
    turns: int = 0
    same: int = 0  # actions that do what the demonstration does
    rejected: int = 0  # of these
    other: int = 0
    accepted: int = 0  # of these
    demonstrations: int = 0
    demonstrations_rejected: int = 0
    seconds: float = 0.0

    def add(self, report: AuditReport) -> None:
        for kind in report.kinds:
            if kind.effect == DEMONSTRATION:
                self.demonstrations += kind.tried
                self.demonstrations_rejected += kind.tried - kind.accepted
            elif kind.effect == PRESERVING:
                self.same += kind.tried
                self.rejected += kind.tried - kind.accepted
            else:
                self.other += kind.tried
                self.accepted += kind.accepted

    @property
    def false_positives(self) -> float:
        return self.accepted / self.other if self.other else 0.0

    @property
    def false_negatives(self) -> float:
        return self.rejected / self.same if self.same else 0.0


def call_turns(path: Path, most: int | None) -> Iterator[Turn]:
    """The tool-call turns of the first `most` trajectories of a file."""
    taken = 0
    for trajectory in read_trajectories(str(path), "auto"):
        if not isinstance(trajectory, Trajectory) or taken == most:
            continue
        taken += 1
        turns = split_turns(trajectory, "train")
        yield from (t for t in turns if isinstance(t, Turn) and t.demonstration.tool_calls)


def agree(
    path: Path, verifier: Verifier, truth: ExecutionTruth, most: int | None
) -> tuple[Agreement, list[dict[str, Any]]]:
    """The counts for one file, and examples of disagreement."""
    started, turns = time.monotonic(), list(call_turns(path, most))
    report = audit(turns, verifier, truth=truth, only_truth=True, examples=4)
    found = Agreement(f"{path.parent.name}/{path.stem}", len(turns))
    found.add(report)
    found.seconds = time.monotonic() - started
    return found, list(report.wrong_verdicts())


def total(rows: list[Agreement]) -> Agreement:
    """The sum of all files."""
    made = Agreement("all")
    for row in rows:
        for name in ("turns", "same", "rejected", "other", "accepted", "demonstrations", "demonstrations_rejected"):
            setattr(made, name, getattr(made, name) + getattr(row, name))
        made.seconds += row.seconds
    return made


def table(rows: list[Agreement]) -> str:
    """A Markdown table, one file a row."""
    lines = [
        "| turns of | tool-call turns | does the same | rejected | does another thing | accepted |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for r in rows:
        lines.append(
            f"| {r.source} | {r.turns} | {r.same} | {r.rejected} ({r.false_negatives:.2%}) "
            f"| {r.other} | {r.accepted} ({r.false_positives:.2%}) |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trajectories", type=int, help="at most this many of each file (default: all)")
    parser.add_argument("--examples", action="store_true", help="print the disagreements, a few of each kind")
    parser.add_argument("--json", action="store_true", help="the figures as JSON on the last line")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides, as domain.verifier.name=strict")
    given = parser.parse_args(arguments)
    data = Path(os.environ.get("PIVOTRL_SHARED", "../shared")) / "data"
    verifier = get_verifier(load_config(["domain=tau2", *given.overrides]).domain.verifier)
    truth = ExecutionTruth("tau2")
    rows: list[Agreement] = []
    wrong: list[dict[str, Any]] = []
    for name in FILES:
        row, examples = agree(data / name, verifier, truth, given.trajectories)
        rows.append(row)
        wrong += examples
    rows.append(total(rows))
    print(table(rows))
    print(f"\nexecuted: {truth.executed} of {truth.asked} actions; not: {dict(truth.reasons) or 'none'}")
    if given.examples:
        for example in wrong:
            print(json.dumps({k: example[k] for k in ("wrong", "kind", "where", "reason", "action")}))
    last = rows[-1]
    if given.json:
        print(json.dumps({"false_positives": last.false_positives, "false_negatives": last.false_negatives}))
    return int(any(getattr(last, name) >= most for name, most in MOST.items()))


if __name__ == "__main__":
    sys.exit(main())
