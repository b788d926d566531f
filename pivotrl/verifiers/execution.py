"""Functional equivalence by execution: the action does, in the same state, what the demonstration does.

The state is replayed in the turn's environment and both actions are run from it. Error flags, results, the user's
reply, how the dialogue ended and the hash of the state are compared together (`pivotrl.environments.equivalence`).
Where the environment's user is no program (tau2), texts are unscorable.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from pivotrl.environments.equivalence import Effect, Executor
from pivotrl.environments.registry import get_executor
from pivotrl.errors import UserError
from pivotrl.trajectories.schema import Action, Turn
from pivotrl.verifiers.base import Verdict
from pivotrl.verifiers.texts import TextRule, both_speak, make_judge

EXECUTE = "execute"
CACHED_EFFECTS = 4096  # demonstrations whose effect is kept: K or G rollouts of a turn ask for the same one


class ExecutionVerifier:
    """1 iff the effect equals the demonstration's. Options: `environment`, the environment that recorded the turns;
    `text`, for turns where both speak: "execute" (default: by what the user answers; where no program answers, as
    "exclude"), or a rule of `texts`: "exclude", "same", "similarity:x", "facts", "judge"; the options of that `judge`.

    Unscorable: a state that cannot be replayed ("not_replayable": another environment version, edited data), a
    demonstration that is itself malformed, one whose call fails ("demonstration_failed") and one that only reads and
    finds nothing ("nothing_found"): all that fails or finds nothing has one effect, none.
    """

    name = "execution"
    version = "3"
    ignores_thinking = True

    def __init__(self, options: Mapping[str, Any]) -> None:
        unknown = sorted(set(options) - {"environment", "text", "judge"})
        if unknown or not options.get("environment"):
            raise UserError(
                "domain.verifier.options: the execution verifier takes `environment`, the name of the environment that "
                f"recorded the turns, `text` and `judge`{f', and not {unknown}' if unknown else ''}"
            )
        self._executor: Executor = get_executor(str(options["environment"]))
        self._judge = make_judge(options)
        self._text = TextRule("domain.verifier.options", options.get("text") or EXECUTE, self._judge, own=(EXECUTE,))
        self._demonstrated: OrderedDict[str, Effect] = OrderedDict()
        self._latest: tuple[Turn, Effect] | None = None  # rollouts of a turn come together

    def config(self) -> dict[str, Any]:
        """Options that are off are left out."""
        made: dict[str, Any] = {"environment": self._executor.name, "environment_version": self._executor.version}
        if self._text.rule != EXECUTE:
            made["text"] = self._text.rule
        return made | ({"judge": self._judge.config()} if self._judge else {})

    def verify(self, turn: Turn, action: Action) -> Verdict:
        if turn.demonstration.problems:
            return Verdict(None, "malformed_demonstration")
        if self._text.rule != EXECUTE and not turn.demonstration.tool_calls:
            return self._text.verify(turn, action) if both_speak(turn, action) else self._unanswered(action)
        if not self._executor.has_user and not turn.demonstration.tool_calls:
            return self._unanswered(action)
        try:
            expected = self._expected(turn)
        except (UserError, KeyError, ValueError) as error:
            return Verdict(None, "not_replayable", {"error": str(error)[:500]})
        if expected.failed:
            return Verdict(None, "demonstration_failed", {"results": [result for _, _, result in expected.results]})
        if action.problems:
            return Verdict(0.0, "malformed", {"problems": list(action.problems)})
        if not self._executor.has_user and expected.is_empty:
            return Verdict(None, "nothing_found")
        found = self._executor.effect(turn, action)
        if found == expected:
            return Verdict(1.0, "same_effect")
        return Verdict(0.0, _difference(turn.demonstration, action, expected, found))

    @staticmethod
    def _unanswered(action: Action) -> Verdict:
        """Where a text is demonstrated and nobody can be asked what it leads to."""
        if action.problems:
            return Verdict(0.0, "malformed", {"problems": list(action.problems)})
        if action.tool_calls:
            return Verdict(0.0, "called_instead_of_speaking")
        return Verdict(None, "text_turn") if action.text.strip() else Verdict(0.0, "empty")

    def _expected(self, turn: Turn) -> Effect:
        """The demonstration's effect, kept by content: rows may share an id."""
        if self._latest is not None and self._latest[0] is turn:
            return self._latest[1]
        content = [turn.id, turn.task_id, turn.messages, turn.tools, turn.demonstration.to_json()]
        key = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        if key not in self._demonstrated:
            self._demonstrated[key] = self._executor.effect(turn, turn.demonstration)
            if len(self._demonstrated) > CACHED_EFFECTS:
                self._demonstrated.popitem(last=False)
        self._latest = (turn, self._demonstrated[key])
        return self._latest[1]


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
