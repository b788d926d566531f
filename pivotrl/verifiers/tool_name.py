"""The paper's rule for software engineering: the tool's name alone (method.md 2.1); a baseline, easy to game."""

from __future__ import annotations

from pivotrl.trajectories.schema import Action, JsonDict, Turn
from pivotrl.verifiers.base import Verdict
from pivotrl.verifiers.calls import check_options, decide


class ToolNameVerifier:
    """Equal names of the calls, in order; arguments are ignored, malformed actions still score 0. No options."""

    name = "tool_name"
    version = "1"

    def __init__(self, options: JsonDict | None = None) -> None:
        check_options(self.name, options or {}, ())

    def config(self) -> JsonDict:
        return {}

    def verify(self, turn: Turn, action: Action) -> Verdict:
        decided = decide(turn, action)
        if decided is not None:
            return decided
        expected = [call.name for call in turn.demonstration.tool_calls]
        actual = [call.name for call in action.tool_calls]
        if expected == actual:
            return Verdict(1.0, "same_tool")
        return Verdict(0.0, "wrong_tool", {"expected": expected, "actual": actual})
