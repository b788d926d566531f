"""What all engines do alike: the order of calls is enforced before the work of an engine and recorded after it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pivotrl.generation.state import EngineState, Phase
from pivotrl.refit.layout import EngineLayout


class StatefulEngine:
    """Base of all engines: subclasses fill in `_sleep`, `_wake`, `_load` and `_close`, and call
    `self._state.require_generate()` first in whatever samples or scores."""

    def __init__(self) -> None:
        self.weight_version = 0
        self._state = EngineState()

    @property
    def layout(self) -> EngineLayout:
        """One rank that serves everything, unless a subclass says otherwise."""
        return EngineLayout()

    def sleep(self, *, discard_weights: bool = True) -> None:
        """Give the accelerator's memory back. Discarded weights (the default) come back by `refit` only."""
        self._state.require_sleep()
        self._sleep(discard_weights)
        self._state.slept(discard_weights=discard_weights)

    def wake(self) -> None:
        self._state.require_wake()
        self._wake()
        self._state.woke()

    def wake_weights(self) -> None:
        """From asleep: take memory for the weights only, for a refit. The KV cache stays given back until `wake`."""
        self._state.require_wake_weights()
        self._wake_weights()
        self._state.woke_weights()

    def refit(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Load weights under Hugging Face names; see `Engine.refit`.

        After an error the engine refuses to generate until a refit succeeds.
        """
        self._state.require_refit()
        if self._state.phase is Phase.ASLEEP:
            self.wake_weights()
        self._state.refit_started()
        self._load(weights, version)
        self.weight_version = version
        self._state.refitted()

    def forget(self) -> None:
        """See `Engine.forget`."""
        self._state.require_generate()
        self._forget()

    def close(self) -> None:
        self._close()
        self._state.closed()

    def _sleep(self, discard_weights: bool) -> None:
        raise NotImplementedError

    def _wake(self) -> None:
        raise NotImplementedError

    def _wake_weights(self) -> None:
        """For engines whose memory moves."""

    def _forget(self) -> None:
        """For engines with a prefix cache."""

    def _load(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Check, load and verify; reset the prefix cache. Raises RefitError."""
        raise NotImplementedError

    def _close(self) -> None:
        raise NotImplementedError
