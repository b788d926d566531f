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
Arms = dict[str, list[Row]]


def all_figures(arms: Arms) -> list[tuple[str, str, str]]:
    """(file name, caption, SVG); the SVG is empty where the records hold nothing for it."""
    success, deviation = same_seeds(arms, _CURVES, ("adv", "e2e")), same_seeds(arms, _TRAINED, _DEVIATIONS)
    return [
        (
            "success-rollouts",
            f"Success against cumulative rollout turns, those of the profile included (figure 1 of the paper). "
            f"{_seeds(success)}",
            _success(success, "rollouts", "rollout turns"),
        ),
        (
            "success-seconds",
            f"Success against seconds of training, those of the profile included. {_seeds(success)}",
            _success(success, "seconds", "seconds"),
        ),
        (
            "reward-std",
            "Deviation of the reward within groups over training, running mean of 5 steps (figure 3 of the paper). "
            f"{_seeds(deviation)}",
            _deviation(deviation),
        ),
        (
            "gamma",
            "gamma = std / beta^2 of the turns of each set, on the KL path from pi_0 (Theorem 3.2)",
            _gamma(arms),
        ),
    ]


def same_seeds(arms: Arms, names: Sequence[str], anchors: Sequence[str]) -> Arms:
    """Those of `names` that have every seed which the `anchors` share, with those seeds alone.

    Start policies of different seeds differ, so that means over different seeds do not compare. Where the anchors
    share no seed, every arm has its own.
    """
    found = {name: arms[name] for name in names if name in arms}
    of_anchors = [{r["seed"] for r in found[name]} for name in anchors if name in found]
    if not of_anchors or not (shared := set.intersection(*of_anchors)):
        return found
    kept = {name: [r for r in rows if r["seed"] in shared] for name, rows in found.items()}
    return {name: rows for name, rows in kept.items() if len(rows) == len(shared)}


def _seeds(arms: Arms) -> str:
    """Which seeds the curves are means over."""
    of_arm = {name: ", ".join(str(r["seed"]) for r in rows) for name, rows in arms.items()}
    if len(set(of_arm.values())) == 1:
        return f"Seeds {next(iter(of_arm.values()))}"
    return "Seeds: " + "; ".join(f"{name} {seeds}" for name, seeds in of_arm.items())


def standalone(svg: str) -> str:
    """An SVG file: with its name space, a size and a white ground."""
    attributes = 'xmlns="http://www.w3.org/2000/svg" width="690" style="background:#fff;font-family:sans-serif"'
    return svg.replace("<svg ", f"<svg {attributes} ", 1) + "\n"


def _success(arms: Arms, axis: str, title: str) -> str:
    lines = [
        charts.Series(name, points, ARMS[name].color) for name in arms if (points := stats.curve(arms[name], axis))
    ]
    return charts.line_chart(lines, title, "success")


def _deviation(arms: Arms) -> str:
    lines = [
        charts.Series(name, stats.smooth(points, 5), ARMS[name].color)
        for name in arms
        if (points := stats.by_step(arms[name], "group_std"))
    ]
    return charts.line_chart(lines, "step", "std of the reward in a group")


def _gamma(arms: Arms) -> str:
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
