"""Selection of pivots from a finished profile (method.md 1.2, eq. 5). Pure Python; runs in seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

from pivotrl.config import Config
from pivotrl.errors import UserError
from pivotrl.io import read_jsonl, write_json, write_jsonl

Row = dict[str, Any]


def scored(row: Row) -> list[Fraction]:
    """Rewards as exact fractions, so that `mean < lambda` is strict and no float residue decides."""
    return [Fraction(str(r)) for r in row["rewards"] if r is not None]


def is_mixed(row: Row) -> bool:
    rewards = scored(row)
    return bool(rewards) and max(rewards) > min(rewards)


def is_below(row: Row, lambda_diff: float) -> bool:
    rewards = scored(row)
    return bool(rewards) and sum(rewards) < Fraction(str(lambda_diff)) * len(rewards)


#: cand: every scored turn; mixed: var > 0; adv: var > 0 and mean < lambda (eq. 5); adv_zeros: mean < lambda, so that
#: all-wrong turns stay in (NVIDIA's practice).
SETS: dict[str, Callable[[Row, float], bool]] = {
    "cand": lambda row, lam: bool(scored(row)),
    "mixed": lambda row, lam: is_mixed(row),
    "adv": lambda row, lam: is_mixed(row) and is_below(row, lam),
    "adv_zeros": is_below,
}


def histogram(rows: Iterable[Row], bins: int = 10) -> list[int]:
    """Turns by mean reward in equal bins of [0, 1]; a mean of 1 falls in the last."""
    counts = [0] * bins
    for row in rows:
        if row["mean"] is not None:
            counts[min(int(row["mean"] * bins), bins - 1)] += 1
    return counts


def run_select(cfg: Config, run_dir: Path) -> dict[str, Any]:
    """Read `profile/turns.jsonl`, write `select/pivots.jsonl` and `select/summary.json`.

    Raises UserError when no turn is kept (unless `select.allow_empty`), after writing the summary.
    """
    profile = run_dir / "profile" / "turns.jsonl"
    if not profile.exists():
        raise UserError(f"{profile} does not exist: run `pivotrl profile run_dir={run_dir}` first")
    rows = list(read_jsonl(profile))
    lam = cfg.select.lambda_diff
    kept = [row for row in rows if SETS[cfg.select.set](row, lam)]
    counts = {name: sum(rule(row, lam) for row in rows) for name, rule in SETS.items()}
    write_jsonl(run_dir / "select" / "pivots.jsonl", kept)
    summary: dict[str, Any] = {
        "set": cfg.select.set,
        "lambda_diff": lam,
        "turns": len(rows),
        "counts": counts,
        "unscored": len(rows) - counts["cand"],
        "all_right": sum(bool(s := scored(row)) and min(s) == 1 for row in rows),
        "all_wrong": sum(bool(s := scored(row)) and max(s) == 0 for row in rows),
        "kept": len(kept),
        "histogram": histogram(rows),
    }
    write_json(run_dir / "select" / "summary.json", summary)
    if not kept and not cfg.select.allow_empty:
        bars = " ".join(f"{i / 10:.1f}:{n}" for i, n in enumerate(summary["histogram"]))
        raise UserError(
            f"no pivot kept: none of {len(rows)} turns is in the set {cfg.select.set!r} with lambda_diff {lam}.\n"
            f"Turns by mean reward: {bars}; unscorable: {summary['unscored']}.\n"
            "Profile more turns or rollouts (profile.rollouts_per_turn), choose another set "
            "(select.set=mixed|adv_zeros), or raise select.lambda_diff."
        )
    return summary
