"""The report's part on the profile: where the signal is, in which turns, what selections would keep, what it pays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from pivotrl.tracking import charts
from pivotrl.tracking.actions import tool_of
from pivotrl.tracking.break_even import break_even
from pivotrl.tracking.report_data import JsonDict, RunData, outcome, ranked
from pivotrl.tracking.report_sections import COLORS, number

_MOST_GROUPS = 12  # lines of a table
_KINDS = ("all wrong", "mixed", "all right", "unscorable")
_PAPER_RATIO = 72 / 130  # end-to-end steps that reached the accuracy of one pivot step (method.md 3.3)


def profile_view(data: RunData) -> JsonDict | None:
    """Everything of the section; None without a profile."""
    if not data.profile:
        return None
    select = data.summaries.get("select") or {}
    return {
        "depths": _depth_chart(data.profile),
        "groups": _groups(data),
        "lambdas": _lambdas(select),
        "informative": _informative(select),
        "lists": [{"title": title, "rows": [_line(data, r) for r in rows]} for title, rows in ranked(data) if rows],
        "verdicts": _verdicts(data.summaries.get("profile") or {}),
        "adaptive": _adaptive((data.summaries.get("profile") or {}).get("adaptive") or {}),
        "break_even": _break_even(data),
    }


def _depth_chart(rows: Sequence[JsonDict]) -> str:
    """Turns by depth, stacked by outcome; bins of one turn, or wider ones where trajectories are long."""
    placed = [r for r in rows if isinstance(r.get("depth"), int)]
    if not placed:
        return ""
    width = 1 + max(r["depth"] for r in placed) // 30
    counts: dict[tuple[int, str], int] = {}
    for row in placed:
        key = (row["depth"] // width, outcome(row))
        counts[key] = counts.get(key, 0) + 1
    bars = []
    for place in sorted({place for place, _ in counts}):
        name = f"depth {place * width}" + (f" to {(place + 1) * width - 1}" if width > 1 else "")
        for kind in _KINDS:
            if n := counts.get((place, kind), 0):
                bars.append(
                    charts.Bar(place * width, (place + 1) * width, n, COLORS[kind], f"{n} turns {kind}, {name}")
                )
    return charts.histogram(bars, "depth (assistant turns before it)", "turns")


def _groups(data: RunData) -> list[JsonDict]:
    """Tables by tool, domain and trajectory; those with one line alone are left out."""
    keys: list[tuple[str, str, Callable[[JsonDict], str]]] = [
        ("By tool of the demonstrated action", "tool", tool_of),
        ("By domain", "domain", lambda r: " / ".join(str(r[k]) for k in ("domain", "family") if r.get(k)) or "(none)"),
        ("By trajectory", "trajectory", _trajectory),
    ]
    tables = []
    for title, name, key in keys:
        groups: dict[str, list[JsonDict]] = {}
        for row in data.profile:
            groups.setdefault(key(row), []).append(row)
        if len(groups) < 2:
            continue
        # The groups that hold most signal first: the sum of the reward's std over their turns (Theorem 3.2).
        order = sorted(groups.items(), key=lambda item: (-sum(map(_std, item[1])), item[0]))
        lines = [_group_line(group, rows, data.pivots) for group, rows in order[:_MOST_GROUPS]]
        tables.append({"title": title, "name": name, "rows": lines, "more": len(order) - len(lines)})
    return tables


def _trajectory(row: JsonDict) -> str:
    return str(row.get("trajectory_id") or str(row["turn_id"]).rpartition("#")[0])


def _std(row: Mapping[str, Any]) -> float:
    return math.sqrt(row.get("variance") or 0.0)


def _group_line(name: str, rows: Sequence[JsonDict], pivots: set[str] | None) -> JsonDict:
    means = [r["mean"] for r in rows if r.get("mean") is not None]
    kinds = [outcome(r) for r in rows]
    return {
        "name": name,
        "turns": len(rows),
        "strip": charts.strip([(kind, kinds.count(kind), COLORS[kind]) for kind in _KINDS]),
        "mixed": f"{100 * kinds.count('mixed') / len(rows):.0f} %",
        "pivots": "–" if pivots is None else sum(r["turn_id"] in pivots for r in rows),
        "mean": f"{fmean(means):.2f}" if means else "–",
        "std": f"{fmean([_std(r) for r in rows if r.get('mean') is not None]):.2f}" if means else "–",
        "unscorable": sum(r.get("unscorable", 0) for r in rows),
        "truncated": sum(r.get("truncated", 0) for r in rows),
    }


def _lambdas(select: Mapping[str, Any]) -> JsonDict | None:
    """What each lambda would keep."""
    kept = select.get("adv_by_lambda")
    if not kept:
        return None
    zeros = select.get("adv_zeros_by_lambda") or {}
    lines = [charts.Series("D_adv", [(float(k), float(n)) for k, n in kept.items()], COLORS["mixed"])]
    if zeros:
        name = "D_adv and all-wrong turns"
        lines.append(charts.Series(name, [(float(k), float(n)) for k, n in zeros.items()], "#7b8494"))
    return {
        "svg": charts.line_chart(lines, "λ", "turns kept"),
        "rows": [(k, n, number(zeros.get(k))) for k, n in kept.items()],
        "used": f"{select['lambda_diff']:g}" if select.get("set") in ("adv", "adv_zeros") else None,
    }


def _informative(select: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(G, share of a random turn, share of a pivot), the last from the second profile alone."""
    random = select.get("informative_share") or {}
    kept = select.get("kept_informative_share_second_profile") or {}
    sizes = sorted({*random, *kept}, key=int)
    return [(g, *(f"{100 * s[g]:.0f} %" if g in s else "–" for s in (random, kept))) for g in sizes]


def _line(data: RunData, row: JsonDict) -> JsonDict:
    reasons: Mapping[str, int] = data.reasons.get(row["turn_id"], {})
    return {
        "id": row["turn_id"],
        "depth": row.get("depth"),
        "tool": tool_of(row),
        "mean": "–" if row.get("mean") is None else f"{row['mean']:.2f}",
        "std": "–" if row.get("variance") is None else f"{_std(row):.2f}",
        "unscorable": row.get("unscorable", 0),
        "truncated": row.get("truncated", 0),
        "reasons": ", ".join(f"{reason} × {n}" for reason, n in sorted(reasons.items(), key=lambda x: (-x[1], x[0]))),
    }


def _verdicts(profile: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    found = profile.get("verdicts") or {}
    total = sum(found.values())
    return [(reason, number(n), f"{100 * n / total:.1f} %") for reason, n in found.items()]


def _adaptive(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What an adaptive profile saved, and how it stands to one of all K rollouts."""
    names = {
        "saved_share": "rollouts saved",
        "agreement_bound": "agreement of the kept sets, promised",
        "expected_agreement": "agreement of the kept sets, expected",
        "expected_lost": "pivots of all K that are not kept",
        "expected_foreign": "kept, though no pivots of all K",
        "uninformative_share_of_all_k": "turns without signal, of all K",
        "mean_reward_of_all_k": "mean reward, of all K",
    }
    return [(name, f"{100 * told[key]:.1f} %") for key, name in names.items() if key in told]


def _break_even(data: RunData) -> JsonDict | None:
    """Rollout turns of pivot RL, its profile included, against end-to-end RL on the same tasks.

    An episode is taken to have as many turns as a trajectory, and a step of end-to-end RL as many episodes as one of
    pivot RL has rollouts. How many of its steps do what a pivot step does was not measured here: the table assumes one,
    and the paper's 72 / 130.
    """
    algorithm, turns = data.config.get("algorithm") or {}, data.summaries.get("turns") or {}
    profile = data.summaries.get("profile") or {}
    try:
        length = turns["turns"]["kept"] / turns["trajectories"]["kept"]
        step = int(algorithm["pivots_per_step"]) * int(algorithm["group_size"])
        steps = int(algorithm["steps"])
        spent = profile.get("engine") or {"profile": profile}
        cost = float(sum(c["rollouts"] for c in spent.values()))
    except (KeyError, TypeError, ZeroDivisionError):
        return None
    if step < 1 or steps < 1 or length <= 0:
        return None
    lines = []
    for name, ratio in (("one end-to-end step for a pivot step", 1.0), ("72 for 130, as in the paper", _PAPER_RATIO)):
        found = break_even(cost, step, step * length, steps, ratio)
        lines.append(
            {
                "name": name,
                "steps": "never" if found.steps is None else f"{found.steps:.1f}",
                "pivot": number(round(found.pivot_cost)),
                "reference": number(round(found.reference_cost)),
                "saved": f"{100 * found.saved:.0f} %",
            }
        )
    return {"rows": lines, "length": f"{length:.1f}", "profile": number(round(cost)), "step": step, "steps": steps}
