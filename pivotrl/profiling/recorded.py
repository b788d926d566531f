"""A profile that somebody else made: the pass rates that rows of NeMo-Gym pivot sets carry (method.md 4.2). No engine.

Its fingerprint is its own: of a policy, template and verifier that nobody here can compare, so that training on it must
be allowed expressly. Difficulty does not transfer between models (method.md 3.7): profile again where it is affordable.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

from pivotrl.config import Config
from pivotrl.errors import UserError
from pivotrl.io import write_json, write_jsonl
from pivotrl.profiling.fingerprint import fingerprint
from pivotrl.profiling.profiler import draw_turns
from pivotrl.profiling.statistics import turn_facts
from pivotrl.trajectories import strict_json
from pivotrl.trajectories.schema import JsonDict, Turn
from pivotrl.trajectories.sources import rows_of
from pivotrl.trajectories.turn_lines import turns_in


class RateError(ValueError):
    """A row without usable pass rates. The first argument is a machine name of the reason."""


def rewards_of(row: JsonDict) -> list[float]:
    """Rewards of the rollouts that a row was profiled with; their order is not known where only counts are told.

    Reads `pass_rate_passed` of `pass_rate_total` (or `pass_rate` of it), else a list `rewards`, of the row itself or of
    its `*_info` object. Raises RateError.
    """
    total, passed, rate = (row.get(f"pass_rate{part}") for part in ("_total", "_passed", ""))
    if _is_count(total) and total:
        if passed is None and _is_number(rate):
            passed = round(rate * total)
        if not _is_count(passed) or passed > total:
            raise RateError("bad_pass_rate", f"{passed!r} passed of {total!r}")
        if _is_number(rate) and abs(rate - passed / total) > 0.5 / total:
            raise RateError("partial_rewards", f"pass_rate {rate} is not {passed} of {total}: rewards between 0 and 1")
        return [1.0] * passed + [0.0] * (total - passed)
    scopes = [row, *(v for k, v in row.items() if k.endswith("_info") and isinstance(v, dict))]
    for rewards in (scope.get("rewards") for scope in scopes):
        if isinstance(rewards, list) and rewards:
            if all(_is_number(r) and 0 <= r <= 1 for r in rewards):
                return [float(r) for r in rewards]
            raise RateError("bad_rewards", "rewards are not all numbers from 0 to 1")
    if _is_number(rate):
        raise RateError("no_pass_rate_total", "pass_rate without the number of rollouts it is of")
    raise RateError("no_pass_rate", "neither pass_rate_total nor rewards")


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def profile_from_rows(cfg: Config, run_dir: Path) -> dict[str, Any]:
    """turns/turns.jsonl and the rows that its turns came from -> profile/{turns,skipped}.jsonl and summary.json.

    Raises UserError when no turn has a pass rate, after writing the audit, and when a source is there no longer.
    """
    started, directory = time.monotonic(), run_dir / "profile"
    source = run_dir / "turns" / "turns.jsonl"
    if not source.exists():
        raise UserError(f"{source} does not exist: run `pivotrl turns run_dir={run_dir} trajectories.path=FILE` first")
    turns = draw_turns(list(turns_in(source, "train")), cfg.profile.max_turns, cfg.seed)
    rows, skipped, verifiers = _rows(turns)
    write_jsonl(directory / "skipped.jsonl", skipped)
    reasons = dict(Counter(row["reason"] for row in skipped))
    if not rows:
        raise UserError(
            f"none of {len(turns)} turns of the train split came from a row with pass rates: {reasons}; see "
            f"{directory / 'skipped.jsonl'}. profile.from_rows=true is for NeMo-Gym pivot rows (pass_rate, "
            "pass_rate_total); without it `pivotrl profile` makes rollouts."
        )
    files = sorted({t.source.rpartition(":")[0] for t in turns})
    record = fingerprint(
        weights=f"not told (pass rates recorded in {', '.join(Path(f).name for f in files[:3])})",
        template="not told",
        sampling={},
        verifier=(", ".join(sorted(verifiers)) or "not told", "not told", {}),
        turns=(t.to_json() for t in turns),
    )
    write_jsonl(directory / "turns.jsonl", rows)
    write_json(directory / "fingerprint.json", record)
    mixed = sum(bool(row["variance"]) for row in rows)
    summary = {
        "turns": len(rows),
        "rollouts": 0,  # none was made here, so that the ledger stays true
        "recorded_rollouts": sum(row["n"] for row in rows),
        "mean_reward": sum(row["mean"] for row in rows) / len(rows),
        "mixed": mixed,
        "uninformative_share": 1 - mixed / len(rows),
        "skipped": reasons,
        "drawn": len(turns),
        "fingerprint": record,
        "seconds": time.monotonic() - started,
    }
    write_json(directory / "summary.json", summary)
    return summary


def _rows(turns: list[Turn]) -> tuple[list[JsonDict], list[JsonDict], set[str]]:
    """Rows of the profile in the order of `turns`, what was left out, and the agents that the rows name."""
    found: dict[str, JsonDict] = {}
    skipped: list[JsonDict] = []
    verifiers: set[str] = set()
    for turn, row in _with_rows(turns):
        try:
            facts = turn_facts(turn, rewards_of(row))
        except RateError as error:
            reason, detail = error.args
            skipped.append({"turn_id": turn.id, "source": turn.source, "reason": reason, "detail": detail})
            continue
        tags = row.get("pivot_tags")
        facts["tags"] += [str(tag) for tag in tags] if isinstance(tags, list) else []
        if _is_count(row.get("num_unique_actions")):
            facts["unique_actions"] = row["num_unique_actions"]
        agent = row.get("agent_ref")
        if isinstance(agent, dict) and isinstance(agent.get("name"), str):
            verifiers.add(agent["name"])
        found[turn.id] = facts
    return [found[t.id] for t in turns if t.id in found], skipped, verifiers


def _with_rows(turns: list[Turn]) -> Iterator[tuple[Turn, JsonDict]]:
    """Each turn with the row that it was read from."""
    wanted: dict[str, dict[int, list[Turn]]] = {}
    for turn in turns:
        file, _, line = turn.source.rpartition(":")
        wanted.setdefault(file, {}).setdefault(int(line), []).append(turn)
    for file, lines in wanted.items():
        if not Path(file).is_file():
            raise UserError(f"{file} is not there any more; run `pivotrl turns` again where the file is now")
        for raw in rows_of(Path(file)):
            for turn in lines.get(raw.line, ()):
                row = strict_json.loads(raw.data)
                yield turn, row if isinstance(row, dict) else {}
