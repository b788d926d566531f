"""Adaptive profiling against fixed K: turns with known success rates, and the counts of a real profile.

Both profiles see the same rollouts, the adaptive one fewer of them. Beside what the adaptive one does: the fewest
rollouts that any stopping rule needs for the same agreement, a bound that holds even for rules that know how turns are
distributed; the fewest without any error; and how far two fixed profiles agree.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from pivotrl.config import Adaptive
from pivotrl.io import read_jsonl
from pivotrl.profiling.adaptive import Chain, Plan, is_kept, judge, make_plan
from pivotrl.profiling.evidence import learn

LAMBDA, ERROR = 0.6, Adaptive().error
Turns = list[list[float]]  # rewards of K rollouts each
Rate = Callable[[random.Random], float]

# Right rollouts of 8 by turn: the profile of `pivotrl run experiment=demo`, 200 turns.
DEMO = (30, 18, 17, 17, 20, 18, 31, 24, 25)


def public(draw: random.Random) -> float:
    """71 % without signal, as in the paper; of those of mean <= 0.6, 44.7 % all wrong, as in the public set."""
    return draw.choices([0.0, 1.0, draw.random()], [0.13, 0.55, 0.32])[0]


def hopeless(draw: random.Random) -> float:
    """The same share without signal, most of it all wrong: a policy that is too weak for most turns."""
    return draw.choices([0.0, 1.0, draw.random()], [0.42, 0.26, 0.32])[0]


def u_shaped(draw: random.Random) -> float:
    """No turn is exactly hopeless or certain: many are nearly so."""
    return draw.betavariate(0.25, 0.35)


def uniform(draw: random.Random) -> float:
    """Every success rate as often as any other."""
    return draw.random()


def from_rates(rate: Rate, turns: int, k: int, draw: random.Random) -> tuple[Turns, Turns]:
    """Two independent profiles of the same turns."""
    rates = [rate(draw) for _ in range(turns)]
    first, second = ([[float(draw.random() < p) for _ in range(k)] for p in rates] for _ in range(2))
    return first, second


def from_counts(counts: Sequence[int], turns: int, draw: random.Random) -> Turns:
    """Turns whose right rollouts are distributed as in a profile, in any order."""
    k = len(counts) - 1
    made = []
    for right in draw.choices(range(k + 1), counts, k=turns):
        rewards = [1.0] * right + [0.0] * (k - right)
        draw.shuffle(rewards)
        made.append(rewards)
    return made


def adaptive_against_fixed(made: Turns, calibration: int, draw: random.Random) -> dict[str, float]:
    """What an adaptive profile of these turns samples and keeps, in waves as `pivotrl profile` has them."""
    k = len(made[0])
    seen: Counter[tuple[int, int]] = Counter((k, int(sum(r))) for r in made[:calibration])
    played = made[:calibration]
    parts: list[tuple[int, Plan | None]] = [(len(played), None)]
    while len(played) < len(made):
        waiting = made[len(played) : 2 * len(played)]
        plan = make_plan(learn(seen, k), Adaptive().round, LAMBDA, ERROR, parts, len(waiting))
        wave = [play(plan, r, draw.random()) for r in waiting]
        seen.update((len(r), int(sum(r))) for r in wave)
        played = played + wave
        parts.append((len(wave), plan))
    fixed, early = ([kept(r) for r in profile] for profile in (made, played))
    expected = judge(learn(seen, k), LAMBDA, parts)
    return {
        "uninformative_share": 1 - sum(0 < sum(r) < k for r in made) / len(made),
        "fewer_rollouts": k * len(made) / sum(map(len, played)),
        **agreement(fixed, early),
        "agreement_expected": expected.agreement,
        "agreement_promised": expected.agreement_bound,
        "agreement_over_all_turns": sum(a == b for a, b in zip(fixed, early, strict=True)) / len(fixed),
    }


def play(plan: Plan, rewards: list[float], draw: float) -> list[float]:
    """The rollouts that the plan samples of a turn."""
    n = plan.round
    while not plan.is_decided(rewards[:n], draw):
        n += plan.round
    return rewards[:n]


def kept(rewards: list[float]) -> bool:
    return is_kept(int(sum(rewards)), len(rewards), LAMBDA)


def agreement(fixed: list[bool], other: list[bool]) -> dict[str, float]:
    """Of two kept sets: 2 |A and B| / (|A| + |B|), and the second one's precision and recall of the first."""
    both = sum(a and b for a, b in zip(fixed, other, strict=True))
    return {
        "agreement": 2 * both / (sum(fixed) + sum(other)) if any(fixed) or any(other) else 1.0,
        "precision": both / sum(other) if any(other) else 1.0,
        "recall": both / sum(fixed) if any(fixed) else 1.0,
    }


def fewest_rollouts(final: Sequence[float], error: float = ERROR) -> float:
    """No stopping rule whose kept set agrees to 1 - `error` needs fewer rollouts a turn, whatever it knows of `final`
    (shares of turns by right rollouts), and whatever it decides of a turn that it stops.

    By duality: agreement is `error` at most where (1 + error) lost + (1 - error) foreign <= 2 error kept; for any price
    of this the best value is a lower bound, and the largest one is taken. With no error: what is certain, only.
    """
    chain = Chain(final, 1, LAMBDA)
    if not error:
        rule = chain.solve(math.inf)[0]
        return math.fsum(p * c for p, c in zip(final, chain.by_final(rule)[0], strict=True))
    budget = 2 * error * math.fsum(p for p, k in zip(final, chain.kept, strict=True) if k)
    prices = [math.exp(i / 20) for i in range(20, 160)]
    return max(chain.solve(price, (1 + error, 1 - error), free=True)[1] - price * budget for price in prices)


def limits(final: Sequence[float]) -> dict[str, float]:
    k = len(final) - 1
    return {
        "fewer_rollouts_at_most": k / fewest_rollouts(final),
        "fewer_rollouts_without_error": k / fewest_rollouts(final, 0.0),
    }


def shares(made: Turns) -> list[float]:
    counts = Counter(int(sum(r)) for r in made)
    return [counts[j] / len(made) for j in range(len(made[0]) + 1)]


def simulated(rate: Rate, turns: int, k: int, seeds: int) -> dict[str, float]:
    runs = []
    for seed in range(seeds):
        draw = random.Random(seed)
        first, second = from_rates(rate, turns, k, draw)
        two = agreement([kept(r) for r in first], [kept(r) for r in second])
        found = adaptive_against_fixed(first, Adaptive().calibration_turns, draw)
        runs.append({**found, "agreement_of_two_fixed": two["agreement"]})
    many = from_rates(rate, 200_000, k, random.Random(99))[0]
    return mean(runs) | limits(shares(many))


def resampled(counts: Sequence[int], turns: int, seeds: int) -> dict[str, float]:
    """Many turns that are distributed as those of a small profile."""
    runs = []
    for seed in range(seeds):
        draw = random.Random(seed)
        runs.append(adaptive_against_fixed(from_counts(counts, turns, draw), Adaptive().calibration_turns, draw))
    return mean(runs) | limits([c / sum(counts) for c in counts])


def profiled(run_dir: Path) -> Turns:
    """The turns of a run's profile that got all K rollouts, right or wrong each."""
    rows = [row["rewards"] for row in read_jsonl(run_dir / "profile" / "turns.jsonl")]
    k = max(map(len, rows))
    return [r for r in rows if len(r) == k and set(r) <= {0.0, 1.0}]


def replay(rewards: Turns) -> dict[str, float]:
    """A real profile of fixed K, in orders that tell nothing; half of its turns calibrate if they are few."""
    runs = []
    for seed in range(20):
        draw = random.Random(seed)
        draw.shuffle(rewards)
        calibration = min(Adaptive().calibration_turns, len(rewards) // 2)
        runs.append(adaptive_against_fixed(rewards, calibration, draw))
    return {"turns": len(rewards), "k": len(rewards[0])} | mean(runs) | limits(shares(rewards))


def with_histogram(rewards: Turns) -> dict[str, float]:
    """`profile.adaptive.histogram`: each half of a real profile by the plan that the other half's counts give."""
    k, runs = len(rewards[0]), []
    for seed in range(20):
        draw = random.Random(seed)
        draw.shuffle(rewards)
        half, rollouts = len(rewards) // 2, 0
        fixed: list[bool] = []
        early: list[bool] = []
        for known, waiting in ((rewards[:half], rewards[half:]), (rewards[half:], rewards[:half])):
            seen = Counter((k, int(sum(r))) for r in known)
            plan = make_plan(learn(seen, k), Adaptive().round, LAMBDA, ERROR, turns=len(waiting))
            wave = [play(plan, r, draw.random()) for r in waiting]
            rollouts += sum(map(len, wave))
            fixed, early = fixed + [kept(r) for r in waiting], early + [kept(r) for r in wave]
        runs.append({"fewer_rollouts": k * len(rewards) / rollouts, **agreement(fixed, early)})
    return mean(runs)


def mean(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of every figure over the runs, and the least agreement."""
    found = {name: sum(r[name] for r in runs) / len(runs) for name in runs[0]}
    return found | {"least_agreement": min(r["agreement"] for r in runs)}
