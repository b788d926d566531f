"""The sequential test against fixed K: its stated error holds, it saves rollouts, and it decides nothing rashly."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from pathlib import Path

import pytest
from fake_profile import make, turns, use
from hypothesis import given, settings
from hypothesis import strategies as st

from pivotrl.config import Adaptive, Select
from pivotrl.io import read_json, read_jsonl
from pivotrl.local_rollouts import State
from pivotrl.profiling.adaptive import Plan, is_kept, judge, make_plan
from pivotrl.profiling.evidence import Learnt, learn, of_histogram
from pivotrl.profiling.profiler import waves
from pivotrl.profiling.select import SETS, run_select
from pivotrl.profiling.stage import run_profile

K = 16


def simulated(n: int, seed: int, wrong: float = 0.42, right: float = 0.26) -> list[list[float]]:
    """Rewards of K rollouts of turns with known success rates; two thirds of the turns can teach nothing."""
    draw = random.Random(seed)
    shares = [wrong, right, 1 - wrong - right]
    rates = [draw.choices([0.0, 1.0, draw.random()], shares)[0] for _ in range(n)]
    return [[float(draw.random() < p) for _ in range(K)] for p in rates]


def learnt(made: list[list[float]]) -> Learnt:
    return learn(Counter((K, int(sum(rewards))) for rewards in made), K)


def plan_for(histogram: list[float], round: int, error: float, lambda_diff: float = 0.6) -> Plan:
    return make_plan(learn(of_histogram(histogram), len(histogram) - 1), round, lambda_diff, error)


def play(plan: Plan, rewards: list[float], draw: random.Random) -> list[float]:
    n, place = plan.round, draw.random()
    while not plan.is_decided(rewards[:n], place):
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
    made, draw = simulated(6000, seed), random.Random(seed)
    plan = make_plan(learnt(simulated(2000, seed + 100)), 2, 0.6, error)  # turns alike, not the same ones
    played = [play(plan, rewards, draw) for rewards in made]
    agreement, lost, foreign = compare(played, made)
    expected = plan.expected
    assert expected.agreement > expected.agreement_bound >= 1 - error
    assert agreement == pytest.approx(expected.agreement, abs=0.015)
    assert (lost, foreign) == (pytest.approx(expected.lost, abs=0.025), pytest.approx(expected.foreign, abs=0.01))
    assert sum(map(len, played)) / len(made) == pytest.approx(expected.rollouts, rel=0.06)


@pytest.mark.parametrize(("wrong", "right", "fewer"), [(0.13, 0.55, 2.5), (0.42, 0.26, 1.85)])
def test_half_of_the_rollouts_at_95_percent_agreement_on_the_kept_set(wrong: float, right: float, fewer: float) -> None:
    """71 % without signal, most of it all right or most of it all wrong; learnt from the turns before.

    Of the latter no rule that knows the distribution saves more than 2.08 times (test_profiling_benchmark.py).
    """
    turns, found, used = 8000, [], 0
    for seed in range(3):
        draw, made = random.Random(seed), simulated(turns, seed, wrong, right)
        played, seen = made[:128], Counter((K, int(sum(rewards))) for rewards in made[:128])
        parts: list[tuple[int, Plan | None]] = [(128, None)]
        while len(played) < turns:
            waiting = made[len(played) : 2 * len(played)]
            plan = make_plan(learn(seen, K), 1, 0.6, 0.05, parts, len(waiting))
            wave = [play(plan, rewards, draw) for rewards in waiting]
            seen.update((len(rewards), int(sum(rewards))) for rewards in wave)
            played = played + wave
            parts.append((len(wave), plan))
        agreement, lost, foreign = compare(played, made)
        whole = judge(learn(seen, K), 0.6, parts)
        assert agreement == pytest.approx(whole.agreement, abs=0.015) and lost < 0.11 and foreign < 0.03
        assert sum(map(len, played)) / turns == pytest.approx(whole.rollouts, rel=0.03)
        found.append(agreement)
        used += sum(map(len, played))
    assert sum(found) / len(found) >= 0.95
    assert used <= K * turns * len(found) / fewer


def test_stopped_turns_tell_the_distribution_of_all_k() -> None:
    """The estimate from turns that were stopped, against the counts of all their rollouts; its error is as stated."""
    made, draw = simulated(8000, 5), random.Random(5)
    whole = learnt(made)
    plan = make_plan(learnt(made[:300]), 1, 0.6, 0.1)
    played = [play(plan, rewards, draw) for rewards in made]
    assert sum(map(len, played)) < 0.6 * K * len(made)
    part = learn(Counter((len(rewards), int(sum(rewards))) for rewards in played), K)
    assert sum(part.final) == pytest.approx(1.0)
    for values in ([1.0, *[0.0] * K], [0.0, 1.0, 1.0, *[0.0] * (K - 2)], [float(j) for j in range(K + 1)]):
        error = math.sqrt(part.joint(values, values))
        assert part.mean(values) == pytest.approx(whole.mean(values), abs=4 * error + 1e-9)
        assert whole.joint(values, values) < part.joint(values, values)
        assert part.evidence_turns(values) < whole.evidence_turns(values)


def test_a_plan_makes_up_for_those_before_it() -> None:
    known = learnt(simulated(3000, 7))
    alone = make_plan(known, 1, 0.6, 0.05)
    loose = make_plan(known, 1, 0.6, 0.08)
    after = make_plan(known, 1, 0.6, 0.05, [(128, None), (1000, loose)], 2000)
    whole = judge(known, 0.6, [(128, None), (1000, loose), (2000, after)])
    assert whole.agreement_bound == pytest.approx(0.95, abs=1e-3) and whole.agreement_bound >= 0.95
    assert after.expected.agreement > alone.expected.agreement + 0.005
    assert after.expected.rollouts > alone.expected.rollouts
    # What went better than promised before is not spent.
    assert make_plan(known, 1, 0.6, 0.05, [(1000, None)], 2000) == alone


def test_of_whole_turns_the_estimate_is_the_counts() -> None:
    found = learn(of_histogram([30.0, 5.0, 5.0, 60.0]), 3)
    shares = [(h + 1 / 4) / 101 for h in (30, 5, 5, 60)]
    assert found.final == pytest.approx(shares)
    values = [1.0, 2.0, 0.0, -1.0]
    mean = sum(p * v for p, v in zip(shares, values, strict=True))
    variance = (sum(p * v * v for p, v in zip(shares, values, strict=True)) - mean**2) / 101
    assert found.joint(values, values) == pytest.approx(variance)
    assert found.evidence_turns(values) == pytest.approx(101)


def test_waves_are_whole_trajectories_that_double() -> None:
    states = [State(turn, ()) for turn in turns(200, seed=1)]
    parts = list(waves(states, 40, seed=3))
    assert sorted(s.turn.id for part in parts for s in part) == sorted(s.turn.id for s in states)
    seen = [{s.turn.trajectory_id for s in part} for part in parts]
    assert sum(map(len, seen)) == len(set.union(*seen)) == 200
    known = 40
    for part in parts[:-1]:
        assert known <= len(part) <= known + 6
        assert [s for s in states if s in part] == part
        known += len(part)
    assert len(parts) > 3
    assert list(waves(states, 0, seed=3)) == [states]
    assert list(waves([], 10, seed=3)) == [[]]


def test_no_error_means_only_certain_verdicts_stop() -> None:
    plan = make_plan(learnt(simulated(500, 0)), 1, 0.6, 0.0)
    assert plan.expected.error == 0
    for rule in plan.rules:
        for n, right in rule:
            finals = range(right, right + K - n + 1)
            assert {is_kept(j, K, 0.6) for j in finals} == {is_kept(right, n, 0.6)}
        assert (9, 5) not in rule  # 5 + 7 of 16 is not below 0.6
        assert (10, 10) in rule  # at least 10 of 16


def test_a_plan_is_the_cheapest_of_all_mixtures_of_two() -> None:
    """Against every stopping rule of a small problem and every mixture of two, by brute force."""
    histogram, total, error = [5e6, 2e6, 1e6, 4e6], 3, 0.1
    final = learn(of_histogram(histogram), total).final
    states = [(n, right) for n in (1, 2) for right in range(n + 1)]
    sequences = list(itertools.product([0, 1], repeat=total))
    orders = {j: sum(1 for s in sequences if sum(s) == j) for j in range(total + 1)}
    kept_share = sum(p for j, p in enumerate(final) if is_kept(j, total, 0.6))

    def cost(stops: set[tuple[int, int]]) -> tuple[float, float]:
        """(rollouts, how far the errors are beyond what the agreement allows)."""
        rollouts, beyond = 0.0, -2 * error * kept_share
        for s in sequences:
            weight = final[sum(s)] / orders[sum(s)]
            n = next((n for n in (1, 2) if (n, sum(s[:n])) in stops), total)
            rollouts += weight * n
            if is_kept(sum(s[:n]), n, 0.6) != is_kept(sum(s), total, 0.6):
                beyond += weight * (1 + error if is_kept(sum(s), total, 0.6) else 1 - error)
        return rollouts, beyond

    subsets = itertools.chain.from_iterable(itertools.combinations(states, r) for r in range(len(states) + 1))
    costs = [cost(set(subset)) for subset in subsets]
    best = min(rollouts for rollouts, beyond in costs if beyond <= 0)
    single = best
    for (a, over), (b, under) in itertools.product(costs, costs):
        if over > 0 >= under:
            share = under / (under - over)
            best = min(best, share * a + (1 - share) * b)
    plan = plan_for(histogram, 1, error)
    assert plan.expected.agreement_bound >= 1 - error
    assert plan.expected.rollouts == pytest.approx(best, rel=2e-3)
    assert best < single - 0.01  # a mixture is worth it here
    mixed = [(plan.share * a + (1 - plan.share) * b) for a, b in zip(*map(cost, map(set, plan.rules)), strict=True)]
    assert mixed == [pytest.approx(plan.expected.rollouts), pytest.approx(0.0, abs=1e-3)]


@given(
    st.lists(st.integers(0, 30), min_size=3, max_size=13),
    st.integers(1, 5),
    st.sampled_from([0.3, 0.6, 1.0]),
    st.floats(0, 0.3),
)
@settings(max_examples=40)
def test_every_plan_keeps_its_error(histogram: list[int], round: int, lam: float, error: float) -> None:
    plan = plan_for([float(h) for h in histogram], round, error, lam)
    assert 1 >= plan.expected.agreement >= plan.expected.agreement_bound >= 1 - error - 1e-9
    assert 0 <= plan.expected.error <= 1
    assert min(round, plan.rollouts) - 1e-9 <= plan.expected.rollouts <= plan.rollouts + 1e-9
    assert all(n > 0 for rule in plan.rules for n, _ in rule)


def test_unscorable_tells_nothing_and_partial_rewards_decide_nothing() -> None:
    plan = make_plan(learnt(simulated(500, 0)), 2, 0.6, 0.05)
    for draw in (0.0, 0.999):
        assert not plan.is_decided([None] * (K - 1), draw)
        assert plan.is_decided([None] * K, draw)
        assert plan.is_decided([1.0] * 10, draw)
        assert not plan.is_decided([1.0] * 9 + [0.5], draw)


@pytest.mark.parametrize("wrong", [([1, 2], 1, 0.1), ([1, 2, 3], 0, 0.1), ([1, 2, 3], 1, 1.0)])
def test_nonsense_is_refused(wrong) -> None:
    with pytest.raises(ValueError, match="make_plan"):
        plan_for(*wrong)


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
    told = summary["adaptive"]
    assert 60 < sum(told["histogram"]) <= len(made) + 1  # the calibration turns, and what the others told
    assert told["agreement_bound"] < told["expected_agreement"]
    assert told["expected_rollouts"] == pytest.approx(summary["rollouts"] / summary["turns"], rel=0.1)
    assert told["uninformative_share_of_all_k"] == pytest.approx(fixed["uninformative_share"], abs=0.08)
    assert told["mean_reward_of_all_k"] == pytest.approx(fixed["mean_reward"], abs=0.05)
    cfg.select = Select(allow_empty=True)
    shares = [run_select(cfg, tmp_path / run)["informative_share"]["8"] for run in ("fixed", "adaptive")]
    assert shares[0] == pytest.approx(1 - fixed["uninformative_share"])  # of G = K, the share of mixed turns
    assert shares[1] == pytest.approx(1 - told["uninformative_share_of_all_k"])
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
