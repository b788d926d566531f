"""A verifier for runs of random models: what they write is noise, so the reward is the parity of its length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pivotrl.trajectories.schema import Action, Turn
from pivotrl.verifiers.base import Verdict


class Parity:
    """1 for the demonstration and for any text of even length: mixed outcomes from the first rollout on."""

    name, version = "parity", "1"

    def __init__(self, options: Mapping[str, Any]) -> None:
        pass

    def config(self) -> dict[str, Any]:
        return {}

    def verify(self, turn: Turn, action: Action) -> Verdict:
        even = action == turn.demonstration or len(action.text) % 2 == 0
        return Verdict(float(even), "even" if even else "odd")
