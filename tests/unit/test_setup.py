"""What training scores with: one flag makes the naive baseline of the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from pivotrl.configuration import load_config
from pivotrl.setup import Workbench
from pivotrl.trajectories.schema import Action, ToolCall, Turn
from pivotrl.validation import conflicts
from pivotrl.verifiers.registry import get_verifier

CALL = Action(text="", tool_calls=(ToolCall("get", {"a": 1, "b": 2}),))
SPOKEN = Action(text="Let me look.", tool_calls=CALL.tool_calls)
TURN = Turn("t#0", "t", "t", 0, "d", "train", [{"role": "user", "content": "x"}], [], CALL)


def bench(reward: str) -> Workbench:
    cfg = load_config([f"algorithm.reward={reward}", "domain.verifier.name=tool_calls"])
    return Workbench(cfg, Path(), Path(), cast(Any, None), get_verifier(cfg.domain.verifier), cast(Any, None))


@pytest.mark.parametrize(("reward", "spoken"), [("functional", 1.0), ("strict", 0.0)])
def test_training_reward(reward: str, spoken: float):
    verifier = bench(reward).training_verifier()
    assert verifier.verify(TURN, CALL).reward == 1.0
    assert verifier.verify(TURN, SPOKEN).reward == spoken
    assert bench(reward).verifier.name == "tool_calls"  # profile and selection stay functional


def test_an_unknown_reward_is_refused():
    assert any("algorithm.reward" in text for text in conflicts(load_config(["algorithm.reward=exact"])))
