"""The sections of the report as plain values and SVG texts, one function a section; None where it was not run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pivotrl.tracking import charts, results
from pivotrl.tracking.progress import duration
from pivotrl.tracking.report_data import Example, JsonDict, RunData, counts, ledger, outcome

COLORS = {
    "all wrong": "#c8ced8",
    "all right": "#8fb4ee",
    "mixed": "#0f8a7e",
    "easy": "#8fd0c8",
    "unscorable": "#e9b44c",
}
POLICY_COLORS = {"base": "#7b8494", "sft": "#c77d1e", "pivotrl": "#0f8a7e", "e2e": "#8a4fbf"}
_LINE_COLORS = ("#0f8a7e", "#c77d1e", "#3b6fd4", "#a5477f", "#7b8494")
_MESSAGE_CHARS = 900
_MOST_STEPS = 32  # bins of the means of K rollouts; of more they are not told apart

# Curves of the loop: title and the metrics it shows (those that a run has), with short names for the legend.
_CURVES: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("Reward of the rollouts", (("reward", "mean reward"),)),
    (
        "Groups by outcome (share)",
        (("mixed_groups", "mixed"), ("right_groups", "all right"), ("wrong_groups", "all wrong")),
    ),
    ("Standard deviation inside a group", (("group_std", "std"),)),
    ("Loss", (("loss", "loss"),)),
    ("KL to the start; trainer against engine", (("kl", "KL"), ("mismatch_abs", "mean |log-prob difference|"))),
    (
        "Mass on accepted actions",
        (
            ("theory_accepted_mass", "policy"),
            ("theory_accepted_mass_start", "start"),
            ("theory_accepted_mass_optimal", "predicted optimum"),
        ),
    ),
    (
        "Log-probs against the start (correlation)",
        (("theory_ratio_accepted", "accepted actions"), ("theory_ratio_other", "other actions")),
    ),
    ("Tokens clipped (share)", (("clip_low_fraction", "low"), ("clip_high_fraction", "high"))),
    ("Effective sample size (share)", (("importance_ess", "trainer against engine"),)),
    ("Gradient norm", (("grad_norm", "norm"),)),
    ("Entropy", (("entropy", "entropy"),)),
    ("Shares of the rollouts", (("unscorable", "unscorable"), ("truncated", "truncated"), ("malformed", "malformed"))),
    ("Tokens of an action", (("completion_tokens", "tokens"),)),
    (
        "Seconds of a step",
        (
            ("seconds", "all"),
            ("seconds_generate", "generate"),
            ("seconds_train", "train"),
            ("seconds_refit", "refit"),
        ),
    ),
)


def number(value: Any) -> str:
    """A number for a table: thin groups of thousands, a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, float) and (not math.isfinite(value) or not value.is_integer()):
        return f"{value:.4g}"
    return f"{int(value):,}".replace(",", "\u202f")


def landscape(data: RunData) -> JsonDict | None:
    rows = [r for r in data.profile if outcome(r) != "unscorable"]
    if not data.profile:
        return None
    threshold = float(((data.config.get("select") or {}).get("lambda_diff")) or 0.6)
    found = counts(data.profile)
    low = sum(outcome(r) == "mixed" and r["mean"] < threshold for r in data.profile)
    parts = [
        ("all wrong", found["all wrong"], COLORS["all wrong"]),
        ("mixed, mean below λ", low, COLORS["mixed"]),
        ("mixed, not below λ", found["mixed"] - low, COLORS["easy"]),
        ("all right", found["all right"], COLORS["all right"]),
        ("unscorable", found["unscorable"], COLORS["unscorable"]),
    ]
    bar = charts.stacked_bar(parts if found["unscorable"] else parts[:-1])
    select = data.summaries.get("select") or {}
    return {
        "bar": bar,
        "histogram": _mean_histogram(rows, threshold),
        "scatter": _mean_scatter(rows, threshold),
        "threshold": threshold,
        "sets": list((select.get("counts") or {}).items()),
        "used": select.get("set"),
        "warning": select.get("warning"),
        "unscorable": sum(r.get("unscorable", 0) for r in data.profile),
        "truncated": sum(r.get("truncated", 0) for r in data.profile),
        "no_action": sum(r.get("no_action", 0) for r in data.profile),
        "rollouts": sum(r.get("n", 0) for r in data.profile),
    }


def _color(row: JsonDict, threshold: float) -> str:
    kind = outcome(row)
    return COLORS["easy"] if kind == "mixed" and row["mean"] >= threshold else COLORS[kind]


def _mean_histogram(rows: Sequence[JsonDict], threshold: float) -> str:
    """Turns by mean reward, stacked by what they are: a bin on each j/K, where the means of binary rewards lie."""
    steps = min(max((r.get("n", 0) for r in rows), default=0) or 10, _MOST_STEPS)
    kinds = (
        ("all wrong", "all wrong"),
        ("mixed", "mixed, below λ"),
        ("easy", "mixed, not below λ"),
        ("all right", "all right"),
    )
    bars = []
    for i in range(steps + 1):
        inside = [r for r in rows if int(r["mean"] * steps + 0.5) == i]
        for color, name in kinds:
            count = sum(_color(r, threshold) == COLORS[color] for r in inside)
            title = f"{count} turns {name}, mean near {i / steps:.3g}"
            bars.append(charts.Bar((i - 0.5) / steps, (i + 0.5) / steps, count, COLORS[color], title))
    return charts.histogram(bars, "mean reward", "turns")


def _mean_scatter(rows: Sequence[JsonDict], threshold: float) -> str:
    places: dict[tuple[float, float], list[JsonDict]] = {}
    for row in rows:
        places.setdefault((round(row["mean"], 6), round(row["variance"], 6)), []).append(row)
    points = [
        charts.Point(m, v, len(same), _color(same[0], threshold), f"{len(same)} turns: mean {m:.3g}, variance {v:.3g}")
        for (m, v), same in places.items()
    ]
    parabola = [(i / 40, i / 40 * (1 - i / 40)) for i in range(41)]
    shade = (0.0, threshold, 0.004, f"D_adv: variance > 0, mean < {threshold:g}")
    return charts.scatter(
        points, "mean reward", "variance of the reward", (-0.04, 1.04), (-0.012, 0.3), shade, parabola
    )


def example_view(example: Example) -> JsonDict:
    turn = example.turn or {}
    messages = [m for m in turn.get("messages", []) if m.get("role") != "system"]
    shown = messages[-3:]
    row = example.profile
    return {
        "kind": example.kind,
        "id": row["turn_id"],
        "depth": row.get("depth"),
        "mean": None if row.get("mean") is None else f"{row['mean']:.3g}",
        "variance": None if row.get("variance") is None else f"{row['variance']:.3g}",
        "earlier": len(turn.get("messages", [])) - len(shown),
        "messages": [{"role": m.get("role"), "text": _cut(_message_text(m))} for m in shown],
        "demonstration": action_text(turn["demonstration"]) if turn else None,
        "rollouts": [_rollout(r) for r in example.rollouts],
    }


def _rollout(row: JsonDict) -> JsonDict:
    reward = row.get("reward")
    return {
        "times": row["times"],
        "reward": "?" if reward is None else f"{reward:g}",
        "class": "unscorable" if reward is None else "right" if reward > 0.5 else "wrong",
        "reason": row.get("reason", ""),
        "finish": row.get("finish_reason"),
        "text": _cut(action_text(row.get("action") or {})) or "(nothing)",
    }


def _message_text(message: Mapping[str, Any]) -> str:
    calls = "\n".join(_call_text(c) for c in message.get("tool_calls", []))
    return "\n".join(part for part in (str(message.get("content") or ""), calls) if part)


def _call_text(call: Mapping[str, Any]) -> str:
    return f"→ {call.get('name')}({json.dumps(call.get('arguments'), ensure_ascii=False)})"


def action_text(action: Mapping[str, Any]) -> str:
    """An action for reading: its text, calls and what was malformed; thinking is left out."""
    parts = [str(action.get("text") or ""), *(_call_text(c) for c in action.get("tool_calls", []))]
    parts += [f"⚠ {problem}" for problem in action.get("problems", [])]
    return "\n".join(part for part in parts if part.strip())


def _cut(text: str) -> str:
    if len(text) <= _MESSAGE_CHARS:
        return text
    return f"{text[: _MESSAGE_CHARS - 200]} … ({len(text) - _MESSAGE_CHARS + 100} characters) … {text[-100:]}"


def series(rows: Sequence[JsonDict], key: str, name: str, color: str) -> charts.Series | None:
    """The curve of one metric; None when no row has it as a number."""
    points = [(float(r["step"]), _as_float(r[key])) for r in rows if key in r]
    return charts.Series(name, points, color) if any(math.isfinite(y) for _, y in points) else None


def _as_float(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def train_curves(data: RunData) -> JsonDict | None:
    rows = data.metrics.get("train")
    if not rows:
        return None
    main, used = [], {"step"}
    for title, metrics in _CURVES:
        lines: list[charts.Series] = []
        for key, name in metrics:
            if (line := series(rows, key, name, _LINE_COLORS[len(lines) % len(_LINE_COLORS)])) is not None:
                lines.append(line)
                used.add(key)
        if lines:
            main.append({"title": title, "svg": charts.line_chart(lines, "step")})
    rest = sorted({k for r in rows for k in r} - used)
    others = []
    for key in rest:
        if (line := series(rows, key, key, _LINE_COLORS[2])) is not None:
            others.append({"title": key, "svg": charts.line_chart([line], "step")})
    return {"main": main, "others": others, "steps": len(rows)}


def sft_curves(data: RunData) -> JsonDict | None:
    lines = []
    for stage, color in (("warmup", POLICY_COLORS["base"]), ("sft", POLICY_COLORS["sft"])):
        rows = data.metrics.get(stage, [])
        if (line := series(rows, "loss", stage, color)) is not None:
            lines.append(line)
    return {"svg": charts.line_chart(lines, "step", "loss per token")} if lines else None


def results_view(summary: Mapping[str, Any] | None) -> JsonDict | None:
    if not summary or not summary.get("policies"):
        return None
    kept = results.columns(summary)
    rows: list[JsonDict] = []
    intervals: dict[str, list[charts.Interval]] = {c: [] for c in kept}
    for name, policy in summary["policies"].items():
        title = results.NAMES.get(name, name)
        rows.append(
            {
                "name": title,
                "color": POLICY_COLORS.get(name, "#555"),
                "cells": [results.format_cell(policy.get(c)) for c in kept],
            }
        )
        for column in kept:
            cell, value = policy.get(column) or {}, results.share(policy.get(column))
            if value is not None:
                low, high = cell.get("ci") or (value, value)
                intervals[column].append(charts.Interval(title, value, low, high, POLICY_COLORS.get(name, "#555555")))
    titles = [results.COLUMNS[c] for c in kept]
    plots = [{"title": t, "svg": charts.interval_chart(intervals[c])} for c, t in zip(kept, titles, strict=True)]
    names = {str(p["ood"]["name"]) for p in summary["policies"].values() if (p.get("ood") or {}).get("name")}
    return {
        "columns": titles,
        "rows": rows,
        "plots": plots,
        "ood_name": ", ".join(sorted(names)),
        "families": _families(summary),
        "differences": _differences(summary.get("differences") or {}),
    }


def _families(summary: Mapping[str, Any]) -> JsonDict | None:
    """Greedy success by task family, families down and policies across."""
    by_policy = {n: (p.get("greedy") or {}).get("by_family") or {} for n, p in summary["policies"].items()}
    families = sorted({f for cells in by_policy.values() for f in cells})
    if not families:
        return None

    def shown(cell: Any) -> str:
        return (
            results.format_cell(cell) if isinstance(cell, Mapping) else "–" if cell is None else f"{100 * cell:.1f} %"
        )

    rows = [{"name": f, "cells": [shown(cells.get(f)) for cells in by_policy.values()]} for f in families]
    return {"columns": [results.NAMES.get(n, n) for n in by_policy], "rows": rows}


def _differences(differences: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows of {"pivotrl - base": {"greedy": {"difference": 0.1, "ci": [low, high]}}}, in points."""
    rows: list[tuple[str, str]] = []
    for pair, modes in differences.items():
        for mode, found in modes.items():
            if found.get("difference") is None:
                continue
            text = f"{100 * found['difference']:+.1f} points"
            if interval := found.get("ci"):
                text += f" [{100 * interval[0]:+.1f}, {100 * interval[1]:+.1f}]"
            names = " − ".join(results.NAMES.get(n, n) for n in pair.split(" - "))
            rows.append((f"{names}, {results.COLUMNS.get(mode, mode)}", text))
    return rows


def ledger_view(data: RunData) -> JsonDict | None:
    rows = ledger(data)
    if not rows:
        return None
    columns = [
        ("rollouts", "rollout turns"),
        ("prompt", "prompt tokens"),
        ("cached", "of these cached"),
        ("generated", "generated tokens"),
        ("trained", "trained tokens"),
        ("engine_seconds", "engine time"),
    ]
    kept = [(key, title) for key, title in columns if any(r[key] is not None for r in rows)]
    table = []
    for row in rows:
        seconds, peak = row["seconds"], row["peak_rss_gib"]
        cells = [_cell(key, row[key]) for key, _ in kept]
        cells += ["–" if seconds is None else duration(seconds), "–" if peak is None else f"{peak:.1f} GiB"]
        table.append({"stage": row["stage"], "cells": cells})
    total = [_cell(key, sum(r[key] or 0 for r in rows)) for key, _ in kept]
    total += [duration(sum(r["seconds"] or 0 for r in rows)), ""]
    return {"columns": [t for _, t in kept] + ["time", "peak memory"], "rows": table, "total": total}


def _cell(key: str, value: Any) -> str:
    return duration(value) if key.endswith("seconds") and value is not None else number(value)
