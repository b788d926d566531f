"""Which calls an engine allows, as a table and as random walks (field reports A1, K1)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pivotrl.generation.engine import EngineStateError
from pivotrl.generation.state import EngineState, Phase, Weights


def after(*steps: str) -> EngineState:
    state = EngineState()
    for step in steps:
        do(state, step)
    return state


def do(state: EngineState, step: str) -> None:
    if step == "generate":
        state.require_generate()
    elif step in ("sleep", "sleep_keeping"):
        state.require_sleep()
        state.slept(discard_weights=step == "sleep")
    elif step == "wake":
        state.require_wake()
        state.woke()
    elif step in ("refit", "bad_refit"):
        state.require_refit()
        state.refit_started()
        if step == "refit":
            state.refitted()
    else:
        state.closed()


@pytest.mark.parametrize(
    ("history", "call", "message"),
    [
        (["sleep"], "generate", "asleep; call wake"),
        (["sleep"], "wake", "discarded when it went to sleep; refit"),
        (["sleep"], "sleep", "asleep already"),
        (["sleep", "refit"], "generate", "weights only; call wake"),
        (["sleep", "refit"], "sleep", "weights only already"),
        (["sleep", "bad_refit"], "wake", "refit that failed"),
        (["sleep_keeping", "wake", "bad_refit"], "generate", "refit that failed"),
        (["bad_refit", "sleep_keeping"], "wake", "refit that failed"),
        ([], "wake", "ready already"),
        (["close"], "generate", "closed"),
        (["close"], "refit", "closed"),
    ],
)
def test_calls_out_of_order_raise(history: list[str], call: str, message: str) -> None:
    with pytest.raises(EngineStateError, match=f"^{call}: .*{message}"):
        do(after(*history), call)


@pytest.mark.parametrize(
    "history",
    [
        ["generate", "sleep", "refit", "wake", "generate"],  # the colocated step
        ["sleep_keeping", "wake", "generate"],
        ["refit", "generate"],  # in place, awake
        ["bad_refit", "refit", "generate"],
        ["sleep", "bad_refit", "refit", "wake", "generate"],
        ["sleep", "refit", "refit", "wake", "generate"],
    ],
)
def test_calls_in_order_pass(history: list[str]) -> None:
    state = after(*history)
    assert (state.phase, state.weights) == (Phase.READY, Weights.LOADED)


@given(st.lists(st.sampled_from(["generate", "sleep", "sleep_keeping", "wake", "refit", "bad_refit"]), max_size=30))
def test_generation_only_ever_sees_loaded_weights_and_a_cache(steps: list[str]) -> None:
    """Against a plain model of what the accelerator holds: weights (which?) and KV cache (or not)."""
    state, weights, cache = EngineState(), "good", True
    for step in steps:
        try:
            do(state, step)
        except EngineStateError:
            continue
        if step == "generate":
            assert weights == "good" and cache
        elif step.startswith("sleep"):
            cache = False
            weights = "gone" if step == "sleep" and weights == "good" else weights
        elif step == "wake":
            cache = True
        else:
            weights = "good" if step == "refit" else "half"
