"""The results table: policies by settings, each a share with its confidence interval."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAMES = {"base": "Base", "sft": "SFT", "pivotrl": "PivotRL", "e2e": "end-to-end RL"}
COLUMNS = {"greedy": "greedy", "sampled": "sampled", "ood": "out of domain"}


def share(cell: Mapping[str, Any] | None) -> float | None:
    """The share of a cell: `success` in the domain, `accuracy` outside it."""
    if not cell:
        return None
    value = cell.get("success", cell.get("accuracy"))
    return None if value is None else float(value)


def format_cell(cell: Mapping[str, Any] | None) -> str:
    """`"42.5 % [31.0, 54.8] n=80"`, or a dash where nothing was measured."""
    value = share(cell)
    if cell is None or value is None:
        return "-"
    text = f"{100 * value:.1f} %"
    if interval := cell.get("ci"):
        text += f" [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]"
    return text + (f" n={cell['n']}" if cell.get("n") is not None else "")


def columns(summary: Mapping[str, Any]) -> list[str]:
    """Those settings that at least one policy has."""
    policies = summary.get("policies", {}).values()
    return [c for c in COLUMNS if any(share(p.get(c)) is not None for p in policies)]


def text_table(summary: Mapping[str, Any]) -> str:
    """The table as plain text, for the terminal."""
    kept = columns(summary)
    rows = [["policy", *(COLUMNS[c] for c in kept)]]
    for name, policy in summary.get("policies", {}).items():
        rows.append([NAMES.get(name, name), *(format_cell(policy.get(c)) for c in kept)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)
