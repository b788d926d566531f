"""The report's part on what training did to the pivots, by demonstrated action: what was mastered, what was lost."""

from __future__ import annotations

from collections.abc import Sequence

from pivotrl.tracking import charts
from pivotrl.tracking.actions import tool_of
from pivotrl.tracking.report_data import JsonDict, RunData, outcome
from pivotrl.tracking.report_sections import COLORS, POLICY_COLORS, series

_KINDS = ("all wrong", "mixed", "all right")
_MOST = 12  # lines of the table


def watched_view(data: RunData) -> JsonDict | None:
    """Success of the policies on the watched tasks; None where nobody looked."""
    policies = {"train": ("PivotRL", POLICY_COLORS["pivotrl"]), "e2e": ("end-to-end", POLICY_COLORS["e2e"])}
    lines, exported = [], []
    for stage, rows in data.watched.items():
        name, color = policies[stage]
        if (line := series(rows, "success", name, color)) is not None:
            lines.append(line)
        summary = data.summaries.get(stage, {})
        if summary.get("exported_step", summary.get("steps")) != summary.get("steps"):
            exported.append(f"{name} was exported at step {summary['exported_step']}")
    if not lines:
        return None
    last = next(iter(data.watched.values()))[-1]
    title = f"Success on {last['n']} watched tasks ({last['split']})"
    return {"title": title, "svg": charts.line_chart(lines, "step"), "exported": exported}


def outcomes_view(data: RunData) -> JsonDict | None:
    """Outcomes of the groups of the first and of the last third of the steps; None with fewer than three steps.

    A group that was mixed teaches; one that is all right has been learned; one that has become all wrong is lost:
    without a right rollout it has no advantage, so on-policy training does not find the way back.
    """
    steps = sorted({row["step"] for row in data.groups})
    if len(steps) < 3:
        return None
    third = len(steps) // 3
    first, last = set(steps[:third]), set(steps[-third:])
    actions: dict[str, list[JsonDict]] = {}
    for row in data.groups:
        actions.setdefault(tool_of(row), []).append(row)
    order = sorted(actions.items(), key=lambda item: (-len(item[1]), item[0]))
    rows = [
        {"name": name, "parts": [_part([r for r in groups if r["step"] in part]) for part in (first, last)]}
        for name, groups in order[:_MOST]
    ]
    return {"steps": third, "rows": rows, "more": len(order) - len(rows)}


def _part(groups: Sequence[JsonDict]) -> JsonDict:
    kinds = [outcome(row) for row in groups]
    strip = charts.strip([(kind, kinds.count(kind), COLORS[kind]) for kind in _KINDS])
    return {"groups": len(groups), "strip": strip, "wrong": kinds.count("all wrong"), "right": kinds.count("all right")}
