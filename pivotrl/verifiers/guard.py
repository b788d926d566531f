"""What may come out of a verifier (field report G7): the reward is checked, an exception is unscorable."""

from __future__ import annotations

import json
from typing import Any

from pivotrl.trajectories.schema import Action, Turn
from pivotrl.verifiers.base import Verdict, Verifier

INVALID_REWARD = "invalid_reward"  # reason of a verdict whose reward was not a number in [0, 1]
VERIFIER_ERROR = "verifier_error"  # reason of a verdict where the verifier raised


def checked(result: Any) -> Verdict:
    """`result` if it is a Verdict with a reward in [0, 1] or None; else unscorable, with what came back in the details.

    NaN, infinities, 1.5, -1, True, "1" and None in place of a Verdict are refused: no reward is guessed from them.
    The reason becomes a text, and details that JSON cannot hold are dropped: both are written to files.
    """
    if not isinstance(result, Verdict):
        return Verdict(None, INVALID_REWARD, {"returned": _short(result)})
    reward = result.reward
    if reward is not None:
        number = isinstance(reward, float) or type(reward) is int
        if not number or not 0 <= reward <= 1:  # NaN fails too
            returned = f"{_short(reward)} ({type(reward).__name__})"
            return Verdict(None, INVALID_REWARD, {"returned": returned, "reason": _short(result.reason)})
        reward = float(reward)
    reason = result.reason if type(result.reason) is str else _short(result.reason)
    if not reason.isascii():
        reason = reason.encode("utf-8", "replace").decode()
    details = _plain(result.details)
    if reason == result.reason and details is result.details and type(result.reward) is type(reward):
        return result
    return Verdict(reward, reason, details)


def safe_verify(verifier: Verifier, turn: Turn, action: Action) -> Verdict:
    """`verifier.verify`, made total: a reward that is no reward, or an exception, is unscorable and never a 0."""
    try:
        return checked(verifier.verify(turn, action))
    except (Exception, SystemExit) as error:  # a verifier of the user's may raise anything, and call sys.exit
        return Verdict(None, VERIFIER_ERROR, {"error": f"{type(error).__name__}: {_short(error)}"})


def _plain(details: Any) -> dict[str, Any]:
    """`details` where JSON can hold them, else what is wrong with them."""
    if not isinstance(details, dict):
        return {"details_lost": f"a {type(details).__name__}"}
    if not details:
        return details
    try:
        json.dumps(details, ensure_ascii=False).encode()
    except Exception as error:  # a foreign object, nesting past the recursion limit, half a surrogate
        return {"details_lost": f"{type(error).__name__}: {_short(error)}"}
    return details


def _short(value: Any) -> str:
    try:
        return str(value)[:200].encode("utf-8", "replace").decode()
    except Exception:  # __str__ of a foreign object, or an integer past the digit limit
        return f"<{type(value).__name__}>"
