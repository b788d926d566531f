"""Turns where both speak: what the option `text` makes of them, in every domain's verifier.

exclude       unscorable, "text_turn": no program tells whether two texts mean the same; the turn is not trained on
same          1 for the same words (blank space apart), else unscorable
similarity:x  1 from a word overlap of x, with the same numbers, ids and negations (see `strings`), else 0
facts         1 for the same salient values (see `facts`), where both or neither ask a question; a demonstration without
              any salient value is unscorable, "no_facts", and a text that says "not" where the other does not,
              "negation_differs"
judge         the LLM judge of the option `judge`
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pivotrl.errors import UserError
from pivotrl.trajectories.schema import Action, Turn
from pivotrl.verifiers.base import Verdict
from pivotrl.verifiers.facts import compare, facts_of
from pivotrl.verifiers.judge import Judge
from pivotrl.verifiers.strings import negations, similar, similarity_threshold

EXCLUDE, SAME, FACTS, JUDGE = "exclude", "same", "facts", "judge"
_BARE = 0.25  # of the demonstrated words: fewer are a list of values, and no message


def both_speak(turn: Turn, action: Action) -> bool:
    """Whether a text answers a text: nothing malformed, no call on either side, not empty."""
    expected = turn.demonstration
    spoken = not (expected.tool_calls or action.tool_calls or expected.problems or action.problems)
    return spoken and bool(action.text.strip())


def make_judge(options: Mapping[str, Any]) -> Judge | None:
    """The judge of the option `judge`; None where it is off."""
    return Judge(dict(options["judge"])) if options.get("judge") else None


class TextRule:
    """Judges texts by `rule`. Raises `UserError` for an unknown rule, and for `judge` without one.

    `own`: rules that the verifier itself sees to, for the message.
    """

    def __init__(self, where: str, rule: object, judge: Judge | None, own: tuple[str, ...] = ()) -> None:
        self.rule, self._judge = rule, judge
        self._threshold: float | None = None
        if rule in (EXCLUDE, SAME, FACTS, *own):
            return
        if rule == JUDGE:
            if judge is None:
                raise UserError(f"{where}.judge is missing: text asks the judge.")
            return
        if not str(rule).startswith("similarity:"):
            known = ", ".join((*own, EXCLUDE, SAME, FACTS, JUDGE))
            raise UserError(f"{where}.text={rule!r}: use {known}, or similarity:x with 0 < x <= 1.")
        self._threshold = similarity_threshold(rule, f"{where}.text")

    def verify(self, turn: Turn, action: Action) -> Verdict:
        """The verdict where `both_speak`."""
        expected, actual = turn.demonstration.text, action.text
        if self.rule == JUDGE and self._judge is not None:
            return self._judge.verify(turn, action)
        if self.rule == EXCLUDE:
            return Verdict(None, "text_turn")
        if self._threshold is not None:
            same = similar(expected, actual, self._threshold)
            return Verdict(float(same), "match" if same else "text_differs")
        if self.rule == FACTS:
            return _by_facts(expected, actual)
        return Verdict(1.0, "same_text") if expected.split() == actual.split() else Verdict(None, "text_turn")


def _by_facts(expected: str, actual: str) -> Verdict:
    facts = facts_of(expected)
    if not facts.values:
        return Verdict(None, "no_facts")
    problem = compare(facts, facts_of(actual))
    if problem is None and len(actual.split()) < _BARE * len(expected.split()):
        problem = "only_facts"
    if problem is not None:
        return Verdict(0.0, problem)
    if bool(negations(expected)) != bool(negations(actual)):
        return Verdict(None, "negation_differs")
    return Verdict(1.0, "match")
