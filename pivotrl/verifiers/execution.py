"""Functional equivalence by execution: the action does, in the same state, what the demonstration does.

The state is replayed in the turn's environment and both actions are run from it. Error flags, results, the user's
reply, how the dialogue ended and the hash of the state are compared together (`pivotrl.environments.equivalence`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from pivotrl.environments.equivalence import Effect, effect
from pivotrl.environments.registry import get_environment
from pivotrl.errors import UserError
from pivotrl.trajectories.schema import Action, Turn
from pivotrl.verifiers.base import Verdict

CACHED_EFFECTS = 4096  # demonstrations whose effect is kept: K or G rollouts of a turn ask for the same one


class ExecutionVerifier:
    """1 iff the effect equals the demonstration's. Option `environment`: the environment that recorded the turns.

    Unscorable: a state that cannot be replayed ("not_replayable": another environment version, edited data), and a
    demonstration that is itself malformed.
    """

    name = "execution"
    version = "1"
    ignores_thinking = True

    def __init__(self, options: Mapping[str, Any]) -> None:
        unknown = sorted(set(options) - {"environment"})
        if unknown or not options.get("environment"):
            raise UserError(
                "domain.verifier.options: the execution verifier takes `environment`, the name of the environment that "
                f"recorded the turns{f', and not {unknown}' if unknown else ''}"
            )
        self._environment: Any = get_environment(str(options["environment"]))
        self._demonstrated: OrderedDict[str, Effect] = OrderedDict()

    def config(self) -> dict[str, Any]:
        return {"environment": self._environment.name, "environment_version": self._environment.version}

    def verify(self, turn: Turn, action: Action) -> Verdict:
        if turn.demonstration.problems:
            return Verdict(None, "malformed_demonstration")
        try:
            expected = self._expected(turn)
        except (UserError, KeyError, ValueError) as error:
            return Verdict(None, "not_replayable", {"error": str(error)[:500]})
        if action.problems:
            return Verdict(0.0, "malformed", {"problems": list(action.problems)})
        found = effect(self._environment, turn.task_id, turn.messages, action)
        if found == expected:
            return Verdict(1.0, "same_effect")
        return Verdict(0.0, _difference(turn.demonstration, action, expected, found))

    def _expected(self, turn: Turn) -> Effect:
        if turn.id not in self._demonstrated:
            self._demonstrated[turn.id] = effect(self._environment, turn.task_id, turn.messages, turn.demonstration)
            if len(self._demonstrated) > CACHED_EFFECTS:
                self._demonstrated.popitem(last=False)
        return self._demonstrated[turn.id]


def _difference(demonstrated: Action, action: Action, expected: Effect, found: Effect) -> str:
    """The first thing that differs, as a machine name."""
    if bool(demonstrated.tool_calls) != bool(action.tool_calls):
        return "called_instead_of_speaking" if action.tool_calls else "spoke_instead_of_calling"
    if [name for name, _, _ in expected.results] != [name for name, _, _ in found.results]:
        return "wrong_tool"
    if found.failed and not expected.failed:
        return "call_failed"
    if expected.state_hash != found.state_hash:
        return "other_state"
    if expected.results != found.results:
        return "other_result"
    if expected.done != found.done or expected.success != found.success:
        return "other_ending"
    return "other_reply"
