"""r_strict (method.md eq. 2): the action is the demonstrated one, nothing else counts; the naive local-RL baseline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pivotrl.trajectories.schema import Action, Turn
from pivotrl.verifiers.base import Verdict
from pivotrl.verifiers.compare import json_equal
from pivotrl.verifiers.tool_calls import check_option_names


class StrictVerifier:
    """1 iff text and calls equal the demonstration's, in order and type. Thinking is not part of the action."""

    name = "strict"
    version = "1"

    def __init__(self, options: Mapping[str, Any]) -> None:
        check_option_names(options, ())

    def config(self) -> dict[str, Any]:
        return {}

    def verify(self, turn: Turn, action: Action) -> Verdict:
        if action.problems:
            return Verdict(0.0, "malformed", {"problems": list(action.problems)})
        expected = turn.demonstration
        calls = [call.to_json() for call in action.tool_calls]
        same = action.text == expected.text and json_equal(calls, [call.to_json() for call in expected.tool_calls])
        return Verdict(float(same), "match" if same else "differs")
