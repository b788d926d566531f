"""The verifier interface: functional equivalence of an action with the demonstration (method.md 1.1, eq. 6)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from pivotrl.trajectories.schema import Action, Turn


@dataclass(frozen=True)
class Verdict:
    """`reward` in [0, 1]; None means unscorable (it could not be told), which is never a 0 (design idea 2)."""

    reward: float | None
    reason: str  # short machine name, e.g. "match", "wrong_tool", "argument_differs", "text_turn"
    details: dict[str, Any] = field(default_factory=dict)


class Verifier(Protocol):
    """Pure, deterministic and total: `verify` never raises for any action."""

    name: str
    version: str  # enters the profile's fingerprint; change it whenever a verdict could change

    def config(self) -> dict[str, Any]:
        """Settings that change verdicts (enter the fingerprint)."""
        ...

    def verify(self, turn: Turn, action: Action) -> Verdict: ...
