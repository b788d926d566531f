from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pivotrl.config import Config
from pivotrl.errors import UserError
from pivotrl.io import read_json, read_jsonl, write_jsonl
from pivotrl.profiling.select import SETS, histogram, run_select
from pivotrl.profiling.statistics import mean_variance


def row(rewards: list[float | None], turn: str = "t#0") -> dict[str, Any]:
    scored = [r for r in rewards if r is not None]
    mean, variance = mean_variance(scored) if scored else (None, None)
    return {"turn_id": turn, "rewards": rewards, "mean": mean, "variance": variance}


@pytest.mark.parametrize(
    ("rewards", "members"),
    [
        ([0, 0, 0, 0], {"cand", "adv_zeros"}),
        ([1, 1, 1, 1], {"cand"}),
        ([1, 0, 0, 0], {"cand", "mixed", "adv", "adv_zeros"}),
        ([1, 1, 1, 0], {"cand", "mixed"}),
        ([1, 1, 1, 0, 0], {"cand", "mixed"}),  # a mean of exactly 0.6 is not below 0.6
        ([None, None], set()),
        ([None, 1, 0], {"cand", "mixed", "adv", "adv_zeros"}),
        ([None, 1, 1], {"cand"}),  # an unscorable rollout does not make a pivot
        ([0.1] * 3, {"cand", "adv_zeros"}),  # float residue is not variance
    ],
)
def test_sets(rewards, members):
    assert {name for name, rule in SETS.items() if rule(row(rewards), 0.6)} == members


@given(rewards=st.lists(st.sampled_from([0, 1, None]), min_size=1, max_size=16), lam=st.sampled_from([0.3, 0.6, 1.0]))
def test_adv_is_within_mixed_is_within_cand(rewards, lam):
    r = row(rewards)
    assert SETS["adv"](r, lam) == (SETS["mixed"](r, lam) and SETS["adv_zeros"](r, lam))
    assert not SETS["mixed"](r, lam) or SETS["cand"](r, lam)


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=32))
def test_binary_variance_is_mu_times_one_minus_mu(rewards):
    mean, variance = mean_variance(rewards)
    assert variance == pytest.approx(mean * (1 - mean))


def test_histogram_counts_every_scored_turn():
    assert histogram([row([0]), row([1]), row([1, 0]), row([None])]) == [1, 0, 0, 0, 0, 1, 0, 0, 0, 1]


def test_select_writes_the_kept_rows(tmp_path: Path):
    write_jsonl(tmp_path / "profile" / "turns.jsonl", [row([1, 0], "a#0"), row([1, 1], "a#1"), row([0, 0], "b#0")])
    summary = run_select(Config(), tmp_path)
    assert [r["turn_id"] for r in read_jsonl(tmp_path / "select" / "pivots.jsonl")] == ["a#0"]
    assert summary == read_json(tmp_path / "select" / "summary.json")
    assert summary["counts"] == {"cand": 3, "mixed": 1, "adv": 1, "adv_zeros": 2}
    assert (summary["all_right"], summary["all_wrong"], summary["kept"]) == (1, 1, 1)


def test_no_pivot_is_an_error_with_the_histogram(tmp_path: Path):
    write_jsonl(tmp_path / "profile" / "turns.jsonl", [row([1, 1]), row([0, 0])])
    with pytest.raises(UserError, match=r"(?s)no pivot kept.*0\.0:1.*0\.9:1"):
        run_select(Config(), tmp_path)
    assert read_json(tmp_path / "select" / "summary.json")["kept"] == 0
    cfg = Config()
    cfg.select.allow_empty = True
    assert run_select(cfg, tmp_path)["kept"] == 0


def test_select_without_a_profile_says_what_to_run(tmp_path: Path):
    with pytest.raises(UserError, match="pivotrl profile"):
        run_select(Config(), tmp_path)
