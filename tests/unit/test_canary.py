"""After the first refit trainer and engine score one rollout alike, or training stops (field reports A1, A9)."""

from __future__ import annotations

import pytest

from pivotrl.generation.data_parallel import share
from pivotrl.generation.scripted import ScriptedEngine
from pivotrl.policy.prefix_tree import TokenSequence
from pivotrl.training.canary import check_canary
from pivotrl.training.gate import MismatchError

SEQUENCE = TokenSequence.of([1, 2, 3], [4, 5])


def engine(weight: float) -> ScriptedEngine:
    return ScriptedEngine(lambda prompt, k, seed: [1], {"w": weight})


def test_the_canary_passes_after_a_right_refit_and_sees_a_lost_one() -> None:
    trainer = engine(2.0).score([[1, 2, 3]], [[4, 5]])[0]
    served = engine(1.0)
    with pytest.raises(MismatchError, match=r"after the first refit(.|\n)*rollout t/0, token 0"):
        check_canary(served, SEQUENCE, trainer, 1e-4, "t/0")
    served.refit([("w", 2.0)], 1)
    assert check_canary(served, SEQUENCE, trainer, 1e-4, "t/0").maximum == 0.0


def test_engines_share_prompts_in_contiguous_parts() -> None:
    order = [3, 1, 4, 0, 2, 5, 6]
    parts = [share(order, engine, 3) for engine in range(3)]
    assert [i for part in parts for i in part] == order and {len(p) for p in parts} == {2, 3}
    assert share([0], 0, 2) == [] and share([0], 1, 2) == [0]
