from __future__ import annotations

import tempfile
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pivotrl.config import Config, Select
from pivotrl.errors import UserError
from pivotrl.io import read_json, read_jsonl, write_jsonl
from pivotrl.profiling.choose import Candidate, Candidates, choose
from pivotrl.profiling.select import SETS, histogram, is_below, is_mixed, run_select, scored
from pivotrl.profiling.statistics import mean_variance
from pivotrl.tracking.actions import scarce


def row(rewards: list[float | None], turn: str = "t#0") -> dict[str, Any]:
    scored = [r for r in rewards if r is not None]
    mean, variance = mean_variance(scored) if scored else (None, None)
    name, _, depth = turn.partition("#")
    return {
        "turn_id": turn,
        "trajectory_id": name,
        "domain": name[:1],
        "split": "train",
        "rewards": rewards,
        "mean": mean,
        "variance": variance,
        "unique_actions": len(set(rewards)),
        "state_action": f"same{depth}",
    }


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
        ([0.3, 0.1 + 0.2, 0.3000001], {"cand", "adv_zeros"}),  # nor is what a judge computed a little differently
        ([0.3, 0.30001], {"cand", "mixed", "adv", "adv_zeros"}),
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


@given(
    st.lists(st.sampled_from([0, 1, 0.0, 1.0, 0.5, 0.1, None]), max_size=16),
    st.sampled_from([0.1, 0.3, 0.6, 0.7, 1.0]),
)
def test_integer_comparisons_are_the_exact_ones(rewards: list[float | None], lam: float):
    r = row(rewards)
    exact = scored(r)
    assert is_mixed(r) == (len(set(exact)) > 1)
    assert is_below(r, lam) == (bool(exact) and sum(exact) / len(exact) < Fraction(str(lam)))


def pivots(tmp_path: Path, rows: list[dict[str, Any]], **options: Any) -> tuple[list[str], dict[str, Any]]:
    write_jsonl(tmp_path / "profile" / "turns.jsonl", rows)
    summary = run_select(Config(select=Select(**options)), tmp_path)
    return [r["turn_id"] for r in read_jsonl(tmp_path / "select" / "pivots.jsonl")], summary


ROWS = [
    row([1, 0, 0, 0], "a1#0"),
    row([1, 1, 0, 0], "a1#1"),
    row([1, 0, 0, 0], "a1#2"),
    row([1, 1, 0, 0], "b1#0"),
    row([1, 0, 0, None], "b1#1"),
    row([1, 1, 1, 1], "b1#2"),
]


def test_cap_per_trajectory_keeps_the_turns_of_most_signal_in_file_order(tmp_path: Path):
    kept, summary = pivots(tmp_path, ROWS, max_per_trajectory=1)
    assert kept == ["a1#1", "b1#0"]
    assert summary["dropped"] == {"trajectory_cap": 3}
    assert summary["kept_by_domain"] == {"a": 1, "b": 1}


def test_mixture_has_exact_counts(tmp_path: Path):
    kept, summary = pivots(tmp_path, ROWS, mixture={"a": 2, "b": 1})
    assert Counter(k[0] for k in kept) == {"a": 2, "b": 1}
    assert {"a1#1", "b1#0"} <= set(kept)
    assert summary["dropped"] == {"mixture": 2}


def test_mixture_that_cannot_be_filled_says_what_there_is(tmp_path: Path):
    with pytest.raises(UserError, match=r"b: 3 wanted, 2 there; c: 1 wanted, 0 there"):
        pivots(tmp_path, ROWS, mixture={"b": 3, "c": 1})


def test_equal_states_and_actions_are_one_pivot(tmp_path: Path):
    kept, summary = pivots(tmp_path, ROWS, deduplicate=True)
    assert kept == ["a1#1", "a1#2", "b1#0"]  # of a1#0 and b1#0 the one of more signal, likewise of a1#1 and b1#1
    assert summary["dropped"] == {"duplicate": 2}
    bare = [{k: v for k, v in r.items() if k != "state_action"} for r in ROWS]
    with pytest.raises(UserError, match=r"turns.jsonl:1: no state_action"):
        pivots(tmp_path, bare, deduplicate=True)


def test_minimum_of_unique_actions(tmp_path: Path):
    kept, summary = pivots(tmp_path, ROWS, min_unique_actions=3)
    assert kept == ["b1#1"]
    assert summary["dropped"] == {"few_unique_actions": 4}
    with pytest.raises(UserError, match="few_unique_actions': 5"):
        pivots(tmp_path, ROWS, min_unique_actions=4)


def test_most_signal_first_or_at_random(tmp_path: Path):
    assert pivots(tmp_path, ROWS, max_pivots=2)[0] == ["a1#1", "b1#0"]
    many = [row([1, 0, 0, 0], f"a{i}#0") for i in range(40)] + [row([1, 1, 0, 0], f"z{i}#0") for i in range(40)]
    drawn = pivots(tmp_path, many, max_pivots=40, rank="random")[0]
    assert 8 < sum(k[0] == "a" for k in drawn) < 32
    assert drawn == pivots(tmp_path, many, max_pivots=40, rank="random")[0]


TAGGED = [{**r, "tags": tags} for r, tags in zip(ROWS, [["last"], [], ["P1"], ["P1", "last"], [], []], strict=True)]


@pytest.mark.parametrize(
    ("options", "kept", "dropped"),
    [
        ({"domains": ["b"]}, ["b1#0", "b1#1"], 3),
        ({"domains": ["a", "b"]}, ["a1#0", "a1#1", "a1#2", "b1#0", "b1#1"], 0),
        ({"tags": ["P1"]}, ["a1#2", "b1#0"], 3),
        ({"tags": ["P1", "last"]}, ["a1#0", "a1#2", "b1#0"], 2),
        ({"drop_tags": ["last"]}, ["a1#1", "a1#2", "b1#1"], 2),
        ({"tags": ["P1"], "drop_tags": ["last"], "domains": ["a"]}, ["a1#2"], 4),
        ({"drop_tags": ["run_failed"]}, ["a1#0", "a1#1", "a1#2", "b1#0", "b1#1"], 0),  # a known flag, none has it
    ],
)
def test_by_domain_and_tag(tmp_path: Path, options: dict[str, Any], kept: list[str], dropped: int):
    found, summary = pivots(tmp_path, TAGGED, **options)
    assert found == kept
    assert summary["dropped"] == {"other_domain_or_tag": dropped}
    assert summary["counts"]["adv"] == 5  # what the profile has, whatever is asked for


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"domains": ["a", "retial"]}, "has retial; its domains are: a, b"),
        ({"tags": ["P7"]}, "has P7; its tags are: P1, last"),
        ({"drop_tags": ["lst"]}, "has lst"),
    ],
)
def test_names_that_no_turn_has_are_told(tmp_path: Path, options: dict[str, Any], told: str):
    with pytest.raises(UserError, match=told):
        pivots(tmp_path, TAGGED, **options)


def test_tags_and_unique_actions_must_be_in_the_profile(tmp_path: Path):
    with pytest.raises(UserError, match=r"turns.jsonl:1: no tags"):
        pivots(tmp_path, ROWS, tags=["last"])
    bare = [{k: v for k, v in r.items() if k != "unique_actions"} for r in ROWS]
    with pytest.raises(UserError, match=r"turns.jsonl:1: this profile does not tell unique actions"):
        pivots(tmp_path, bare, min_unique_actions=2)


def test_a_held_out_turn_in_the_profile_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"turns.jsonl:2: turn of split 'validation'"):
        pivots(tmp_path, [ROWS[0], {**ROWS[1], "split": "validation"}])


def test_what_each_lambda_would_keep_and_the_expected_share_of_mixed_groups(tmp_path: Path):
    summary = pivots(tmp_path, ROWS)[1]
    # means 1/4, 1/2, 1/4, 1/2, 1/3; mean < 0.5 is strict
    assert summary["adv_by_lambda"]["0.3"] == 2
    assert [summary["adv_by_lambda"][k] for k in ("0.2", "0.4", "0.5", "0.6", "1")] == [0, 3, 3, 5, 5]
    zeros = pivots(tmp_path, [*ROWS, row([0, 0, 0, 0], "b1#3")])[1]["adv_zeros_by_lambda"]
    assert [zeros[k] for k in ("0.1", "0.3", "0.6", "1")] == [1, 3, 6, 6]
    assert summary["informative_share"]["4"] == pytest.approx(4 / 5)  # of the five turns with four scored rollouts
    assert summary["informative_share"]["2"] == pytest.approx((3 * 2 / 3 + 2 * 1 / 2) / 6)
    assert "8" not in summary["informative_share"]


def test_unbiased_mean_comes_from_the_second_profile(tmp_path: Path):
    second = [{"turn_id": "a1#0", "mean": 0.75, "rewards": [1, 1, 1, 0]}, {"turn_id": "b1#2", "rewards": [1, 0]}]
    write_jsonl(tmp_path / "profile" / "second_turns.jsonl", [{"mean": 0.5, **row} for row in second])
    summary = pivots(tmp_path, ROWS[:1])[1]
    assert (summary["kept_mean"], summary["kept_mean_second_profile"]) == (0.25, 0.75)
    assert summary["kept_informative_share_second_profile"] == {"2": pytest.approx(0.5), "4": 1.0}


@given(
    st.lists(st.tuples(st.sampled_from([[1, 0], [1, 1, 0], [1, 0, 0]]), st.integers(0, 5)), max_size=30),
    st.integers(1, 3),
    st.integers(1, 9),
    st.booleans(),
)
def test_limits_hold_for_any_profile(turns, cap: int, most: int, deduplicate: bool):
    options = Select(max_per_trajectory=cap, max_pivots=most, deduplicate=deduplicate)
    candidates = Candidates(options, seed=0)
    for i, (rewards, trajectory) in enumerate(turns):
        candidates.rows.append(candidates.of(i, row(rewards, f"t{trajectory}#{i % 4}")))
    kept, dropped = choose(candidates.rows, options)
    assert len(kept) <= most
    assert len(kept) + sum(dropped.values()) == len(turns)
    assert max(Counter(c.trajectory for c in kept).values(), default=0) <= cap
    if deduplicate:
        assert len({c.content for c in kept}) == len(kept)
    # what is kept never has less signal than a turn that was dropped by the last limit alone
    assert [c.signal for c in kept] == sorted((c.signal for c in kept), reverse=True)
    assert all(isinstance(c, Candidate) for c in kept)


def acting(rewards: list[float | None], turn: str, *tools: str) -> dict[str, Any]:
    return row(rewards, turn) | {"demonstration": list(tools)}


def test_an_action_that_pivots_hardly_demonstrate_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = [acting([1, 0, 0], f"c{i}#0", "bash") for i in range(42)] + [acting([1, 0, 0], "m#0", "(text)")]
    rows += [acting([1, 1, 1], f"m{i}#1", "(text)") for i in range(47)] + [
        acting([None], f"u{i}#1", "x") for i in range(9)
    ]
    rows += [acting([1, 1, 1], f"r{i}#1", "rare", "bash") for i in range(4)]
    write_jsonl(tmp_path / "profile" / "turns.jsonl", rows)
    summary = run_select(Config(), tmp_path)
    assert summary["scored_by_action"] == {"bash": 42, "(text)": 48, "x": 0, "rare and 1 more": 4}
    assert summary["kept_by_action"] == {"bash": 42, "(text)": 1}
    said = capsys.readouterr().err
    assert said == f"select: {summary['warning']}\n"
    assert said.startswith("select: of 43 pivots, 1 of (text) (51% of the turns): ")
    cfg = Config()
    cfg.select.set = "cand"
    assert run_select(cfg, tmp_path)["warning"] is None
    assert capsys.readouterr().err == ""


COUNTS = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 50))


@given(turns=COUNTS, share=COUNTS)
def test_scarce_actions_are_common_among_turns_and_not_among_pivots(turns, share):
    kept = {a: min(n, share.get(a, 0)) for a, n in turns.items()}
    found = scarce(turns, kept)
    total, pivots = sum(turns.values()), sum(kept.values())
    for action, count in turns.items():
        named = pivots and Fraction(count, total) >= Fraction(1, 20)
        named = named and Fraction(kept[action], pivots) < Fraction(count, 10 * total)
        assert (action in found) == bool(named)
    assert scarce(turns, turns) == []  # all of them kept


def floored(tmp_path: Path, rows: list[dict[str, Any]], **options: Any) -> tuple[list[str], dict[str, Any]]:
    return pivots(tmp_path, rows, action_floor=0.5, **options)


def test_the_floor_adds_the_hardest_mixed_turns_of_a_scarce_action(tmp_path: Path):
    rows = [acting([1, 0, 0], f"c{i}#0", "bash") for i in range(10)]
    rows += [
        acting([1, 1, 1, 1, 0], "m0#1", "(text)"),
        acting([1, 1, 0], "m1#1", "(text)"),
        acting([1, 1, 0], "m2#1", "(text)"),
    ]
    rows += [acting([1, 1, 1], f"m{i}#1", "(text)") for i in range(3, 10)]
    plain, _ = pivots(tmp_path, rows)
    assert plain == [f"c{i}#0" for i in range(10)]
    # 10 of 20 turns are messages: half of that share of 10 pivots is 2.5, and no turn without variance counts
    kept, summary = floored(tmp_path, rows)
    assert kept == [*plain, "m0#1", "m1#1", "m2#1"]
    assert summary["added_by_floor"] == {"(text)": 3}
    kept, summary = floored(tmp_path, rows[:12] + rows[13:])  # the mean of 0.67 before that of 0.8
    assert kept == [*plain, "m0#1", "m1#1"]
    kept, _ = pivots(tmp_path, rows, action_floor=0.2)
    assert len(kept) == 11
    assert kept[-1] in ("m1#1", "m2#1")
    kept, _ = floored(tmp_path, rows, max_per_trajectory=1, max_pivots=4)  # the limits narrow what the floor widened
    assert len(kept) == 4
    tagged = [r | {"tags": ["last"] if r["demonstration"] == ["(text)"] else []} for r in rows]
    assert floored(tmp_path, tagged, drop_tags=["last"])[0] == plain  # nor are turns added that may be no pivots


ACTED = st.lists(
    st.tuples(st.lists(st.sampled_from([0, 1, None]), min_size=1, max_size=6), st.sampled_from("abc")),
    min_size=1,
    max_size=30,
)


@given(turns=ACTED, part=st.sampled_from([0.1, 0.25, 0.5, 1.0]))
def test_the_floor_keeps_the_set_and_adds_only_mixed_turns(turns, part):
    rows = [acting(rewards, f"t{i}#0", tool) for i, (rewards, tool) in enumerate(turns)]
    with tempfile.TemporaryDirectory() as folder:
        plain, before = pivots(Path(folder), rows, allow_empty=True)
        kept, after = pivots(Path(folder), rows, allow_empty=True, action_floor=part)
    assert set(plain) <= set(kept)
    assert [r["turn_id"] for r in rows if r["turn_id"] in set(kept)] == kept  # in the order of the profile
    by_id = {r["turn_id"]: r for r in rows}
    assert all(is_mixed(by_id[t]) for t in kept)
    assert len(kept) - len(plain) == sum(after["added_by_floor"].values())
    total = sum(before["scored_by_action"].values())
    for action, count in before["scored_by_action"].items():
        mixed = sum(is_mixed(r) for r in rows if r["demonstration"] == [action])
        had = before["kept_by_action"].get(action, 0)
        wanted = -(-Fraction(str(part)) * count * len(plain) // total) if total else 0
        assert after["kept_by_action"].get(action, 0) == max(had, min(wanted, mixed))
