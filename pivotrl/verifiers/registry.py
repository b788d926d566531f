"""Verifiers by name or import path, wrapped so that no fault of theirs can pass for a reward.

A verifier is a class whose constructor takes one mapping of options. Modules are imported when they are asked for.
"""

from __future__ import annotations

import importlib
from collections import Counter
from typing import Any

from pivotrl import config
from pivotrl.errors import UserError
from pivotrl.trajectories.schema import Action, Turn
from pivotrl.verifiers.base import Verdict, Verifier
from pivotrl.verifiers.guard import INVALID_REWARD, VERIFIER_ERROR, safe_verify

VERIFIERS = {
    "tool_calls": "pivotrl.verifiers.tool_calls:ToolCallVerifier",
    "execution": "pivotrl.verifiers.execution:ExecutionVerifier",
    "shell": "pivotrl.verifiers.shell:ShellVerifier",
    "edits": "pivotrl.verifiers.edits:EditsVerifier",
    "search": "pivotrl.verifiers.search:Search",
    "judge": "pivotrl.verifiers.judge:Judge",
    "strict": "pivotrl.verifiers.strict:StrictVerifier",
    "similarity": "pivotrl.verifiers.similarity:Similarity",
    "tool_name": "pivotrl.verifiers.tool_name:ToolNameVerifier",
    "first": "pivotrl.verifiers.composition:First",
    "all": "pivotrl.verifiers.composition:All",
    "weighted": "pivotrl.verifiers.composition:Weighted",
    "single_step_tool_use_with_argument_comparison": "pivotrl.verifiers.nemo_gym:SingleStepToolUse",
    "terminus_judge": "pivotrl.verifiers.nemo_gym:TerminusJudge",
    "swe_pivot": "pivotrl.verifiers.nemo_gym_swe:SwePivot",
}


class CheckedVerifier:
    """A verifier whose faults become unscorable verdicts, counted in `faults` (field reports G7, C12)."""

    def __init__(self, inner: Verifier) -> None:
        self.inner = inner
        self.name = inner.name
        self.version = inner.version
        self.ignores_thinking = bool(getattr(inner, "ignores_thinking", False))
        self.faults: Counter[str] = Counter()

    def config(self) -> dict[str, Any]:
        return self.inner.config()

    def verify(self, turn: Turn, action: Action) -> Verdict:
        verdict = safe_verify(self.inner, turn, action)
        if verdict.reason in (INVALID_REWARD, VERIFIER_ERROR):
            self.faults[verdict.reason] += 1
        return verdict


def get_verifier(settings: config.VerifierConfig) -> CheckedVerifier:
    """The verifier called `settings.name`, or the class at "package.module:Class", built with its options.

    Raises `UserError` for an unknown name, a path that cannot be imported, or options the verifier refuses.
    """
    factory = _import(VERIFIERS.get(settings.name, settings.name))
    try:
        return CheckedVerifier(factory({str(name): value for name, value in settings.options.items()}))
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"domain.verifier: {settings.name} refuses its options: {error}") from error


def _import(path: str) -> Any:
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
    return found
