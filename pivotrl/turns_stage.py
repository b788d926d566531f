"""The `turns` stage: trajectories -> run_dir/turns/{turns,messages,skipped}.jsonl and, as commit mark, summary.json."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import IO, Any

from pivotrl import config
from pivotrl.environments.base import NoExpert
from pivotrl.errors import UserError
from pivotrl.io import write_json, write_jsonl
from pivotrl.trajectories.duplicates import DigestSet, TurnDigests
from pivotrl.trajectories.formats.openai_chat import to_row
from pivotrl.trajectories.reader import Skip, read_trajectories
from pivotrl.trajectories.schema import Defect, Trajectory, Turn
from pivotrl.trajectories.splits import SPLITS, SplitLedger, TaskSplits
from pivotrl.trajectories.spool import Spool
from pivotrl.trajectories.turn_lines import MESSAGES, TurnWriter
from pivotrl.trajectories.turns import split_turns


def run_turns(cfg: config.Config, run_dir: Path) -> dict[str, Any]:
    """Read, split and audit. Returns the summary, which is written last: with it the stage is done.

    The input is read once, into a spool beside the output, and split when all tasks are known: memory is one trajectory
    and at most 32 bytes each for its id, its task and each of its turns. Every row is accounted for:
    read = kept + sum(skipped), for trajectories and for turns. Raises `UserError` when no turn is left (audit written),
    and for a trajectory that two splits would share.
    """
    out = run_dir / "turns"
    out.mkdir(parents=True, exist_ok=True)
    (out / "summary.json").unlink(missing_ok=True)
    path, unshown = _source(cfg, out)
    splits = TaskSplits(cfg.seed, cfg.trajectories.warmup_fraction, cfg.trajectories.validation_fraction)
    audit = _Audit()
    temporary = [out / f"{name}.tmp" for name in (MESSAGES, "turns.jsonl", "skipped.jsonl")]
    with Spool(out) as spool:
        for item in chain(unshown, _kept_or_skipped(cfg, path)):
            audit.add(item)
            spool.add(item)
            if isinstance(item, Trajectory):
                splits.add(item.task_id)
        with (
            TurnWriter(turns=temporary[1], messages=temporary[0]) as turns,
            temporary[2].open("w", encoding="utf-8") as skipped,
        ):
            _cut(cfg, spool, splits, audit, turns, skipped)
    for file in temporary:
        file.replace(file.with_suffix(""))
    summary = audit.summary(len(splits))
    if not summary["turns"]["kept"]:
        write_json(out / "audit.json", summary)
        reasons = {**summary["trajectories"]["skipped"], **summary["turns"]["skipped"]}
        first = f" The first: {audit.first}." if audit.first else ""
        raise UserError(f"{path}: no turn was kept ({reasons}).{first} All are in {out / 'skipped.jsonl'}.")
    write_json(out / "summary.json", summary)
    return summary


def _cut(
    cfg: config.Config, spool: Spool, splits: TaskSplits, audit: _Audit, turns: TurnWriter, skipped: IO[str]
) -> None:
    """Trajectories -> turns, and lines of skipped.jsonl."""
    ledger, digests = SplitLedger(), TurnDigests()
    seen = DigestSet() if cfg.trajectories.deduplicate else None
    for item in spool:
        if isinstance(item, Skip):
            _write(skipped, {"kind": "trajectory", **item.to_json()})
            continue
        split = splits.of(item.task_id)
        ledger.add(item, split)
        if item.defect is not None:
            _write(skipped, {"kind": "rest", **_rest(item, item.defect).to_json()})
        for found in split_turns(item, split):
            turn = _filtered(found, cfg.trajectories.drop, seen, digests)
            audit.add_turn(turn)
            if isinstance(turn, Skip):
                _write(skipped, {"kind": "turn", **turn.to_json()})
            else:
                turns.write(turn)


def _rest(item: Trajectory, defect: Defect) -> Skip:
    """What follows the defect of a trajectory whose first turns are kept."""
    name, _, line = item.source.rpartition(":")
    return Skip(name, int(line), item.id, defect.reason, f"{defect.detail}; {defect.turns} turns from there on")


def _filtered(turn: Turn | Skip, drop: list[str], seen: DigestSet | None, digests: TurnDigests) -> Turn | Skip:
    """The turn, or why configuration leaves it out: a flag of `trajectories.drop`, or a copy of an earlier turn."""
    if isinstance(turn, Skip):
        return turn
    name, _, line = turn.source.rpartition(":")
    for flag in turn.flags:
        if flag in drop:
            return Skip(name, int(line), turn.id, flag, f"trajectories.drop has {flag}")
    if seen is not None and not seen.add(digests.of(turn)):
        return Skip(name, int(line), turn.id, "duplicate_turn", "an earlier turn has this state and action")
    return turn


def _source(cfg: config.Config, out: Path) -> tuple[str, list[Skip]]:
    """The trajectories to read, and the tasks of the environment that its expert did not demonstrate."""
    if cfg.trajectories.path is not None:
        return cfg.trajectories.path, []
    if cfg.environment.name is None:
        raise UserError("trajectories.path is not set, and no environment.name whose expert could make trajectories.")
    from pivotrl.environments.registry import draw_tasks, get_environment

    env = get_environment(cfg.environment.name, cfg.environment.options)
    unshown: list[Skip] = []

    def rows() -> Iterator[dict[str, Any]]:
        for task in draw_tasks(env, "train", cfg.trajectories.tasks, cfg.seed, cfg.environment.families):
            for run in range(cfg.trajectories.runs_per_task):
                try:
                    row = to_row(env.expert(task, run))
                except Exception as error:  # an environment may be anyone's: its fault costs this task, and is told
                    reason = "no_expert" if isinstance(error, NoExpert) else "environment_error"
                    told = f"{type(error).__name__}: {error}"[:500]
                    unshown.append(Skip(f"environment:{env.name}", 0, f"{task.id}/{run}", reason, told))
                else:
                    yield row

    path = out / "trajectories.jsonl"
    if not write_jsonl(path, rows()):
        write_jsonl(out / "skipped.jsonl", ({"kind": "trajectory", **skip.to_json()} for skip in unshown))
        raise UserError(
            f"environment.name={env.name}: its expert demonstrated none of {len(unshown)} tasks; the first: "
            f"{unshown[0].detail}. See {out / 'skipped.jsonl'}; or give trajectories.path=FILE."
        )
    return str(path), unshown


def _kept_or_skipped(cfg: config.Config, path: str) -> Iterator[Trajectory | Skip]:
    """What the reader gives, with the domain filled in and the reward filter applied."""
    least = cfg.trajectories.min_reward
    format = cfg.trajectories.format if cfg.trajectories.path is not None else "openai_chat"
    for item in read_trajectories(path, format):
        if isinstance(item, Skip):
            yield item
            continue
        reason = _too_low(item.meta.get("reward"), least)
        if reason is not None:
            name, _, line = item.source.rpartition(":")
            yield Skip(name, int(line), item.id, *reason)
        else:
            yield item if item.domain else replace(item, domain=cfg.domain.name)


def _too_low(reward: Any, least: float | None) -> tuple[str, str] | None:
    if least is None:
        return None
    if isinstance(reward, bool) or not isinstance(reward, (int, float)):
        return "no_reward", f"trajectories.min_reward={least}, and meta.reward is {reward!r}"
    return ("low_reward", f"reward {reward} < trajectories.min_reward={least}") if reward < least else None


def _write(file: IO[str], row: Any) -> None:
    file.write(json.dumps(row, ensure_ascii=False) + "\n")


class _Audit:
    """Counts of what was read, kept and skipped."""

    def __init__(self) -> None:
        self.read = self.kept = self.candidates = self.kept_turns = 0
        self.first: str | None = None  # what was skipped first, for a person
        self.skipped: Counter[str] = Counter()
        self.skipped_turns: Counter[str] = Counter()
        self.by_split: Counter[str] = Counter(dict.fromkeys(SPLITS, 0))
        self.by_flag: Counter[str] = Counter()
        self.cut_short: Counter[str] = Counter()  # trajectories kept up to a defect
        self.files: dict[str, Counter[str]] = {}

    def add(self, item: Trajectory | Skip) -> None:
        name = item.source if isinstance(item, Skip) else item.source.rpartition(":")[0]
        file = self.files.setdefault(name, Counter(read=0, kept=0, skipped=0))
        self.read += 1
        file["read"] += 1
        if isinstance(item, Skip):
            self.skipped[item.reason] += 1
            self.first = self.first or f"{item.source}:{item.line}: {item.reason}: {item.detail}"
            file["skipped"] += 1
        else:
            self.kept += 1
            file["kept"] += 1
            if item.defect is not None:
                self.cut_short[item.defect.reason] += 1

    def add_turn(self, item: Turn | Skip) -> None:
        self.candidates += 1
        if isinstance(item, Skip):
            self.skipped_turns[item.reason] += 1
            self.first = self.first or f"{item.source}:{item.line}: {item.id}: {item.reason}: {item.detail}"
        else:
            self.kept_turns += 1
            self.by_split[item.split] += 1
            self.by_flag.update(item.flags)

    def summary(self, tasks: int) -> dict[str, Any]:
        return {
            "trajectories": {"read": self.read, "kept": self.kept, "skipped": dict(sorted(self.skipped.items()))},
            "turns": {
                "candidates": self.candidates,
                "kept": self.kept_turns,
                "skipped": dict(sorted(self.skipped_turns.items())),
                "by_split": dict(self.by_split),
                "flags": dict(sorted(self.by_flag.items())),
            },
            "cut_short": dict(sorted(self.cut_short.items())),
            "tasks": tasks,
            "files": {name: dict(counts) for name, counts in self.files.items()},
        }
