"""Which calls an engine allows now. Pure; every engine of this package keeps one `EngineState` in front of itself.

A real engine hangs or samples from stale or half-loaded weights when it is called out of order; this raises instead.
"""

from __future__ import annotations

from enum import Enum

from pivotrl.generation.engine import EngineStateError


class Phase(Enum):
    ASLEEP = "asleep"  # accelerator memory given back: no KV cache, weights off the accelerator
    WEIGHTS_ONLY = "awake for its weights only"  # refitted, KV cache still given back
    READY = "ready"
    CLOSED = "closed"


class Weights(Enum):
    LOADED = "loaded"
    DISCARDED = "discarded when it went to sleep"
    BROKEN = "left unknown by a refit that failed"


class EngineState:
    """Phase and weights of one engine: `require_*` raise EngineStateError, the others record what was done."""

    def __init__(self) -> None:
        self.phase = Phase.READY
        self.weights = Weights.LOADED

    def require_generate(self) -> None:
        self._require_open("generate")
        if self.phase is not Phase.READY:
            raise EngineStateError(f"generate: the engine is {self.phase.value}; call wake() first")
        self._require_weights("generate")

    def require_sleep(self) -> None:
        self._require_open("sleep")
        if self.phase is not Phase.READY:
            raise EngineStateError(
                f"sleep: the engine is {self.phase.value} already; call wake() before sleeping again"
            )

    def require_wake(self) -> None:
        self._require_open("wake")
        if self.phase is Phase.READY:
            raise EngineStateError("wake: the engine is ready already; a second wake() means that a sleep() was lost")
        self._require_weights("wake")

    def require_wake_weights(self) -> None:
        self._require_open("wake_weights")
        if self.phase is not Phase.ASLEEP:
            raise EngineStateError(f"wake_weights: the engine is {self.phase.value}; only a sleeping one can do that")

    def require_refit(self) -> None:
        self._require_open("refit")

    def slept(self, *, discard_weights: bool) -> None:
        self.phase = Phase.ASLEEP
        if discard_weights:
            self.weights = Weights.DISCARDED if self.weights is Weights.LOADED else self.weights

    def woke(self) -> None:
        self.phase = Phase.READY

    def woke_weights(self) -> None:
        self.phase = Phase.WEIGHTS_ONLY

    def refit_started(self) -> None:
        """From here until `refitted` the weights are neither the old nor the new ones."""
        self.weights = Weights.BROKEN
        if self.phase is Phase.ASLEEP:
            self.phase = Phase.WEIGHTS_ONLY

    def refitted(self) -> None:
        self.weights = Weights.LOADED

    def closed(self) -> None:
        self.phase = Phase.CLOSED

    def _require_open(self, call: str) -> None:
        if self.phase is Phase.CLOSED:
            raise EngineStateError(f"{call}: the engine is closed")

    def _require_weights(self, call: str) -> None:
        if self.weights is not Weights.LOADED:
            raise EngineStateError(f"{call}: the engine's weights were {self.weights.value}; refit it first")
