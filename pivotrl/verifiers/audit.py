"""Measure a verifier on one's own turns before a GPU is spent: what it wrongly rejects, accepts and pays for."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from pivotrl.trajectories.schema import Action, Turn
from pivotrl.verifiers.base import Verdict, Verifier
from pivotrl.verifiers.guard import safe_verify
from pivotrl.verifiers.mutations import BREAKING, EXPLOIT, PRESERVING, Mutation, mutations
from pivotrl.verifiers.runner import VerifierRunner

DEMONSTRATION = "demonstration"
Truth = Callable[[Turn, Action], bool | None]


@dataclass
class KindResult:
    """One kind of mutation: how often it was tried, accepted (reward >= `accept_at`), rejected, unscorable."""

    kind: str
    effect: str
    accepted: int = 0
    rejected: int = 0
    unscorable: int = 0
    reward_sum: float = 0.0
    examples: list[dict[str, Any]] = field(default_factory=list)  # of wrong verdicts

    @property
    def tried(self) -> int:
        return self.accepted + self.rejected + self.unscorable

    @property
    def mean_reward(self) -> float | None:
        scored = self.accepted + self.rejected
        return self.reward_sum / scored if scored else None

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "effect": self.effect,
            "tried": self.tried,
            "accepted": self.accepted,
            "rejected": self.rejected,
            "unscorable": self.unscorable,
            "mean_reward": self.mean_reward,
            "examples": self.examples,
        }


@dataclass
class AuditReport:
    """What `audit` found. Rates are over scorable actions; None where there was none."""

    verifier: dict[str, Any]
    turns: int
    accept_at: float
    kinds: list[KindResult]

    def _sum(self, effects: tuple[str, ...], attribute: str) -> int:
        return sum(getattr(kind, attribute) for kind in self.kinds if kind.effect in effects)

    def _rate(self, effects: tuple[str, ...], wrong: str) -> float | None:
        scored = self._sum(effects, "accepted") + self._sum(effects, "rejected")
        return self._sum(effects, wrong) / scored if scored else None

    @property
    def false_negative_rate(self) -> float | None:
        """Of actions that do the same (the demonstration among them), the share rejected."""
        return self._rate((DEMONSTRATION, PRESERVING), "rejected")

    @property
    def false_positive_rate(self) -> float | None:
        """Of actions that do another thing (exploits among them), the share accepted."""
        return self._rate((BREAKING, EXPLOIT), "accepted")

    @property
    def unscorable_rate(self) -> float | None:
        tried = sum(kind.tried for kind in self.kinds)
        return sum(kind.unscorable for kind in self.kinds) / tried if tried else None

    @property
    def paying_exploits(self) -> list[KindResult]:
        """Exploits that were accepted at least once, the best paid first."""
        paid = [kind for kind in self.kinds if kind.effect == EXPLOIT and kind.accepted]
        return sorted(paid, key=lambda kind: -kind.accepted / kind.tried)

    def to_json(self) -> dict[str, Any]:
        return {
            "verifier": self.verifier,
            "turns": self.turns,
            "accept_at": self.accept_at,
            "false_negative_rate": self.false_negative_rate,
            "false_positive_rate": self.false_positive_rate,
            "unscorable_rate": self.unscorable_rate,
            "paying_exploits": [kind.kind for kind in self.paying_exploits],
            "kinds": [kind.to_json() for kind in self.kinds],
        }

    def table(self) -> str:
        """A Markdown table, one kind a row; wrong verdicts are in the column "wrong"."""
        lines = ["| mutation | effect | tried | accepted | unscorable | mean reward | wrong |", "| --- " * 7 + "|"]
        for kind in self.kinds:
            wrong = kind.rejected if kind.effect in (DEMONSTRATION, PRESERVING) else kind.accepted
            mean = "–" if kind.mean_reward is None else f"{kind.mean_reward:.2f}"
            cells = (kind.kind, kind.effect, kind.tried, kind.accepted, kind.unscorable, mean, wrong)
            lines.append("| " + " | ".join(map(str, cells)) + " |")
        shown = {"FN": self.false_negative_rate, "FP": self.false_positive_rate, "unscorable": self.unscorable_rate}
        rates = ", ".join(f"{k} {'–' if v is None else format(v, '.2%')}" for k, v in shown.items())
        return "\n".join([*lines, "", f"{self.turns} turns: {rates}"])


def audit(
    turns: Iterable[Turn],
    verifier: Verifier,
    *,
    truth: Truth | None = None,
    accept_at: float = 0.5,
    examples: int = 3,
) -> AuditReport:
    """Score the demonstration and its mutations for every turn, and compare with what each of them means.

    `truth(turn, action)` (execution from the same state, say) overrides the mutation's own label with True (does the
    same) or False; None keeps the label. `accept_at`: the reward from which an action counts as accepted, in (0, 1].
    Keeps up to `examples` wrong verdicts a kind. With a VerifierRunner, pairs are scored in its workers.
    """
    if not 0 < accept_at <= 1:
        raise ValueError(f"accept_at is {accept_at}; it must be above 0 and at most 1")
    results: dict[tuple[str, str], KindResult] = {}
    stream, count = iter(turns), 0
    while chunk := list(islice(stream, 32)):
        count += len(chunk)
        work = [(turn, mutation) for turn in chunk for mutation in _tried(turn)]
        for (turn, mutation), verdict in zip(work, _score(verifier, work), strict=True):
            effect = mutation.effect
            same = truth(turn, mutation.action) if truth and effect != DEMONSTRATION else None
            if same is not None:
                effect = PRESERVING if same else (EXPLOIT if effect == EXPLOIT else BREAKING)
            result = results.setdefault((effect, mutation.kind), KindResult(mutation.kind, effect))
            _record(result, turn, mutation, verdict, accept_at, examples)
    order = [DEMONSTRATION, PRESERVING, BREAKING, EXPLOIT]
    kinds = sorted(results.values(), key=lambda kind: (order.index(kind.effect), kind.kind))
    described = {"name": verifier.name, "version": verifier.version, "config": verifier.config()}
    return AuditReport(described, count, accept_at, kinds)


def _tried(turn: Turn) -> Iterator[Mutation]:
    yield Mutation(DEMONSTRATION, DEMONSTRATION, turn.demonstration)
    yield from mutations(turn)


def _score(verifier: Verifier, work: list[tuple[Turn, Mutation]]) -> list[Verdict]:
    if isinstance(verifier, VerifierRunner):
        return verifier.score([(turn, mutation.action) for turn, mutation in work])
    return [safe_verify(verifier, turn, mutation.action) for turn, mutation in work]


def _record(
    result: KindResult, turn: Turn, mutation: Mutation, verdict: Verdict, accept_at: float, examples: int
) -> None:
    if verdict.reward is None:
        result.unscorable += 1
        return
    result.reward_sum = math.fsum((result.reward_sum, verdict.reward))
    accepted = verdict.reward >= accept_at
    if accepted:
        result.accepted += 1
    else:
        result.rejected += 1
    right = accepted == (result.effect in (DEMONSTRATION, PRESERVING))
    if not right and len(result.examples) < examples:
        result.examples.append(
            {
                "turn_id": turn.id,
                "source": turn.source,
                "where": mutation.where,
                "demonstration": _shown(turn.demonstration),
                "action": _shown(mutation.action),
                "reward": verdict.reward,
                "reason": verdict.reason,
            }
        )


def _shown(action: Action) -> str:
    text = json.dumps(action.to_json(), ensure_ascii=False)
    return text if len(text) <= 1000 else text[:1000] + "…"
