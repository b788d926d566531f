"""What the report shows, gathered from the files of a run. Every file may be missing: that part is then "not run"."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pivotrl.errors import UserError
from pivotrl.io import whole_rows
from pivotrl.stages import ROLLOUT_STAGES, STAGES
from pivotrl.trajectories.turn_lines import with_states

JsonDict = dict[str, Any]
STAGE_ORDER = tuple(STAGES)


@dataclass(frozen=True)
class Example:
    """One turn with its rollouts, for reading side by side."""

    kind: str  # "pivot" | "all wrong" | "all right" | "mixed"
    profile: JsonDict  # the row of profile/turns.jsonl
    turn: JsonDict | None  # the row of turns/turns.jsonl
    rollouts: list[JsonDict]  # rows of profile/rollouts.jsonl; equal ones are one row with "times"


@dataclass
class RunData:
    run_dir: Path
    config: JsonDict = field(default_factory=dict)
    summaries: dict[str, JsonDict] = field(default_factory=dict)
    pipeline: JsonDict = field(default_factory=dict)
    profile: list[JsonDict] = field(default_factory=list)
    pivots: set[str] | None = None  # turn ids; None: not selected
    metrics: dict[str, list[JsonDict]] = field(default_factory=dict)
    watched: dict[str, list[JsonDict]] = field(default_factory=dict)  # rows of <stage>/curve.jsonl
    groups: list[JsonDict] = field(default_factory=list)  # rows of train/groups.jsonl
    examples: list[Example] = field(default_factory=list)
    audit_examples: list[JsonDict] = field(default_factory=list)  # rows of audit/examples.jsonl
    reasons: dict[str, Counter[str]] = field(default_factory=dict)  # verdict reasons of the turns of `ranked`


def load(run_dir: Path) -> RunData:
    """Read a run; torn last lines (a stage still at work, or killed) are ignored."""
    data = RunData(run_dir, _read_config(run_dir))
    for stage in STAGE_ORDER:
        if (summary := _read_json(run_dir / STAGES[stage].folder / "summary.json")) is not None:
            data.summaries[stage] = summary
    data.pipeline = _read_json(run_dir / "pipeline.json") or {}
    data.profile = list(whole_rows(run_dir / "profile" / "turns.jsonl"))
    pivots = run_dir / "select" / "pivots.jsonl"
    if pivots.is_file():
        data.pivots = {str(row.get("turn_id", row.get("id"))) for row in whole_rows(pivots)}
    for stage in ("warmup", "train", "sft", "e2e"):
        if rows := last_of_each_step(whole_rows(run_dir / stage / "metrics.jsonl")):
            data.metrics[stage] = rows
    for stage in ROLLOUT_STAGES:
        if rows := last_of_each_step(whole_rows(run_dir / stage / "curve.jsonl")):
            data.watched[stage] = rows
    data.groups = list(whole_rows(run_dir / "train" / "groups.jsonl"))
    _read_turns_to_show(data)
    data.audit_examples = list(whole_rows(run_dir / "audit" / "examples.jsonl"))
    return data


def _read_json(path: Path) -> JsonDict | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _read_config(run_dir: Path) -> JsonDict:
    """The resolved configuration: the run's, else that of the latest stage that was run by itself."""
    import yaml

    for path in (run_dir / "config.yaml", *(run_dir / STAGES[s].folder / "config.yaml" for s in reversed(STAGE_ORDER))):
        if path.is_file():
            loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
            return loaded if isinstance(loaded, dict) else {}
    return {}


def last_of_each_step(rows: Iterable[JsonDict]) -> list[JsonDict]:
    """One row a step, the latest written: a resumed run may have logged a step twice."""
    by_step = {row["step"]: row for row in rows if "step" in row}
    return [by_step[step] for step in sorted(by_step)]


def outcome(row: Mapping[str, Any]) -> str:
    """ "all wrong", "all right", "mixed", or "unscorable" where nothing could be scored."""
    if row.get("mean") is None or row.get("variance") is None:
        return "unscorable"
    if row["variance"] > 0:
        return "mixed"
    return "all right" if row["mean"] > 0.5 else "all wrong"


def counts(rows: Sequence[JsonDict]) -> dict[str, int]:
    """Number of turns of each outcome."""
    found = {"all wrong": 0, "mixed": 0, "all right": 0, "unscorable": 0}
    for row in rows:
        found[outcome(row)] += 1
    return found


def choose(
    rows: Sequence[JsonDict], pivots: set[str] | None, each: tuple[int, int, int] = (4, 2, 2)
) -> list[tuple[str, JsonDict]]:
    """Turns worth reading: pivots of most variance and many distinct actions, then all-wrong and all-right ones."""
    mixed = [r for r in rows if outcome(r) == "mixed"]
    wanted = [r for r in mixed if pivots is not None and r["turn_id"] in pivots]
    kind = "pivot" if wanted else "mixed"
    interesting = sorted(wanted or mixed, key=lambda r: (-r["variance"], -(r.get("unique_actions") or 0), r["turn_id"]))
    chosen = [(kind, r) for r in _spread(interesting, each[0])]
    for name, count in (("all wrong", each[1]), ("all right", each[2])):
        same = sorted(
            (r for r in rows if outcome(r) == name), key=lambda r: (-(r.get("unique_actions") or 0), r["turn_id"])
        )
        chosen += [(name, r) for r in _spread(same, count)]
    return chosen


def _spread(rows: Sequence[JsonDict], count: int) -> list[JsonDict]:
    """The first `count` rows, of different trajectories as far as that goes."""
    first: list[JsonDict] = []
    rest: list[JsonDict] = []
    seen: set[str] = set()
    for row in rows:
        trajectory = str(row["turn_id"]).rpartition("#")[0]
        (rest if trajectory in seen else first).append(row)
        seen.add(trajectory)
    return (first + rest)[:count]


def ranked(data: RunData, each: int = 8) -> list[tuple[str, list[JsonDict]]]:
    """(title, turns): the most and the least informative ones, and those with rollouts that tell nothing."""
    rows = data.profile

    def first(kind: str, order: Callable[[JsonDict], Any]) -> list[JsonDict]:
        return _spread(sorted((r for r in rows if outcome(r) == kind), key=order), each)

    def variety(row: JsonDict) -> Any:
        return (-(row.get("unique_actions") or 0), row["turn_id"])

    def lost(row: JsonDict) -> int:
        return (row.get("unscorable") or 0) + (row.get("truncated") or 0)

    return [
        ("Most informative: largest deviation of the reward", first("mixed", lambda r: (-r["variance"], *variety(r)))),
        ("Least informative: always wrong, however varied", first("all wrong", variety)),
        ("Least informative: always right", first("all right", variety)),
        (
            "Unscorable or truncated rollouts",
            sorted((r for r in rows if lost(r)), key=lambda r: (-lost(r), r["turn_id"]))[:each],
        ),
    ]


def _read_turns_to_show(data: RunData) -> None:
    """Fill `examples` and `reasons`, in one pass over the turns and one over the rollouts."""
    chosen = choose(data.profile, data.pivots)
    ids = {str(row["turn_id"]) for _, row in chosen}
    listed = {str(row["turn_id"]) for _, rows in ranked(data) for row in rows}
    if not ids | listed:
        return
    path = data.run_dir / "turns" / "turns.jsonl"
    try:
        turns = {turn["id"]: turn for turn in with_states(path, _rows_about(path, ids, "id"))}
    except UserError:  # the turns are being cut anew: their examples wait for the next report
        turns = {}
    rollouts: dict[str, list[JsonDict]] = {}
    for row in _rows_about(data.run_dir / "profile" / "rollouts.jsonl", ids | listed, "turn_id"):
        if row["turn_id"] in ids:
            rollouts.setdefault(row["turn_id"], []).append(row)
        if row["turn_id"] in listed:
            data.reasons.setdefault(row["turn_id"], Counter())[str(row.get("reason") or "(none)")] += 1
    data.examples = [
        Example(kind, r, turns.get(r["turn_id"]), merge_equal(rollouts.get(r["turn_id"], []))) for kind, r in chosen
    ]


_FIRST_KEY = re.compile(rb'\{"(?:turn_id|id)": "((?:[^"\\]|\\.)*)"')


def _rows_about(path: Path, ids: set[str], key: str) -> Iterator[JsonDict]:
    """Rows whose `key` is in `ids`. Other lines are not parsed where they begin with it: rollout files are large."""
    if not path.is_file():
        return
    needles = {json.dumps(i, ensure_ascii=False)[1:-1].encode() for i in ids}
    with path.open("rb") as file:
        for line in file:
            found = _FIRST_KEY.match(line)
            if line.endswith(b"\n") and (found is None or found[1] in needles):
                row = json.loads(line)
                if row.get(key) in ids:
                    yield row


def merge_equal(rollouts: Sequence[JsonDict]) -> list[JsonDict]:
    """Rollouts of one action and verdict become one row with "times"; best reward first, unscorable last."""
    merged: dict[str, JsonDict] = {}
    for row in rollouts:
        key = json.dumps(
            [row.get("action"), row.get("reward"), row.get("reason"), row.get("finish_reason")], sort_keys=True
        )
        merged.setdefault(key, {**row, "times": 0})["times"] += 1
    return sorted(merged.values(), key=lambda r: (r.get("reward") is None, -(r.get("reward") or 0), -r["times"]))


def ledger(data: RunData) -> list[JsonDict]:
    """Cost of each stage: rollouts, tokens, seconds, memory; None where a stage does not tell."""
    rows = []
    measured = data.pipeline.get("stages", {})
    for stage in STAGE_ORDER:
        summary, process = data.summaries.get(stage, {}), measured.get(stage, {})
        if not summary and not process:
            continue
        tokens, engine = summary.get("tokens") or {}, summary.get("engine") or {}
        rows.append(
            {
                "stage": stage,
                "rollouts": summary.get("rollouts"),
                "prompt": tokens.get("prompt"),
                "cached": tokens.get("cached"),
                "generated": tokens.get("generated"),
                "trained": tokens.get("trained"),
                "engine_seconds": sum(c["seconds"] for k, c in engine.items() if k != "reprofile") if engine else None,
                "seconds": process.get("seconds", summary.get("seconds")),
                "peak_rss_gib": process.get("peak_rss_gib"),
            }
        )
        again = engine.get("reprofile") if stage == "train" else None
        if again:  # its seconds are in those of the stage
            parts = {key: again[key] for key in ("rollouts", "prompt", "cached", "generated")}
            parts |= {"engine_seconds": again["seconds"], "stage": "train, profiling again"}
            rows.append({**dict.fromkeys(rows[-1]), **parts})
    return rows
