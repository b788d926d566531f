"""Verifiers made of verifiers: `first`, `all` and `weighted` over named members.

    options:
      members:
        - {name: tool_calls, options: {...}}
        - {name: judge, options: {...}, weight: 0.5}    # weight: only for `weighted`

In all three an unscorable member stays unscorable unless the others settle the matter whatever it would have said.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from pivotrl.errors import UserError
from pivotrl.trajectories.schema import Action, Turn
from pivotrl.verifiers.base import Verdict, Verifier
from pivotrl.verifiers.guard import safe_verify
from pivotrl.verifiers.options import one_of, read_options

Build = Callable[[str, dict[str, Any]], Verifier]


def _from_registry(name: str, options: dict[str, Any]) -> Verifier:
    from pivotrl.config import VerifierConfig
    from pivotrl.verifiers.registry import get_verifier  # the registry knows this module, so not at import

    return get_verifier(VerifierConfig(name, options))


def _described(member: Verifier) -> dict[str, Any]:
    return {"name": member.name, "version": member.version, "config": member.config()}


class _Composite:
    name = ""
    version = "1"
    member_keys: tuple[str, ...] = ("name", "options")
    own_defaults: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, options: dict[str, Any], build: Build = _from_registry) -> None:
        self.options = read_options(self.name, options, {"members": [], **self.own_defaults})
        rows = list(self.options["members"])
        if not rows:
            raise UserError(f"verifier {self.name}: option 'members' is empty; name at least one verifier.")
        self.members: list[Verifier] = []
        for i, row in enumerate(rows):
            if not hasattr(row, "keys") or "name" not in row or set(row) - set(self.member_keys):
                raise UserError(
                    f"verifier {self.name}: members[{i}] is {row!r}; it must be an object with the keys "
                    f"{', '.join(self.member_keys)} and no other."
                )
            self.members.append(build(row["name"], dict(row.get("options") or {})))
        self.rows = rows
        self.ignores_thinking = all(getattr(member, "ignores_thinking", False) for member in self.members)

    def config(self) -> dict[str, Any]:
        own = {key: self.options[key] for key in self.own_defaults}
        return {**own, "members": [_described(member) for member in self.members]}

    @staticmethod
    def _details(said: list[tuple[str, Verdict]]) -> dict[str, Any]:
        """What each asked member said, and the sum of their counts (a judge's tokens)."""
        details: dict[str, Any] = {
            "members": [{"name": n, "reward": v.reward, "reason": v.reason, "details": v.details} for n, v in said]
        }
        counts: dict[str, float] = {}
        for _, verdict in said:
            for key, value in (verdict.details.get("counts") or {}).items():
                counts[key] = counts.get(key, 0) + value
        return {**details, "counts": counts} if counts else details


class First(_Composite):
    """The first member that settles it, in order; later members are not asked (a judge goes last).

    `settles: scored` (default): the first reward that is not None. `settles: accepted`: the first reward of 1; without
    one, unscorable if any member was, else the highest reward.
    """

    name = "first"
    own_defaults = {"settles": "scored"}  # noqa: RUF012

    def __init__(self, options: dict[str, Any], build: Build = _from_registry) -> None:
        super().__init__(options, build)
        one_of(self.name, "settles", self.options["settles"], ("scored", "accepted"))

    def verify(self, turn: Turn, action: Action) -> Verdict:
        accept = self.options["settles"] == "accepted"
        said: list[tuple[str, Verdict]] = []
        for member in self.members:
            verdict = safe_verify(member, turn, action)
            said.append((member.name, verdict))
            if verdict.reward is not None and (not accept or verdict.reward == 1.0):
                return Verdict(verdict.reward, verdict.reason, self._details(said))
        unscorable = [v for _, v in said if v.reward is None]
        decider = unscorable[-1] if unscorable else max((v for _, v in said), key=lambda v: v.reward or 0.0)
        return Verdict(decider.reward, decider.reason, self._details(said))


class All(_Composite):
    """The lowest reward of all members. A 0 settles it at once; otherwise one unscorable member makes it unscorable."""

    name = "all"

    def verify(self, turn: Turn, action: Action) -> Verdict:
        said: list[tuple[str, Verdict]] = []
        for member in self.members:
            verdict = safe_verify(member, turn, action)
            said.append((member.name, verdict))
            if verdict.reward == 0.0:
                return Verdict(0.0, verdict.reason, self._details(said))
        unscorable = [v for _, v in said if v.reward is None]
        decider = unscorable[0] if unscorable else min((v for _, v in said), key=lambda v: v.reward or 0.0)
        return Verdict(decider.reward, decider.reason, self._details(said))


class Weighted(_Composite):
    """The mean of the members' rewards by `weight` (default 1, above 0). One unscorable member makes it unscorable."""

    name = "weighted"
    member_keys = ("name", "options", "weight")

    def __init__(self, options: dict[str, Any], build: Build = _from_registry) -> None:
        super().__init__(options, build)
        self.weights = [row.get("weight", 1.0) for row in self.rows]
        for i, weight in enumerate(self.weights):
            if type(weight) not in (int, float) or not (0 < weight < math.inf):
                raise UserError(f"verifier weighted: members[{i}].weight is {weight!r}; it must be a number above 0.")

    def config(self) -> dict[str, Any]:
        return {**super().config(), "weights": self.weights}

    def verify(self, turn: Turn, action: Action) -> Verdict:
        said = [(member.name, safe_verify(member, turn, action)) for member in self.members]
        rewards = []
        for _, verdict in said:
            if verdict.reward is None:
                return Verdict(None, verdict.reason, self._details(said))
            rewards.append(verdict.reward)
        total = math.fsum(w * r for w, r in zip(self.weights, rewards, strict=True)) / math.fsum(self.weights)
        reasons = {v.reason for _, v in said}
        reason = reasons.pop() if len(reasons) == 1 else "weighted"
        return Verdict(min(1.0, max(0.0, total)), reason, self._details(said))
