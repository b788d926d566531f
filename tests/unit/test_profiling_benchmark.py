"""What the profiling benchmarks count: the simulated prefix cache, agreement of kept sets, replay of a profile."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.profiling import adaptive_against_fixed, agreement, replay
from benchmarks.profiling_prefix import BLOCK, computed
from pivotrl.io import write_jsonl


def test_a_prefix_is_computed_once_and_the_last_token_always() -> None:
    first = list(range(4 * BLOCK))
    longer = [*first, *range(900, 900 + BLOCK + 3)]
    assert computed([first], 10_000) == 4 * BLOCK
    assert computed([first, longer], 10_000) == 4 * BLOCK + BLOCK + 3
    assert computed([first, first], 10_000) == 4 * BLOCK + BLOCK  # of an equal prompt, the block of its last token
    other = [7, *first[1:]]
    assert computed([first, other], 10_000) == 8 * BLOCK  # one other token at the beginning: nothing is shared


def test_a_full_cache_forgets_the_ends_of_old_prompts_first() -> None:
    a, b = list(range(4 * BLOCK)), list(range(5000, 5000 + 4 * BLOCK))
    assert computed([a, b, a], 4 * BLOCK) == 12 * BLOCK
    assert computed([a, b, a], 8 * BLOCK) == 9 * BLOCK
    assert computed([a, b, a], 6 * BLOCK) == 8 * BLOCK + 2 * BLOCK  # two blocks of a are left


def test_agreement_is_of_the_kept_sets() -> None:
    found = agreement([True, True, False, False], [True, False, True, False])
    assert found == {"agreement": 0.5, "lost": 0.5, "foreign": 0.5}


def test_replay_of_a_profile(tmp_path: Path) -> None:
    rewards = [[0.0] * 8] * 60 + [[1.0] * 8] * 60 + [[1.0, 0.0] * 4] * 40 + [[None] * 8]
    write_jsonl(tmp_path / "profile" / "turns.jsonl", ({"rewards": r} for r in rewards))
    found = replay(tmp_path)
    assert (found["turns"], found["k"]) == (160, 8)
    assert found["agreement"] >= 0.95 and found["fewer_rollouts"] > 1
    assert adaptive_against_fixed([[0.0] * 8] * 50 + [[1.0, 0.0] * 4] * 50, 8, 50)["foreign"] == pytest.approx(0)
