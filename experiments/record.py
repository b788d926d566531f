"""One small JSON file a run of an arm: every number of docs/results.md comes from one, and each names its run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from experiments.arms import Arm
from pivotrl import __version__
from pivotrl.errors import UserError
from pivotrl.io import read_json, read_jsonl, whole_rows
from pivotrl.profiling.select import binary_counts
from pivotrl.tracking.report_data import last_of_each_step

Row = dict[str, Any]
_TRAINED = {"pivotrl": "train", "sft": "sft", "e2e": "e2e"}


def record_path(records: Path, experiment: str, arm: str, seed: int, split: str) -> Path:
    suffix = "" if split == "test" else f"-{split}"
    return records / f"{experiment}-{arm}-seed{seed}{suffix}.json"


def make_record(experiment: str, arm: Arm, seed: int, folder: Path, shared: Path) -> Row:
    """What a finished arm showed and cost."""
    evaluated = read_json(folder / "evaluate" / "summary.json")
    profile_folder = (folder if arm.own_profile else shared) / "profile"
    profile = read_json(profile_folder / "summary.json")
    record: Row = {
        "experiment": experiment,
        "arm": arm.name,
        "seed": seed,
        "run_dir": str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder),
        "version": __version__,
        "split": evaluated.get("split", "test"),
        "environment": f"{evaluated['environment']} {evaluated['environment_version']}",
        "start_policy": start_policy(profile),  # the arms of a seed must share it
        "policy": evaluated["policies"][arm.policy],
        "profile": {"rollouts": profile["rollouts"], "seconds": _engine_seconds(profile), **_profile(profile_folder)},
        "profiled": arm.profiled,
    }
    if (stage := _TRAINED.get(arm.policy)) is not None:
        record |= _training(folder / stage)
    if (folder / "select" / "summary.json").exists():
        selected = read_json(folder / "select" / "summary.json")
        record["select"] = {k: selected[k] for k in ("set", "lambda_diff", "kept", "counts", "turns")}
    return record


def start_policy(profile: Row) -> str:
    """The hash of the weights of pi_0, which a profile's summary holds."""
    return str(profile["fingerprint"]["weights"])


def _engine_seconds(profile: Row) -> float:
    return float(sum(cost["seconds"] for cost in profile.get("engine", {}).values()))


def _profile(folder: Path) -> Row:
    """How many turns had r of K right: from it every set, its reward deviation and gamma follow."""
    counts: dict[str, int] = {}
    for row in read_jsonl(folder / "turns.jsonl"):
        if (found := binary_counts(row)) is not None and found[1]:
            key = f"{found[0]}/{found[1]}"
            counts[key] = counts.get(key, 0) + 1
    return {"right_of_scored": dict(sorted(counts.items()))}


def _training(folder: Path) -> Row:
    summary = read_json(folder / "summary.json")
    metrics = last_of_each_step(whole_rows(folder / "metrics.jsonl"))
    seconds = _running(float(row.get("seconds", 0.0)) for row in metrics)
    again = _running(float(row.get("reprofile_rollouts", 0.0)) for row in metrics)  # not among those trained on
    curve = last_of_each_step(whole_rows(folder / "curve.jsonl"))
    return {
        "training": {
            "steps": summary["steps"],
            "rollouts": summary.get("rollouts", 0) + int(again[-1] if again else 0),
            "tokens": summary.get("tokens", {}),
            "seconds": seconds[-1] if seconds else 0.0,
            **{key: summary[key] for key in ("kl_to_start", "max_kl", "reached") if key in summary},
            **{name: _rounded(metrics, name) for name in ("reward", "group_std", "mixed_groups")},
        },
        "curve": [
            {
                "step": row["step"],
                "rollouts": row["rollouts"] + int(again[row["step"] - 1] if row["step"] else 0),
                "seconds": seconds[row["step"] - 1] if row["step"] else 0.0,
                "success": row["success"],
                "n": row["n"],
                "split": row["split"],
            }
            for row in curve
            if row["step"] <= len(seconds)
        ],
    }


def _running(values: Iterable[float]) -> list[float]:
    total, sums = 0.0, []
    for value in values:
        total += value
        sums.append(total)
    return sums


def _rounded(rows: list[Row], name: str) -> list[float | None]:
    """One value a step; None where a step had none (no group was scored)."""
    values = [row.get(name) for row in rows]
    return [round(v, 4) if isinstance(v, int | float) else None for v in values] if any(values) else []


def matched_kl(folder: Path) -> float:
    """KL to pi_0 of a finished arm on the profiled rollouts. Raises UserError where it was not measured."""
    path = folder / "evaluate" / "summary.json"
    if not path.exists():
        raise UserError(f"{folder}: its arm is not evaluated yet, so its KL to pi_0 is not known; run it first")
    for policy in read_json(path)["policies"].values():
        if (found := (policy.get("drift") or {}).get("kl_in_domain")) and found["kl"]:
            return float(found["kl"])
    raise UserError(f"{path} has no KL to pi_0; set evaluate.drift above 0 in the experiment")
