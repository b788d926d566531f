"""A profile in parts, for array jobs: which turns a shard takes, and the merge of a whole set of shards, no other."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pivotrl.errors import UserError
from pivotrl.io import read_json, read_jsonl
from pivotrl.trajectories.schema import Turn

FILES = (
    "rollouts.jsonl",
    "turns.jsonl",
    "skipped.jsonl",
    "cost.jsonl",
    "second.jsonl",
    "second_turns.jsonl",
    "verifier.jsonl",
)


@dataclass(frozen=True)
class Shard:
    """Part `index` (from 0) of `count`."""

    index: int
    count: int

    @property
    def folder(self) -> str:
        """Relative to the profile's folder."""
        return f"shards/{self.index}-of-{self.count}"


def parse_shard(text: str | None) -> Shard | Literal["merge"] | None:
    """`profile.shard`: "i/n", "merge" or None. Raises UserError for anything else."""
    if text is None:
        return None
    if text == "merge":
        return "merge"
    if (found := re.fullmatch(r"(\d+)/(\d+)", text)) and int(found[1]) < int(found[2]):
        return Shard(int(found[1]), int(found[2]))
    raise UserError(f"profile.shard={text!r} is neither i/n with 0 <= i < n (0/4, 1/4, 2/4, 3/4) nor merge")


def turns_of(turns: Sequence[Turn], shard: Shard) -> list[Turn]:
    """The turns of one shard: whole trajectories, neighbours in the trie, near-equal numbers of turns.

    `turns` are in the order of `draw_turns`, so shards joined in order are the whole in order.
    """
    first: dict[str, int] = {}
    for place, turn in enumerate(turns):
        first.setdefault(turn.trajectory_id, place)
    return [t for t in turns if first[t.trajectory_id] * shard.count // len(turns) == shard.index]


def find_shards(profile_dir: Path) -> list[Path]:
    """Folders of a complete set of finished shards, in order.

    Raises UserError when there is none, when splits are mixed, or when a shard is missing or unfinished.
    """
    pattern = re.compile(r"(\d+)-of-(\d+)")
    found = [(int(m[1]), int(m[2]), p) for p in profile_dir.glob("shards/*") if (m := pattern.fullmatch(p.name))]
    if not found:
        raise UserError(
            f"{profile_dir / 'shards'} has no shard: run `pivotrl profile profile.shard=i/n` for all i first"
        )
    counts = sorted({count for _, count, _ in found})
    if len(counts) > 1:
        raise UserError(
            f"{profile_dir / 'shards'} mixes splits into {' and '.join(map(str, counts))} shards; "
            "move away the folders of all but one split"
        )
    paths = {index: path for index, _, path in found}
    missing = [f"{i}/{counts[0]}" for i in range(counts[0]) if i not in paths]
    open_ = [f"{i}/{counts[0]}" for i, path in sorted(paths.items()) if not (path / "summary.json").is_file()]
    if missing or open_:
        parts = [
            f"{name}: {', '.join(which)}" for name, which in (("missing", missing), ("unfinished", open_)) if which
        ]
        raise UserError(
            f"{profile_dir / 'shards'} is no whole profile ({'; '.join(parts)}); "
            "run `pivotrl profile profile.shard=i/n` for each of these, then merge"
        )
    return [paths[i] for i in range(counts[0])]


def check_shards(paths: Sequence[Path]) -> None:
    """Raises UserError when shards differ in fingerprint or settings, share a turn, or do not cover the drawn turns."""
    markers = [read_json(path / "fingerprint.json") for path in paths]
    for path, marker in zip(paths, markers, strict=True):
        if marker != markers[0]:
            keys = [k for k in {**marker, **markers[0]} if marker.get(k) != markers[0].get(k)]
            raise UserError(
                f"{path} was made by another policy or setting than {paths[0]} ({', '.join(sorted(keys))} differ); "
                "move the foreign shards away and run them again"
            )
    owner: dict[str, Path] = {}
    skipped = 0
    for path in paths:
        for line, row in enumerate(read_jsonl(path / "turns.jsonl"), start=1):
            if (other := owner.setdefault(row["turn_id"], path)) is not path:
                raise UserError(f"{path / 'turns.jsonl'}:{line}: turn {row['turn_id']!r} is also in {other}")
        skipped += sum(1 for _ in read_jsonl(path / "skipped.jsonl"))
        drawn = read_json(path / "summary.json")["drawn"]
        if drawn != (first := read_json(paths[0] / "summary.json")["drawn"]):
            raise UserError(f"{path} is of {drawn} drawn turns, {paths[0]} of {first}; run all shards on one turn file")
    if len(owner) + skipped != drawn:
        raise UserError(
            f"the shards hold {len(owner)} profiled and {skipped} skipped turns of {drawn} drawn; "
            f"a shard's files are incomplete: run the shards of {paths[0].parent} again"
        )


def join_files(paths: Sequence[Path], target: Path) -> None:
    """Each of `FILES` that the shards have, one after the other; every file appears whole or not at all."""
    for name in FILES:
        parts = [path / name for path in paths if (path / name).exists()]
        if not parts:
            continue
        temporary = target / (name + ".tmp")
        with temporary.open("wb") as out:
            for part in parts:
                with part.open("rb") as file:
                    shutil.copyfileobj(file, out, 1 << 20)
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(target / name)


def whole_rows(path: Path) -> Iterator[Any]:
    """Rows of a log that may be torn anywhere by kills: what is no JSON is skipped."""
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                with suppress(ValueError):
                    yield json.loads(line)
