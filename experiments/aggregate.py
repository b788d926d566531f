"""Figures over seeds: means with intervals that resample seeds and, within them, tasks. Pure Python."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pivotrl.profiling import theory

Row = dict[str, Any]
Cells = Mapping[int, Mapping[str, float]]  # seed -> task -> value


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its 95 % interval; `seeds` and `n` (values) say of how many."""

    mean: float
    low: float
    high: float
    seeds: int
    n: int


def estimate(cells: Cells, draws: int = 2000, seed: int = 0) -> Estimate | None:
    """Mean of the seeds' means; two-level bootstrap: seeds are drawn, then tasks of each. None without a value."""
    groups = [list(tasks.values()) for tasks in cells.values() if tasks]
    if not groups:
        return None
    rng = random.Random(seed)

    def once() -> float:
        drawn = rng.choices(groups, k=len(groups))
        return math.fsum(math.fsum(rng.choices(g, k=len(g))) / len(g) for g in drawn) / len(drawn)

    means = sorted(once() for _ in range(draws))
    mean = math.fsum(math.fsum(g) / len(g) for g in groups) / len(groups)
    count = sum(map(len, groups))
    return Estimate(mean, means[int(0.025 * draws)], means[int(0.975 * draws) - 1], len(groups), count)


def paired(ours: Cells, theirs: Cells) -> Estimate | None:
    """Difference on the seeds and tasks that both have."""
    cells: dict[int, dict[str, float]] = {}
    for seed in sorted(set(ours) & set(theirs)):
        shared = sorted(set(ours[seed]) & set(theirs[seed]))
        cells[seed] = {task: ours[seed][task] - theirs[seed][task] for task in shared}
    return estimate(cells)


def per_task(records: Sequence[Row], mode: str) -> dict[int, dict[str, float]]:
    """seed -> task -> value of one arm; `mode`: "greedy", "sampled" or "ood"."""
    return {r["seed"]: dict(r["policy"][mode]["per_task"]) for r in records if r["policy"].get(mode)}


def mean_of(records: Sequence[Row], *keys: str) -> float | None:
    """Mean over seeds of a number deep in the records; None where no record has it."""
    values = []
    for record in records:
        value: Any = record
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, int | float) and not isinstance(value, bool):
            values.append(float(value))
    return math.fsum(values) / len(values) if values else None


def budget(record: Row, key: str) -> float:
    """Rollout turns or seconds of an arm, its profile included where its pivots need one."""
    own = float(record.get("training", {}).get(key, 0.0))
    return own + (float(record["profile"][key]) if record["profiled"] else 0.0)


def curve(records: Sequence[Row], axis: str) -> list[tuple[float, float]]:
    """(cumulative rollouts or seconds, success), means over the seeds at each step that all of them have."""
    curves = [{point["step"]: point for point in r["curve"] if point["success"] is not None} for r in records]
    curves = [c for c in curves if c]
    if not curves:
        return []
    steps = sorted(set.intersection(*(set(c) for c in curves)))
    offset = [float(r["profile"][axis]) if r["profiled"] else 0.0 for r in records if r["curve"]]
    start = math.fsum(offset) / len(offset) if offset else 0.0
    return [
        (
            start + math.fsum(c[step][axis] for c in curves) / len(curves),
            math.fsum(c[step]["success"] for c in curves) / len(curves),
        )
        for step in steps
    ]


def reaches(points: Sequence[tuple[float, float]], level: float) -> float | None:
    """Where a curve first reaches `level`, by linear interpolation; None where it never does."""
    before: tuple[float, float] | None = None
    for x, y in points:
        if y >= level:
            if before is None or y == before[1]:
                return x
            return before[0] + (x - before[0]) * (level - before[1]) / (y - before[1])
        before = (x, y)
    return None


def by_step(records: Sequence[Row], name: str) -> list[tuple[float, float]]:
    """A metric of the training steps, mean over seeds; a step that some seed lacks is left out."""
    rows = [r["training"][name] for r in records if r.get("training", {}).get(name)]
    if not rows:
        return []
    points = []
    for step in range(min(map(len, rows))):
        values = [row[step] for row in rows if row[step] is not None]
        if len(values) == len(rows):
            points.append((float(step), math.fsum(values) / len(values)))
    return points


def smooth(points: Sequence[tuple[float, float]], window: int) -> list[tuple[float, float]]:
    """Running means over `window` steps back."""
    result = []
    for i, (x, _) in enumerate(points):
        part = [y for _, y in points[max(0, i - window + 1) : i + 1]]
        result.append((x, math.fsum(part) / len(part)))
    return result


def set_of(right: int, scored: int, lambda_diff: float) -> set[str]:
    """The sets that a turn with `right` of `scored` rollouts right is in."""
    found = {"cand"}
    if 0 < right < scored:
        found.add("mixed")
        if right < lambda_diff * scored:
            found.add("adv")
    return found


def gamma(right_of_scored: Mapping[str, int], wanted: str, lambda_diff: float, beta: float) -> tuple[float, float, int]:
    """(mean std of the reward under pi_0, mean gamma = std under pi_beta / beta^2, turns) of a set (Theorem 3.2).

    Each turn is its empirical policy over right and wrong; pi_beta is the KL-regularised optimum from it.
    """
    stds, gammas, turns = 0.0, 0.0, 0
    for key, count in right_of_scored.items():
        right, scored = (int(part) for part in key.split("/"))
        if wanted in set_of(right, scored, lambda_diff):
            rho = right / scored
            stds += count * theory.signal_std([rho, 1 - rho], [1.0, 0.0])
            gammas += count * theory.population_grpo_score([rho, 1 - rho], [1.0, 0.0], beta)
            turns += count
    return (stds / turns, gammas / turns, turns) if turns else (0.0, 0.0, 0)
