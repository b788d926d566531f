"""Intervals for success rates, and pass@k. Pure Python."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any


def wilson(successes: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """95 % Wilson score interval of a share of independent trials (sound for small counts and for 0 and 1)."""
    if count == 0:
        return 0.0, 1.0
    p = successes / count
    center = (p + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(p * (1 - p) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return max(0.0, center - half), min(1.0, center + half)


def bootstrap(per_task: Sequence[float], seed: int = 0, draws: int = 2000) -> tuple[float, float]:
    """95 % percentile interval of the mean over tasks, resampling tasks: trials of one task are not independent."""
    rng, count = random.Random(seed), len(per_task)
    means = sorted(math.fsum(rng.choices(per_task, k=count)) / count for _ in range(draws))
    return means[int(0.025 * draws)], means[int(0.975 * draws) - 1]


def interval(per_task: Sequence[float]) -> tuple[float, float]:
    """95 % interval of a mean over tasks: Wilson for one yes or no a task, else a bootstrap over tasks."""
    if set(per_task) <= {0.0, 1.0}:
        return wilson(int(sum(per_task)), len(per_task))
    return bootstrap(per_task)


def success_row(per_task: Mapping[str, float]) -> dict[str, Any]:
    """Mean over tasks with its interval, their number, and the tasks' own values."""
    values = list(per_task.values())
    return {
        "success": sum(values) / len(values) if values else None,
        "ci": list(interval(values)),
        "n": len(values),
        "per_task": dict(per_task),
    }


def pass_at_k(trials: int, successes: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k trials succeeds (Chen et al. 2021), from `trials` >= k of them."""
    if not 1 <= k <= trials or not 0 <= successes <= trials:
        raise ValueError(f"pass@{k} of {successes} successes in {trials} trials")
    return 1.0 - math.comb(trials - successes, k) / math.comb(trials, k)


def paired_difference(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> dict[str, float | list[float]]:
    """Mean difference over the same tasks with its 95 % paired bootstrap interval."""
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    low, high = bootstrap(differences, seed)
    return {"difference": math.fsum(differences) / len(differences), "ci": [low, high]}
