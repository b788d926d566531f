"""Which members of a set become pivots: duplicates, caps, mixtures, ranking by signal (Theorem 3.2). Pure Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pivotrl.config import Select
from pivotrl.errors import UserError
from pivotrl.local_rollouts import seed_for
from pivotrl.trajectories.flags import FLAGS


class Candidate(NamedTuple):
    """What narrowing needs of one row of profile/turns.jsonl; small, since a million may be held at once."""

    line: int  # of profile/turns.jsonl, from 0
    signal: float  # variance of the reward: the same order as its std
    draw: int  # a hash of seed and turn: order at random, and between equal signals
    trajectory: int  # number of the trajectory
    domain: str
    content: str  # digest of state, tools and demonstration; "" where not compared


class Terms:
    """`select.domains`, `tags` and `drop_tags`: which turns may be pivots at all, row by row."""

    def __init__(self, options: Select) -> None:
        self._domains, self._tags, self._drop = set(options.domains), set(options.tags), set(options.drop_tags)
        self._present: dict[str, set[str]] = {"domains": set(), "tags": set()}
        self.active = bool(self._domains or self._tags or self._drop)
        self.dropped = 0  # members of the set that may not

    def admit(self, row: dict[str, Any], place: str) -> bool:
        """Raises UserError for a profile without tags when they are asked for."""
        if not self.active:
            return True
        if (self._tags or self._drop) and "tags" not in row:
            raise UserError(
                f"{place}: no tags; this profile is of an older version, so select.tags needs a new profile"
            )
        domain, tags = row.get("domain", ""), row.get("tags", ())
        self._present["domains"].add(domain)
        self._present["tags"].update(tags)
        if self._domains and domain not in self._domains:
            return False
        return (not self._tags or not self._tags.isdisjoint(tags)) and self._drop.isdisjoint(tags)

    def finish(self, profile: Path) -> None:
        """Raises UserError when a name that was given occurs nowhere: it is misspelt, or of other data."""
        for kind, named in (("domains", self._domains), ("tags", self._tags | (self._drop - {*FLAGS}))):
            if absent := sorted(named - self._present[kind]):
                present = ", ".join(sorted(filter(None, self._present[kind]))) or "none"
                raise UserError(f"select: no turn of {profile} has {', '.join(absent)}; its {kind} are: {present}")


def is_narrowed(options: Select) -> bool:
    """Whether the floor or any limit needs candidates to be compared with each other."""
    limits = options.deduplicate or options.max_per_trajectory or options.mixture or options.max_pivots
    return bool(limits or options.action_floor)


class Candidates:
    """Makes candidates of rows, one by one; `rows` are those that are to be narrowed."""

    def __init__(self, options: Select, seed: int) -> None:
        self._options = options
        self._seed = seed
        self._trajectories: dict[str, int] = {}
        self._domains: dict[str, str] = {}
        self.rows: list[Candidate] = []

    def of(self, line: int, row: dict[str, Any]) -> Candidate:
        """The candidate of a row. Raises UserError for a profile that lacks what `select.deduplicate` compares."""
        content = ""
        if self._options.deduplicate:
            if "state_action" not in row:
                raise UserError(
                    f"profile/turns.jsonl:{line + 1}: no state_action; this profile is of an older version, so "
                    "select.deduplicate=true needs a new `pivotrl profile`"
                )
            content = row["state_action"]
        name = row["trajectory_id"] if self._options.max_per_trajectory else ""
        trajectory = self._trajectories.setdefault(name, len(self._trajectories))
        domain = row.get("domain", "")
        domain = self._domains.setdefault(domain, domain)
        draw = seed_for(self._seed, "select", row["turn_id"])
        return Candidate(line, row["variance"] or 0.0, draw, trajectory, domain, content)


def choose(candidates: Iterable[Candidate], options: Select) -> tuple[list[Candidate], dict[str, int]]:
    """The chosen candidates, in order of preference, and how many each limit dropped.

    Each limit takes the preferred candidates first, so a cap keeps the turns of most signal. Raises UserError when a
    domain of the mixture has too few.
    """
    ranked = sorted(candidates, key=lambda c: (-c.signal if options.rank == "signal" else 0.0, c.draw, c.line))
    dropped: Counter[str] = Counter()
    if options.deduplicate:
        ranked = _first_of_each(ranked, [c.content for c in ranked], 1, dropped, "duplicate")
    if options.max_per_trajectory:
        keys = [c.trajectory for c in ranked]
        ranked = _first_of_each(ranked, keys, options.max_per_trajectory, dropped, "trajectory_cap")
    if options.mixture:
        ranked = _mixture(ranked, options.mixture, dropped)
    if options.max_pivots is not None and len(ranked) > options.max_pivots:
        dropped["max_pivots"] = len(ranked) - options.max_pivots
        ranked = ranked[: options.max_pivots]
    return ranked, dict(dropped)


def _first_of_each(
    ranked: Sequence[Candidate], keys: Sequence[object], limit: int, dropped: Counter[str], reason: str
) -> list[Candidate]:
    seen: Counter[object] = Counter()
    kept = []
    for candidate, key in zip(ranked, keys, strict=True):
        seen[key] += 1
        if seen[key] <= limit:
            kept.append(candidate)
    dropped[reason] += len(ranked) - len(kept)
    return kept


def _mixture(ranked: Sequence[Candidate], wanted: dict[str, int], dropped: Counter[str]) -> list[Candidate]:
    present = Counter(c.domain for c in ranked)
    short = [f"{d}: {n} wanted, {present[d]} there" for d, n in wanted.items() if present[d] < n]
    if short:
        raise UserError(
            f"select.mixture asks for more pivots than there are ({'; '.join(short)}).\n"
            f"Pivots by domain: {dict(present)}. Ask for fewer, profile more turns, or loosen the other select limits."
        )
    left = Counter(wanted)
    kept = []
    for candidate in ranked:
        if left[candidate.domain] > 0:
            left[candidate.domain] -= 1
            kept.append(candidate)
    dropped["mixture"] += len(ranked) - len(kept)
    return kept
