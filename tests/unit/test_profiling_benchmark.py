"""What the profiling benchmarks count: the simulated prefix cache, agreement of kept sets, their bounds, a replay."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.profiling_adaptive import (
    DEMO,
    agreement,
    fewest_rollouts,
    from_counts,
    profiled,
    replay,
    resampled,
    with_histogram,
)
from benchmarks.profiling_bookkeeping import bookkeeping
from benchmarks.profiling_prefix import BLOCK, computed
from pivotrl.io import read_jsonl, write_jsonl
from pivotrl.profiling.adaptive import make_plan
from pivotrl.profiling.evidence import learn, of_histogram


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
    found = agreement([True, True, True, False, False], [True, False, False, True, False])
    assert found == {"agreement": pytest.approx(2 / 5), "precision": 1 / 2, "recall": pytest.approx(1 / 3)}
    assert agreement([False], [False])["agreement"] == 1.0


def test_no_plan_passes_the_bound_and_the_best_one_touches_it() -> None:
    """Where the distribution is known, the plan of mixed rules needs what no rule can do without."""
    for counts in (DEMO, (60, 3, 2, 1, 1, 1, 2, 40), (5, 5, 5, 5, 5)):
        final = [c / sum(counts) for c in counts]
        bound = fewest_rollouts(final)
        plan = make_plan(learn(of_histogram([1e6 * p for p in final]), len(final) - 1), 1, 0.6, 0.05)
        assert plan.expected.agreement >= 0.95
        assert bound * 0.999 <= plan.expected.rollouts <= bound * 1.01
        assert bound < fewest_rollouts(final, 0.0) < len(final) - 1


def test_what_no_rule_can_save() -> None:
    """71 % without signal, the rest of any rate: much where turns are certain, a half where they are hopeless."""
    for never, always, most in ((0.13, 0.55, 2.84), (0.42, 0.26, 2.08), (0.0, 0.0, 2.32)):
        final = [(1 - never - always) / 17] * 17
        final[0] += never
        final[16] += always
        assert 16 / fewest_rollouts(final) == pytest.approx(most, abs=0.01)


def test_turns_of_counts_are_distributed_as_told() -> None:
    made = from_counts([1, 0, 3, 0, 0], 4000, random.Random(0))
    rights = [sum(r) for r in made]
    assert all(len(r) == 4 for r in made) and set(rights) == {0.0, 2.0}
    assert rights.count(2.0) == pytest.approx(3000, abs=120)
    assert sum(r[0] for r in made) == pytest.approx(1500, abs=120)  # in any order
    found = resampled(DEMO, 1000, 1)
    assert found["agreement"] > 0.92 and 1 < found["fewer_rollouts"] < found["fewer_rollouts_at_most"] + 0.05


def test_replay_of_a_profile(tmp_path: Path) -> None:
    rewards = [[0.0] * 8] * 60 + [[1.0] * 8] * 60 + [[1.0, 0.0] * 4] * 40 + [[None] * 8]
    write_jsonl(tmp_path / "profile" / "turns.jsonl", ({"rewards": r} for r in rewards))
    found = replay(profiled(tmp_path))
    assert (found["turns"], found["k"]) == (160, 8)
    assert found["agreement"] >= 0.95 and found["fewer_rollouts"] > 1
    told = with_histogram(profiled(tmp_path))
    assert told["agreement"] >= 0.95 and told["fewer_rollouts"] > found["fewer_rollouts"]


def test_bookkeeping_goes_on_where_it_stopped(tmp_path: Path) -> None:
    first = bookkeeping(200, 200, 4, tmp_path, ["append"])
    more = bookkeeping(300, 300, 4, tmp_path)
    assert (first["appended_rollouts"], more["appended_rollouts"]) == (800, 400)
    rows = list(read_jsonl(tmp_path / "profile" / "turns.jsonl"))
    assert len({r["turn_id"] for r in rows}) == len(rows) == 300
    assert more["index_bytes_per_turn"] < 1000
    with pytest.raises(SystemExit, match="has the rollouts of 300 turns"):
        bookkeeping(400, 400, 4, tmp_path, ["statistics"])
