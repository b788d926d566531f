"""Dense sequence-similarity reward, the baseline of SRL (arXiv 2510.25992).

R = 2 M / (|S1| + |S2|), M the characters in the matching blocks of the two texts (difflib, Ratcliff-Obershelp).
It gives signal where no action is ever right, and is wide open otherwise: half of a command scores about two thirds,
`cp a b` and `cp b a` score high. Use it as the baseline that it is.
"""

from __future__ import annotations

from difflib import SequenceMatcher
from typing import Any

from pivotrl.trajectories.schema import Action, Turn
from pivotrl.verifiers.base import Verdict
from pivotrl.verifiers.canonical import canonical_action
from pivotrl.verifiers.options import read_options


class Similarity:
    """Options: `max_characters` (of either text; longer is unscorable, for the cost is quadratic)."""

    name = "similarity"
    version = "1"
    ignores_thinking = True

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = read_options(self.name, options, {"max_characters": 20_000})

    def config(self) -> dict[str, Any]:
        return dict(self.options)

    def verify(self, turn: Turn, action: Action) -> Verdict:
        if action.problems:
            return Verdict(0.0, "malformed", {"problems": list(action.problems)})
        try:
            ours, theirs = canonical_action(turn.demonstration), canonical_action(action)
        except (TypeError, ValueError, RecursionError) as error:
            return Verdict(None, "not_json", {"error": str(error)[:200]})
        if not theirs:
            return Verdict(0.0, "empty")
        if max(len(ours), len(theirs)) > self.options["max_characters"]:
            return Verdict(None, "too_long", {"characters": [len(ours), len(theirs)]})
        # autojunk would drop frequent characters past 200 and make identical texts cheap to mimic
        ratio = SequenceMatcher(None, ours, theirs, autojunk=False).ratio()
        return Verdict(ratio, "match" if ratio == 1.0 else "similarity")
