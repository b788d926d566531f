"""The `audit-verifier` stage: run_dir/turns -> run_dir/audit/{summary.json,examples.jsonl}, and a table to read."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pivotrl.config import Config, VerifierConfig
from pivotrl.errors import UserError
from pivotrl.io import write_json, write_jsonl
from pivotrl.profiling.profiler import draw_turns
from pivotrl.trajectories.schema import Action, Turn
from pivotrl.trajectories.turn_lines import turns_in
from pivotrl.verifiers.audit import audit
from pivotrl.verifiers.base import Verifier
from pivotrl.verifiers.registry import get_verifier
from pivotrl.verifiers.runner import open_verifier

LABELS, AUTO = "labels", "auto"


def run_audit(cfg: Config, run_dir: Path) -> dict[str, Any]:
    """Audit the domain's verifier on turns of every split; writes the summary last and returns it.

    Raises `UserError` where no turns have been cut, and for a truth that cannot be had.
    """
    started, out = time.monotonic(), run_dir / "audit"
    path = run_dir / "turns" / "turns.jsonl"
    if not path.is_file():
        raise UserError(f"{path} does not exist: give trajectories.path=FILE, or run `pivotrl turns` first")
    turns = draw_turns(list(turns_in(path)), cfg.audit.max_turns, cfg.seed)
    with ExitStack() as stack:
        verifier = open_verifier(cfg.domain.verifier, stack)
        truth = find_truth(cfg, verifier, turns)
        report = audit(turns, verifier, truth=truth, accept_at=cfg.audit.accept_at, examples=cfg.audit.examples)
    write_jsonl(out / "examples.jsonl", report.wrong_verdicts())
    told = {"by": LABELS} if truth is None else truth.to_json()
    summary = {**report.to_json(), "truth": told, "seconds": round(time.monotonic() - started, 3)}
    write_json(out / "summary.json", summary)
    print(report.table() + "\n" + _truth_line(told), flush=True)
    return summary


def _truth_line(told: dict[str, Any]) -> str:
    if told["by"] == LABELS:
        return "Ground truth: the labels of the mutations (nothing was executed)."
    why = ", ".join(f"{reason} {count}" for reason, count in told["not_executed"].items())
    kept = f"; labels for the rest ({why})" if why else ""
    return f"Ground truth: execution in {told['by']} for {told['executed']} of {told['asked']} actions{kept}."


class ExecutionTruth:
    """Whether an action does what the demonstration does, by running both; None where that cannot be told."""

    def __init__(self, environment: str) -> None:
        self.verifier = get_verifier(VerifierConfig("execution", {"environment": environment}))
        self.environment = environment
        self.asked = self.executed = 0
        self.reasons: Counter[str] = Counter()

    def __call__(self, turn: Turn, action: Action) -> bool | None:
        self.asked += 1
        verdict = self.verifier.verify(turn, action)
        if verdict.reward is None:
            self.reasons[verdict.reason] += 1
            return None
        self.executed += 1
        return verdict.reward == 1.0

    def to_json(self) -> dict[str, Any]:
        """{"by": environment, "asked": actions, "executed": actions, "not_executed": {reason: actions}}."""
        reasons = dict(sorted(self.reasons.items()))
        return {"by": self.environment, "asked": self.asked, "executed": self.executed, "not_executed": reasons}


def find_truth(cfg: Config, verifier: Verifier, turns: Iterable[Turn]) -> ExecutionTruth | None:
    """The ground truth that `audit.truth` asks for; None: the mutations' own labels.

    "auto" takes the run's environment, else tau2 where it is installed and knows a turn's tools. A verifier that
    executes there itself is measured against the labels: against execution it could not be wrong.
    """
    wanted = cfg.audit.truth
    if wanted == LABELS:
        return None
    if wanted != AUTO:
        return ExecutionTruth(wanted)
    name = cfg.environment.name or ("tau2" if _of_tau2(turns) else None)
    if name is None or (verifier.name == "execution" and verifier.config()["environment"] == name):
        return None
    return ExecutionTruth(name)


def _of_tau2(turns: Iterable[Turn]) -> bool:
    from pivotrl.environments.tau2 import Tau2

    try:
        tau2 = Tau2()
    except UserError:  # the extra is not installed
        return False
    for turn in turns:
        try:
            tau2.domain_of(turn)
        except UserError:
            continue
        return True
    return False
