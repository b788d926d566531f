"""The report's section on the audit of the verifier; None where `pivotrl audit-verifier` was not run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pivotrl.tracking.report_data import JsonDict, RunData

_SHOWN_EXAMPLES = 16
_EFFECTS = {
    "demonstration": "the demonstration itself",
    "preserving": "does the same",
    "breaking": "does something else",
    "exploit": "exploit",
}


def audit_view(data: RunData) -> JsonDict | None:
    summary = data.summaries.get("audit-verifier")
    if not summary:
        return None
    verifier = summary.get("verifier") or {}
    return {
        "verifier": f"{verifier.get('name')} (version {verifier.get('version')})",
        "turns": summary.get("turns"),
        "accept_at": summary.get("accept_at"),
        "truth": _truth(summary.get("truth") or {}),
        "rates": [
            ("false negatives", _percent(summary.get("false_negative_rate")), "the same, rejected"),
            ("false positives", _percent(summary.get("false_positive_rate")), "something else, accepted"),
            ("unscorable", _percent(summary.get("unscorable_rate")), "neither right nor wrong"),
        ],
        "kinds": [_kind(row) for row in summary.get("kinds") or []],
        "exploits": ", ".join(summary.get("paying_exploits") or []),
        "examples": [_example(row) for row in _mixed(data.audit_examples)],
        "kept": len(data.audit_examples),
    }


def _truth(told: Mapping[str, Any]) -> str:
    if told.get("by") in (None, "labels"):
        return "the labels of the mutations; nothing was executed"
    left = ", ".join(f"{reason} {count}" for reason, count in (told.get("not_executed") or {}).items())
    rest = f"; the labels of the mutations for the rest ({left})" if left else ""
    return f"execution in {told['by']} for {told.get('executed')} of {told.get('asked')} actions{rest}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.2f} %"


def _kind(row: Mapping[str, Any]) -> JsonDict:
    same = row["effect"] in ("demonstration", "preserving")
    mean = row.get("mean_reward")
    return {
        "kind": str(row["kind"]).replace("_", " "),
        "effect": _EFFECTS.get(row["effect"], row["effect"]),
        "tried": row["tried"],
        "accepted": row["accepted"],
        "unscorable": row["unscorable"],
        "mean": "–" if mean is None else f"{mean:.2f}",
        "wrong": row["rejected"] if same else row["accepted"],
    }


def _mixed(rows: Sequence[JsonDict]) -> list[JsonDict]:
    """The first wrong verdict of every kind, then the second, and so on."""
    seen: dict[tuple[Any, Any], int] = {}
    ranked = []
    for place, row in enumerate(rows):
        kind = (row.get("effect"), row.get("kind"))
        seen[kind] = seen.get(kind, -1) + 1
        ranked.append((seen[kind], place, row))
    return [row for _, _, row in sorted(ranked, key=lambda item: item[:2])[:_SHOWN_EXAMPLES]]


def _example(row: JsonDict) -> JsonDict:
    return {
        "wrong": str(row.get("wrong", "")).replace("_", " "),
        "kind": str(row.get("kind", "")).replace("_", " "),
        "where": row.get("where", ""),
        "turn": row.get("turn_id", ""),
        "reward": f"{row.get('reward', 0):g}",
        "reason": row.get("reason", ""),
        "demonstration": _text(row.get("demonstration")),
        "action": _text(row.get("action")),
    }


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
