"""Measure a verifier on one's own turns before a GPU is spent: what it wrongly rejects, accepts and pays for."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from pivotrl.trajectories.schema import Action, Turn
from pivotrl.verifiers.base import Verdict, Verifier
from pivotrl.verifiers.mutations import BREAKING, EXPLOIT, PRESERVING, PROBE, Mutation, mutations, probes
from pivotrl.verifiers.runner import score_pairs

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
        """Without the examples, which `wrong_verdicts` lists."""
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

    def wrong_verdicts(self) -> Iterator[dict[str, Any]]:
        """The examples that were kept, one row each: {"wrong": "false_positive" | "false_negative", "kind", ...}."""
        for kind in self.kinds:
            wrong = "false_negative" if kind.effect in (DEMONSTRATION, PRESERVING) else "false_positive"
            for example in kind.examples:
                yield {"wrong": wrong, "kind": kind.kind, "effect": kind.effect, **example}

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
    only_truth: bool = False,
    accept_at: float = 0.5,
    examples: int = 3,
) -> AuditReport:
    """Score the demonstration and its mutations for every turn, and compare with what each of them means.

    `truth(turn, action)` (execution from the same state, say) overrides the mutation's own label with True (does the
    same) or False; None keeps the label, or with `only_truth` leaves the action out. A label that is certain stays.
    Changes whose meaning depends on the tool are tried only where the truth tells it. `accept_at`: the reward, in
    (0, 1], from which an action counts as accepted. Keeps up to `examples` wrong verdicts a kind. A VerifierRunner
    scores pairs in its workers.
    """
    if not 0 < accept_at <= 1:
        raise ValueError(f"accept_at is {accept_at}; it must be above 0 and at most 1")
    results: dict[tuple[str, str], KindResult] = {}
    stream, count = iter(turns), 0
    while chunk := list(islice(stream, 32)):
        count += len(chunk)
        work = [(turn, m) for turn in chunk for m in _labelled(turn, truth, only_truth)]
        verdicts = score_pairs(verifier, [(turn, m.action) for turn, m in work])
        for (turn, mutation), verdict in zip(work, verdicts, strict=True):
            kind = (mutation.effect, mutation.kind)
            result = results.setdefault(kind, KindResult(mutation.kind, mutation.effect))
            _record(result, turn, mutation, verdict, accept_at, examples)
    order = [DEMONSTRATION, PRESERVING, BREAKING, EXPLOIT]
    kinds = sorted(results.values(), key=lambda kind: (order.index(kind.effect), kind.kind))
    described = {"name": verifier.name, "version": verifier.version, "config": verifier.config()}
    return AuditReport(described, count, accept_at, kinds)


def _labelled(turn: Turn, truth: Truth | None, only_truth: bool) -> Iterator[Mutation]:
    """What is tried, with the effect that the truth gives it where there is one."""
    tried = [Mutation(DEMONSTRATION, DEMONSTRATION, turn.demonstration), *mutations(turn)]
    for mutation in [*tried, *probes(turn)] if truth else tried:
        same = truth(turn, mutation.action) if truth and not mutation.certain else None
        if same is None:
            if mutation.effect != PROBE and (mutation.certain or not only_truth):
                yield mutation
        elif mutation.effect == DEMONSTRATION:
            yield mutation
        else:
            unlike = EXPLOIT if mutation.effect == EXPLOIT else BREAKING
            yield replace(mutation, effect=PRESERVING if same else unlike)


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
