"""The sequential test against fixed K: its stated error holds, it saves rollouts, and it decides nothing rashly."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from fake_profile import make, turns, use
from hypothesis import given, settings
from hypothesis import strategies as st

from pivotrl.config import Adaptive, Select
from pivotrl.io import read_json, read_jsonl
from pivotrl.profiling.adaptive import hypergeometric, is_kept, make_plan
from pivotrl.profiling.select import SETS, run_select
from pivotrl.profiling.stage import run_profile

K = 16


def simulated(n: int, seed: int, wrong: float = 0.42, right: float = 0.26) -> list[list[float]]:
    """Rewards of K rollouts of turns with known success rates; two thirds of the turns can teach nothing."""
    draw = random.Random(seed)
    shares = [wrong, right, 1 - wrong - right]
    rates = [draw.choices([0.0, 1.0, draw.random()], shares)[0] for _ in range(n)]
    return [[float(draw.random() < p) for _ in range(K)] for p in rates]


def counts(made: list[list[float]]) -> list[int]:
    histogram = [0] * (K + 1)
    for rewards in made:
        histogram[int(sum(rewards))] += 1
    return histogram


def play(plan, rewards: list[float]) -> list[float]:
    n = 0
    while not plan.is_decided(rewards[:n]) or not n:
        n = min(n + plan.round, K)
    return rewards[:n]


def kept(rewards: list[float]) -> bool:
    return is_kept(int(sum(rewards)), len(rewards), 0.6)


def compare(played: list[list[float]], made: list[list[float]]) -> tuple[float, float, float]:
    """(agreement of the kept sets, share lost, share foreign)."""
    pairs = [(kept(part), kept(whole)) for part, whole in zip(played, made, strict=True)]
    both = sum(a and b for a, b in pairs)
    found, wanted = sum(a for a, _ in pairs), sum(b for _, b in pairs)
    return 2 * both / (found + wanted), 1 - both / wanted, 1 - both / found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("error", [0.05, 0.1])
def test_realised_agreement_and_cost_are_the_stated_ones(error: float, seed: int) -> None:
    made = simulated(6000, seed)
    plan = make_plan(counts(simulated(2000, seed + 100)), 2, 0.6, error)  # turns alike, not the same ones
    played = [play(plan, rewards) for rewards in made]
    agreement, lost, foreign = compare(played, made)
    assert plan.expected_agreement > plan.agreement_bound >= 1 - error
    assert agreement == pytest.approx(plan.expected_agreement, abs=0.015)
    assert (lost, foreign) == (
        pytest.approx(plan.expected_lost, abs=0.025),
        pytest.approx(plan.expected_foreign, abs=0.01),
    )
    assert sum(map(len, played)) / len(made) == pytest.approx(plan.expected_rollouts, rel=0.06)


def test_half_of_the_rollouts_at_95_percent_agreement_on_the_kept_set() -> None:
    """Turns as in the public conversational set: 44.7 % of its rows with a mean of at most 0.6 are all wrong."""
    found = []
    for seed in range(6):
        made = simulated(4000, seed, wrong=0.13, right=0.55)
        plan = make_plan(counts(made[:256]), 2, 0.6, 0.05)  # calibrated on some of them, as a profile is
        played = made[:256] + [play(plan, rewards) for rewards in made[256:]]
        agreement, lost, foreign = compare(played, made)
        assert agreement >= 0.935 and lost < 0.1 and foreign < 0.05
        assert sum(map(len, played)) <= K * len(made) / 2
        found.append(agreement)
    assert sum(found) / len(found) >= 0.95


def test_nothing_halves_the_rollouts_by_much_more_where_most_turns_are_hopeless() -> None:
    """Even where the shares are known: a turn that was wrong ten times is still a pivot too often to be given up."""
    final = [0.32 / 17 + (0.42 if j == 0 else 0.26 if j == K else 0.0) for j in range(K + 1)]
    known = make_plan([1e9 * p for p in final], 1, 0.6, 0.05)
    assert 0.95 <= known.expected_agreement < 0.96
    assert 1.85 < K / known.expected_rollouts < 2.1
    assert known.expected_foreign < 0.02 < known.expected_lost


def test_no_error_means_only_certain_verdicts_stop() -> None:
    plan = make_plan(counts(simulated(500, 0)), 1, 0.6, 0.0)
    assert plan.expected_error == 0
    for n, right in plan.stops:
        finals = range(right, right + K - n + 1)
        assert {is_kept(j, K, 0.6) for j in finals} == {is_kept(right, n, 0.6)}
    assert (9, 5) not in plan.stops  # 5 + 7 of 16 is not below 0.6
    assert (10, 10) in plan.stops  # at least 10 of 16


def test_a_plan_is_the_cheapest_of_all_for_its_price() -> None:
    """Against every stopping rule of a small problem, by brute force."""
    histogram, total, error = [50.0, 20.0, 10.0, 40.0], 3, 0.4
    mass = sum(histogram) + 1
    final = [(h + 1 / 4) / mass for h in histogram]
    states = [(n, right) for n in (1, 2) for right in range(n + 1)]
    sequences = list(itertools.product([0, 1], repeat=total))
    chance = {s: final[sum(s)] * hypergeometric(sum(s), sum(s), total, total) for s in sequences}
    orders = {j: sum(1 for s in sequences if sum(s) == j) for j in range(total + 1)}

    def cost(stops: set[tuple[int, int]]) -> tuple[float, float]:
        rollouts = wrong = 0.0
        for s in sequences:
            weight = chance[s] / orders[sum(s)]
            n = next((n for n in (1, 2) if (n, sum(s[:n])) in stops), total)
            rollouts += weight * n
            wrong += weight * (is_kept(sum(s[:n]), n, 0.6) != is_kept(sum(s), total, 0.6))
        return rollouts, wrong

    plan = make_plan(histogram, 1, 0.6, error)
    assert (plan.expected_rollouts, plan.expected_error) == pytest.approx(cost(set(plan.stops)))
    subsets = itertools.chain.from_iterable(itertools.combinations(states, r) for r in range(len(states) + 1))
    better = [c for c in map(cost, map(set, subsets)) if c[1] <= plan.expected_error + 1e-12]
    assert plan.expected_rollouts == pytest.approx(min(c[0] for c in better))


@given(
    st.lists(st.integers(0, 30), min_size=3, max_size=13),
    st.integers(1, 5),
    st.sampled_from([0.3, 0.6, 1.0]),
    st.floats(0, 0.3),
)
@settings(max_examples=40, deadline=None)
def test_every_plan_keeps_its_error(histogram: list[int], round: int, lam: float, error: float) -> None:
    plan = make_plan(histogram, round, lam, error)
    assert 1 >= plan.expected_agreement >= plan.agreement_bound >= 1 - error - 1e-9
    assert 0 <= plan.expected_error <= 1
    assert min(round, plan.rollouts) - 1e-9 <= plan.expected_rollouts <= plan.rollouts + 1e-9
    assert all(n > 0 for n, _ in plan.stops)


def test_unscorable_tells_nothing_and_partial_rewards_decide_nothing() -> None:
    plan = make_plan(counts(simulated(500, 0)), 2, 0.6, 0.05)
    assert not plan.is_decided([None] * (K - 1))
    assert plan.is_decided([None] * K)
    assert plan.is_decided([1.0] * 10)
    assert not plan.is_decided([1.0] * 9 + [0.5])


@pytest.mark.parametrize("wrong", [([1, 2], 1, 0.1), ([1, 2, 3], 0, 0.1), ([1, 2, 3], 1, 1.0), ([1, -2, 3], 1, 0.1)])
def test_nonsense_is_refused(wrong) -> None:
    histogram, round, error = wrong
    with pytest.raises(ValueError, match="make_plan"):
        make_plan(histogram, round, 0.6, error)


def test_an_adaptive_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the stage: fewer rollouts, whole rows, the same pivots but for a few, each turn a prefix of fixed K."""
    use(monkeypatch, tmp_path)
    made = turns(120, seed=2)
    fixed = run_profile(make(tmp_path / "fixed", made), tmp_path / "fixed")
    options = Adaptive(enabled=True, round=2, calibration_turns=60, error=0.05)
    cfg = make(tmp_path / "adaptive", made, adaptive=options)
    summary = run_profile(cfg, tmp_path / "adaptive")
    assert summary["turns"] == fixed["turns"]
    assert summary["rollouts"] < 0.8 * fixed["rollouts"]
    assert summary["adaptive"]["saved_share"] == pytest.approx(1 - summary["rollouts"] / fixed["rollouts"])
    assert sum(summary["adaptive"]["histogram"]) == 60
    rows = [list(read_jsonl(tmp_path / run / "profile" / "turns.jsonl")) for run in ("fixed", "adaptive")]
    assert [r["turn_id"] for r in rows[0]] == [r["turn_id"] for r in rows[1]]
    assert all(b["rewards"][:2] == a["rewards"][:2] for a, b in zip(*rows, strict=True))
    assert all(len(r["rewards"]) == r["n"] in (2, 4, 6, 8) for r in rows[1])
    same = sum(SETS["adv"](a, 0.6) == SETS["adv"](b, 0.6) for a, b in zip(*rows, strict=True))
    assert same >= 0.85 * len(rows[0])  # of borderline turns, independent rollouts decide differently anyway
    # Resumed from any cut, it is the same file; a finished one starts no engine.
    path = tmp_path / "adaptive" / "profile" / "rollouts.jsonl"
    whole = path.read_bytes()
    for cut in random.Random(0).sample(range(len(whole)), 6):
        path.write_bytes(whole[:cut])
        run_profile(cfg, tmp_path / "adaptive")
        assert path.read_bytes().count(b"\n") == whole.count(b"\n")
        assert sampled(path.read_bytes()) == sampled(whole), cut


def sampled(content: bytes) -> list[bytes]:
    # The scripted engine's cache is new after a resume; what it samples is not.
    return [line.split(b'"cached_prompt_tokens"')[0] for line in content.splitlines()]


def test_a_second_profile_shows_the_bias_of_selection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, tmp_path)
    cfg = make(tmp_path, turns(300, seed=4), in_flight=200, second_rollouts=16)
    run_profile(cfg, tmp_path)
    cfg.select = Select(lambda_diff=0.4)
    summary = run_select(cfg, tmp_path)
    # Turns of rate 0.5 that were unlucky pass a low bar: their first mean flatters them, the second does not.
    assert summary["kept_mean_second_profile"] > summary["kept_mean"] + 0.01
    first = {r["turn_id"]: r for r in read_jsonl(tmp_path / "profile" / "turns.jsonl")}
    again = list(read_jsonl(tmp_path / "profile" / "second_turns.jsonl"))
    assert {r["turn_id"] for r in again} == {i for i, r in first.items() if r["variance"]}
    assert any(r["rewards"][:8] != first[r["turn_id"]]["rewards"] for r in again)
    assert read_json(tmp_path / "profile" / "summary.json")["engine"]["second"]["rollouts"] == 16 * len(again)
