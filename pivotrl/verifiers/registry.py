"""Verifiers by name or import path, wrapped so that no fault of theirs can pass for a reward."""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from pivotrl import config
from pivotrl.errors import UserError
from pivotrl.trajectories.schema import Action, Turn
from pivotrl.verifiers.base import Verdict, Verifier
from pivotrl.verifiers.strict import StrictVerifier
from pivotrl.verifiers.tool_calls import ToolCallVerifier

VERIFIERS: dict[str, Callable[..., Verifier]] = {
    ToolCallVerifier.name: ToolCallVerifier,
    StrictVerifier.name: StrictVerifier,
}


class CheckedVerifier:
    """A verifier whose faults become unscorable verdicts, counted in `faults` (field reports G7, C12).

    An exception gives "verifier_error"; a reward that is no number in [0, 1] (NaN, "1", True...) "invalid_reward".
    """

    def __init__(self, inner: Verifier) -> None:
        self.inner = inner
        self.name = inner.name
        self.version = inner.version
        self.faults: Counter[str] = Counter()

    def config(self) -> dict[str, Any]:
        return self.inner.config()

    def verify(self, turn: Turn, action: Action) -> Verdict:
        try:
            verdict = self.inner.verify(turn, action)
            problem = _problem(verdict)
        except Exception as error:  # whatever user code raises; it is counted and reported, never a 0
            return self._fault("verifier_error", f"{type(error).__name__}: {error}")
        if problem is not None:
            return self._fault("invalid_reward", problem)
        return verdict

    def _fault(self, reason: str, detail: str) -> Verdict:
        self.faults[reason] += 1
        return Verdict(None, reason, {"verifier": self.name, "error": detail[:500]})


def _problem(verdict: Any) -> str | None:
    if not isinstance(verdict, Verdict):
        return f"verify returned {type(verdict).__name__}, not a Verdict"
    reward = verdict.reward
    if reward is None:
        return None if isinstance(verdict.reason, str) and verdict.reason else "no reward and no reason"
    if isinstance(reward, bool) or not isinstance(reward, (int, float)):
        return f"reward {reward!r} is a {type(reward).__name__}"
    return None if math.isfinite(reward) and 0 <= reward <= 1 else f"reward {reward!r} is not in [0, 1]"


def get_verifier(settings: config.VerifierConfig) -> CheckedVerifier:
    """The verifier called `settings.name`, or at "package.module:Class", built with the options as keywords.

    Raises `UserError` for an unknown name, a path that cannot be imported, or options the verifier refuses.
    """
    factory = VERIFIERS.get(settings.name) or _import(settings.name)
    try:
        return CheckedVerifier(factory(**{str(name): value for name, value in settings.options.items()}))
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"domain.verifier: {settings.name} refuses its options: {error}") from error


def _import(path: str) -> Callable[..., Verifier]:
    module, colon, attribute = path.partition(":")
    if not colon or not module or not attribute:
        known = ", ".join(VERIFIERS)
        raise UserError(f"domain.verifier.name={path!r} is unknown. Use one of {known}, or package.module:Class.")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f"domain.verifier.name={path!r} cannot be imported: {error}") from error
    if not callable(found):
        raise UserError(f"domain.verifier.name={path!r}: {attribute} is not a class.")
    return found  # type: ignore[no-any-return]
