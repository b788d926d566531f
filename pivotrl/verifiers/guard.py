"""What may come out of a verifier (field report G7): the reward is checked, an exception is unscorable."""

from __future__ import annotations

import math
from typing import Any

from pivotrl.trajectories.schema import Action, Turn
from pivotrl.verifiers.base import Verdict, Verifier

INVALID_REWARD = "invalid_reward"  # reason of a verdict whose reward was not a number in [0, 1]
VERIFIER_ERROR = "verifier_error"  # reason of a verdict where the verifier raised


def checked(result: Any) -> Verdict:
    """`result` if it is a Verdict with a reward in [0, 1] or None; else unscorable, with what came back in the details.

    NaN, infinities, 1.5, -1, True, "1" and None in place of a Verdict are refused: no reward is guessed from them.
    """
    if not isinstance(result, Verdict):
        return Verdict(None, INVALID_REWARD, {"returned": _short(result)})
    reward = result.reward
    if reward is None:
        return result
    if type(reward) not in (int, float) or not math.isfinite(reward) or not 0 <= reward <= 1:
        return Verdict(None, INVALID_REWARD, {"returned": _short(reward), "reason": _short(result.reason)})
    return result if type(reward) is float else Verdict(float(reward), result.reason, result.details)


def safe_verify(verifier: Verifier, turn: Turn, action: Action) -> Verdict:
    """`verifier.verify`, made total: a reward that is no reward, or an exception, is unscorable and never a 0."""
    try:
        return checked(verifier.verify(turn, action))
    except Exception as error:  # a verifier of the user's may raise anything
        return Verdict(None, VERIFIER_ERROR, {"error": f"{type(error).__name__}: {_short(error)}"})


def _short(value: Any) -> str:
    try:
        return str(value)[:200]
    except Exception:  # __str__ of a foreign object, or an integer past the digit limit
        return f"<{type(value).__name__}>"
