"""Selection of pivots from a finished profile (method.md 1.2, eq. 5). Pure Python; runs in seconds.

`profile/turns.jsonl` is read twice and never held: once to decide, once to copy the rows that were kept.
"""

from __future__ import annotations

import json
import os
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Any

from pivotrl.config import Config
from pivotrl.errors import UserError
from pivotrl.io import read_jsonl, write_json
from pivotrl.profiling import theory
from pivotrl.profiling.choose import Candidates, Terms, choose, is_narrowed
from pivotrl.profiling.evidence import learn
from pivotrl.profiling.floor import Floor
from pivotrl.profiling.statistics import exact, vary
from pivotrl.tracking.actions import tool_of, warning

Row = dict[str, Any]
GROUP_SIZES = (2, 4, 8, 16, 32, 64)  # for which the expected share of informative groups is told


def scored(row: Row) -> list[Fraction]:
    """Rewards as exact fractions, so that `mean < lambda` is strict and no float residue decides."""
    return [Fraction(str(r)) for r in row["rewards"] if r is not None]


def binary_counts(row: Row) -> tuple[int, int] | None:
    """(right, scored) where every scored reward is 0 or 1, the common case; else None."""
    rewards = row["rewards"]
    count, right = len(rewards) - rewards.count(None), rewards.count(1)
    return (right, count) if right + rewards.count(0) == count else None


def is_mixed(row: Row) -> bool:
    if (counts := binary_counts(row)) is not None:
        return 0 < counts[0] < counts[1]
    return vary(scored(row))


def is_below(row: Row, lambda_diff: float) -> bool:
    if (counts := binary_counts(row)) is not None:
        numerator, denominator = exact(lambda_diff)
        return counts[1] > 0 and counts[0] * denominator < numerator * counts[1]
    rewards = scored(row)
    return bool(rewards) and sum(rewards) < Fraction(str(lambda_diff)) * len(rewards)


#: cand: every scored turn; mixed: var > 0; adv: var > 0 and mean < lambda (eq. 5); adv_zeros: mean < lambda, so that
#: all-wrong turns stay in (NVIDIA's practice).
SETS: dict[str, Callable[[Row, float], bool]] = {
    "cand": lambda row, lam: any(r is not None for r in row["rewards"]),
    "mixed": lambda row, lam: is_mixed(row),
    "adv": lambda row, lam: is_mixed(row) and is_below(row, lam),
    "adv_zeros": is_below,
}


def histogram(rows: Iterable[Row], bins: int = 10) -> list[int]:
    """Turns by mean reward in equal bins of [0, 1]; a mean of 1 falls in the last."""
    counts = [0] * bins
    for row in rows:
        if row["mean"] is not None:
            counts[_bin(row["mean"], bins)] += 1
    return counts


def _bin(mean: float, bins: int = 10) -> int:
    return min(int(mean * bins), bins - 1)


def _by_lambda(first_tenth: list[int]) -> dict[str, int]:
    """Turns below each lambda, of counts by the smallest k for which mean < k / 10."""
    return {f"{k / 10:g}": n for k, n in enumerate(accumulate(first_tenth)) if 0 < k <= 10}


class _Shares:
    """Mean expected share of informative groups, for each group size."""

    def __init__(self) -> None:
        self._sums = {size: [0.0, 0.0] for size in GROUP_SIZES}

    def add(self, right: int, scored: int, times: float = 1) -> None:
        for size, cell in self._sums.items():
            if (share := theory.informative_estimate(right, scored, size)) is not None:
                cell[0] += share * times
                cell[1] += times

    def means(self) -> dict[str, float]:
        return {str(size): total / n for size, (total, n) in self._sums.items() if n}


class _Tally:
    """Counts over all turns, in one pass. Turns of binary rewards are counted by (right, scored) and worked out at the
    end, each kind once; by the same rules as the others."""

    def __init__(self, lambda_diff: float) -> None:
        self.lambda_diff = lambda_diff
        self.turns = self.all_right = self.all_wrong = 0
        self.sets: Counter[str] = Counter(dict.fromkeys(SETS, 0))
        self.actions: Counter[str] = Counter()  # scored turns by demonstrated action
        self.histogram = [0] * 10
        self._binary: Counter[tuple[int, int]] = Counter()
        self._first_tenth = [0] * 12  # mixed turns by the smallest k for which mean < k / 10
        self._first_of_all = [0] * 12  # the same of all scored turns
        self._shares = _Shares()
        self._rollouts: set[int] = set()  # of a turn

    def add(self, row: Row, counts: tuple[int, int] | None) -> None:
        """`counts` are the row's `binary_counts`."""
        self._rollouts.add(len(row["rewards"]))
        self.actions[tool_of(row)] += row["mean"] is not None
        if counts is not None:
            self._binary[counts] += 1
        else:
            self._add(row, scored(row), 1)

    def _add(self, row: Row, rewards: list[Fraction], times: int) -> None:
        self.turns += times
        for name, rule in SETS.items():
            self.sets[name] += rule(row, self.lambda_diff) * times
        if not rewards:
            return
        mean = sum(rewards) / len(rewards)
        self.histogram[_bin(float(mean))] += times
        self._first_of_all[int(10 * mean) + 1] += times
        if vary(rewards):
            self._first_tenth[int(10 * mean) + 1] += times
        else:
            self.all_right += times * (mean == 1)
            self.all_wrong += times * (mean == 0)

    def finish(self) -> None:
        """Work out the binary turns; `summary` is whole after this."""
        for (right, count), times in self._binary.items():
            row = {"rewards": [1] * right + [0] * (count - right)}
            self._add(row, scored(row), times)
        for (right, count), share in self._whole().items():
            self._shares.add(right, count, share)
        self._binary.clear()

    def _whole(self) -> Mapping[tuple[int, int], float]:
        """Turns of binary rewards by (right, scored) of all K rollouts.

        An adaptive profile stops turns that look certain, so that what it sampled of them tells a biased share.
        """
        if len(self._rollouts) < 2:
            return self._binary
        k = max(self._rollouts)
        learnt = learn({(count, right): times for (right, count), times in self._binary.items()}, k)
        return {(right, k): share for right, share in enumerate(learnt.final)}

    def summary(self) -> dict[str, Any]:
        return {
            "turns": self.turns,
            "counts": dict(self.sets),
            "unscored": self.turns - self.sets["cand"],
            "all_right": self.all_right,
            "all_wrong": self.all_wrong,
            "scored_by_action": dict(self.actions),
            "histogram": self.histogram,
            "adv_by_lambda": _by_lambda(self._first_tenth),
            "adv_zeros_by_lambda": _by_lambda(self._first_of_all),
            # Expected share of mixed groups of G rollouts of a random turn, unbiased (theory.informative_estimate);
            # of an adaptive profile by maximum likelihood.
            "informative_share": self._shares.means(),
        }


def run_select(cfg: Config, run_dir: Path) -> dict[str, Any]:
    """Read `profile/turns.jsonl`, write `select/pivots.jsonl` and `select/summary.json`.

    Raises UserError when no turn is kept (unless `select.allow_empty`), after writing the summary; when a domain of
    `select.mixture` has too few; and for a profile that holds turns of another split than train.
    """
    profile = run_dir / "profile" / "turns.jsonl"
    if not profile.exists():
        raise UserError(f"{profile} does not exist: run `pivotrl profile run_dir={run_dir}` first")
    tally, lines, limits = _decide(profile, cfg)
    summary: dict[str, Any] = {
        "set": cfg.select.set,
        "lambda_diff": cfg.select.lambda_diff,
        **tally.summary(),
        **limits,
        **_copy(profile, lines, run_dir),
    }
    summary["warning"] = warning(summary["scored_by_action"], summary["kept_by_action"])
    write_json(run_dir / "select" / "summary.json", summary)
    if not summary["kept"] and not cfg.select.allow_empty:
        bars = " ".join(f"{i / 10:.1f}:{n}" for i, n in enumerate(summary["histogram"]))
        dropped = limits["dropped"]
        others = f"\nDropped by other select limits: {dropped}." if any(dropped.values()) else ""
        raise UserError(
            f"no pivot kept: none of {summary['turns']} turns is in the set {cfg.select.set!r} with lambda_diff "
            f"{cfg.select.lambda_diff}.\n"
            f"Turns by mean reward: {bars}; unscorable: {summary['unscored']}.{others}\n"
            "Profile more turns or rollouts (profile.rollouts_per_turn), choose another set "
            "(select.set=mixed|adv_zeros), or raise select.lambda_diff."
        )
    if summary["warning"] and summary["kept"]:
        print(f"select: {summary['warning']}", file=sys.stderr, flush=True)
    return summary


def _decide(profile: Path, cfg: Config) -> tuple[_Tally, array[int], dict[str, dict[str, int]]]:
    """First pass: counts, the kept lines in ascending order, what each limit dropped and what the floor added."""
    options, tally = cfg.select, _Tally(cfg.select.lambda_diff)
    narrowed, candidates = is_narrowed(options), Candidates(options, cfg.seed)
    lines: array[int] = array("q")
    dropped: dict[str, int] = {}
    members: dict[tuple[int, int], bool] = {}  # of the set: a turn of binary rewards is decided by its counts
    few, terms, floor = 0, Terms(options), Floor(options.action_floor)
    for line, raw in _lines(profile):
        row = json.loads(raw)
        # Rows of older profiles name no split: they are of the train split, the only one that was ever profiled.
        if row.get("split", "train") != "train":
            raise UserError(f"{profile}:{line + 1}: turn of split {row['split']!r}; pivots come from train alone")
        counts = binary_counts(row)
        tally.add(row, counts)
        wanted = terms.admit(row, f"{profile}:{line + 1}")
        member = members.get(counts) if counts else None
        if member is None:
            member = SETS[options.set](row, options.lambda_diff)
            if counts:
                members[counts] = member
        if not member and not (floor.active and row["mean"] is not None):
            continue
        if not wanted:
            terms.dropped += member
        elif (
            options.min_unique_actions > 1
            and _unique_actions(row, f"{profile}:{line + 1}") < options.min_unique_actions
        ):
            few += member
        elif not member:
            floor.other(row, candidates.of(line, row) if is_mixed(row) else None)
        elif narrowed:
            floor.member(row)
            candidates.rows.append(candidates.of(line, row))
        else:
            lines.append(line)
    tally.finish()
    terms.finish(profile)
    if narrowed:
        chosen, dropped = choose([*candidates.rows, *floor.fill()], options)
        lines = array("q", sorted(c.line for c in chosen))
    if options.min_unique_actions > 1:
        dropped = {"few_unique_actions": few, **dropped}
    if terms.active:
        dropped = {"other_domain_or_tag": terms.dropped, **dropped}
    return tally, lines, {"dropped": dropped, "added_by_floor": floor.added}


def _unique_actions(row: Row, place: str) -> int:
    if (count := row.get("unique_actions")) is None:
        raise UserError(f"{place}: this profile does not tell unique actions; use select.min_unique_actions=1")
    return int(count)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        for line, raw in enumerate(file):
            if raw.strip():
                yield line, raw


def _copy(profile: Path, lines: array[int], run_dir: Path) -> dict[str, Any]:
    """Second pass: write the kept rows as they are; returns what is told of them."""
    target = run_dir / "select" / "pivots.jsonl"
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(target.name + ".tmp")
    second = _second_profile(run_dir)
    shares = _Shares()
    domains: Counter[str] = Counter()
    actions: Counter[str] = Counter()
    means, again = [0.0, 0], [0.0, 0]
    wanted = iter(lines)
    following = next(wanted, -1)
    with temporary.open("wb") as file:
        for line, raw in _lines(profile):
            if line != following:
                continue
            following = next(wanted, -1)
            file.write(raw if raw.endswith(b"\n") else raw + b"\n")
            row = json.loads(raw)
            domains[row.get("domain", "")] += 1
            actions[tool_of(row)] += 1
            mean_again, right, scored_again = second.get(row["turn_id"], (None, 0, 0))
            shares.add(right, scored_again)
            for cell, mean in ((means, row["mean"]), (again, mean_again)):
                if mean is not None:
                    cell[0] += mean
                    cell[1] += 1
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(target)
    told: dict[str, Any] = {"kept": len(lines), "kept_by_domain": dict(domains), "kept_by_action": dict(actions)}
    # Selected for being low, the first mean is biased downwards; the second profile's is not.
    told["kept_mean"] = means[0] / means[1] if means[1] else None
    told["kept_mean_second_profile"] = again[0] / again[1] if again[1] else None
    told["kept_informative_share_second_profile"] = shares.means()
    return told


def _second_profile(run_dir: Path) -> dict[str, tuple[float | None, int, int]]:
    """(mean, right, scored) by turn; scored is 0 where a reward is neither 0 nor 1."""
    path = run_dir / "profile" / "second_turns.jsonl"
    if not path.exists():
        return {}
    return {row["turn_id"]: (row["mean"], *(binary_counts(row) or (0, 0))) for row in read_jsonl(path)}
