"""What rollouts cost: the ledger of profiling and training. Pure Python."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pivotrl.io import append_jsonl, end_torn_line
from pivotrl.peers import sum_of_all
from pivotrl.profiling.shards import whole_rows
from pivotrl.rollouts import Rollout, TokenCounts
from pivotrl.verifiers.base import Verifier
from pivotrl.verifiers.runner import take_counts


@dataclass(frozen=True)
class Cost:
    """Rollout turns, tokens and seconds inside the engine. Addition sums every field."""

    rollouts: int = 0  # generated turns: the unit of the paper's comparison (method.md 3.3)
    prompt: int = 0  # tokens asked for, cached ones included; one prompt for each rollout
    cached: int = 0  # of these, served from the engine's prefix cache
    generated: int = 0
    seconds: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.rollouts + other.rollouts,
            self.prompt + other.prompt,
            self.cached + other.cached,
            self.generated + other.generated,
            self.seconds + other.seconds,
        )

    @classmethod
    def of(cls, rollouts: Iterable[Rollout], seconds: float = 0.0) -> Cost:
        return cls(**TokenCounts.of(rollouts).to_json(), seconds=seconds)

    def to_json(self) -> dict[str, float]:
        return asdict(self)


class CostLog:
    """Costs of a profile, appended as they arise, so that those of an interrupted attempt are counted too."""

    def __init__(self, path: Path) -> None:
        self.path = path
        end_torn_line(path)

    def add(self, purpose: str, cost: Cost) -> None:
        append_jsonl(self.path, [{"purpose": purpose, **cost.to_json()}])

    def totals(self) -> dict[str, Cost]:
        """Cost by purpose. A submission whose rollouts were kept and whose row a kill tore or forestalled is lost;
        rollouts that were not kept are counted nowhere."""
        totals: dict[str, Cost] = {}
        for row in whole_rows(self.path):
            purpose = row.pop("purpose")
            totals[purpose] = totals.get(purpose, Cost()) + Cost(**row)
        return totals


class CountLog:
    """What the verifier's runner counted (verdicts, time-outs, cache hits, judge calls), appended as it arises."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, verifier: Verifier) -> None:
        """What was counted since the last call, in all processes of this stage."""
        if counts := sum_of_all(take_counts(verifier)):
            append_jsonl(self.path, [counts])

    def totals(self) -> dict[str, float]:
        """Sums by name, of interrupted attempts too."""
        return added(whole_rows(self.path))


def added(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sum of counts by name, in the order of names; whole numbers stay whole."""
    totals: dict[str, float] = {}
    for row in rows:
        for name, count in row.items():
            totals[name] = totals.get(name, 0) + count
    return {name: int(n) if float(n).is_integer() else round(n, 6) for name, n in sorted(totals.items())}
