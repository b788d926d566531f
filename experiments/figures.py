"""The figures of the study, as SVG text by pivotrl.tracking.charts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from experiments import aggregate as stats
from experiments.aggregate import Row
from experiments.arms import ARMS
from pivotrl.tracking import charts

_CURVES = ("adv", "adv_reprofiled", "adv_long", "mixed", "cand", "e2e")
_DEVIATIONS = ("cand", "mixed", "adv")
_TRAINED = (*_DEVIATIONS, "adv_reprofiled")
_BETAS = [0.5 + 0.1 * i for i in range(16)]


def all_figures(arms: dict[str, list[Row]]) -> list[tuple[str, str, str]]:
    """(file name, caption, SVG); the SVG is empty where the records hold nothing for it."""
    return [
        (
            "success-rollouts",
            "Success against cumulative rollout turns, those of the profile included (figure 1 of the paper)",
            _success(arms, "rollouts", "rollout turns"),
        ),
        (
            "success-seconds",
            "Success against seconds of training, those of the profile included",
            _success(arms, "seconds", "seconds"),
        ),
        (
            "reward-std",
            "Deviation of the reward within groups over training, running mean of 5 steps (figure 3 of the paper)",
            _deviation(arms),
        ),
        (
            "gamma",
            "gamma = std / beta^2 of the turns of each set, on the KL path from pi_0 (Theorem 3.2)",
            _gamma(arms),
        ),
    ]


def standalone(svg: str) -> str:
    """An SVG file: with its name space, a size and a white ground."""
    attributes = 'xmlns="http://www.w3.org/2000/svg" width="690" style="background:#fff;font-family:sans-serif"'
    return svg.replace("<svg ", f"<svg {attributes} ", 1) + "\n"


def _success(arms: dict[str, list[Row]], axis: str, title: str) -> str:
    lines = [
        charts.Series(_with_seeds(name, arms[name]), points, ARMS[name].color)
        for name in _CURVES
        if name in arms and (points := stats.curve(arms[name], axis))
    ]
    return charts.line_chart(lines, title, "success")


def _with_seeds(name: str, records: Sequence[Row]) -> str:
    """A curve is a mean: over how many seeds."""
    return f"{name} ({len(records)} seed{'s' if len(records) > 1 else ''})"


def _deviation(arms: dict[str, list[Row]]) -> str:
    lines = [
        charts.Series(_with_seeds(name, arms[name]), stats.smooth(points, 5), ARMS[name].color)
        for name in _TRAINED
        if name in arms and (points := stats.by_step(arms[name], "group_std"))
    ]
    return charts.line_chart(lines, "step", "std of the reward in a group")


def _gamma(arms: dict[str, list[Row]]) -> str:
    counts: Counter[str] = Counter()
    for record in _one_a_seed([r for name, rows in arms.items() if not ARMS[name].own_profile for r in rows]):
        counts.update(record["profile"]["right_of_scored"])
    lambda_diff = next((r["select"]["lambda_diff"] for r in arms.get("adv", []) if "select" in r), 0.6)
    lines = []
    for name in _DEVIATIONS:
        points = [(beta, stats.gamma(counts, name, lambda_diff, beta)[1]) for beta in _BETAS]
        if any(y for _, y in points):
            lines.append(charts.Series(name, points, ARMS[name].color))
    return charts.line_chart(lines, "beta", "gamma")


def _one_a_seed(records: Sequence[Row]) -> list[Row]:
    return list({r["seed"]: r for r in records}.values())
