"""Reading trajectories: files, folders and globs of JSONL, JSON and .gz in any registered format, row by row.

A row that cannot be read becomes a `Skip` with its place and reason. It is never mended, and never stops other rows.
Memory: one row, and 16 bytes for each id seen.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from pivotrl.errors import UserError
from pivotrl.trajectories import strict_json
from pivotrl.trajectories.formats import FORMATS, detect
from pivotrl.trajectories.formats.base import Format
from pivotrl.trajectories.json_rows import RawRow, raw_rows
from pivotrl.trajectories.normalise import RowError
from pivotrl.trajectories.schema import JsonDict, Trajectory

SUFFIXES = (".jsonl", ".ndjson", ".json", ".traj", ".jsonl.gz", ".ndjson.gz", ".json.gz", ".traj.gz")


@dataclass(frozen=True)
class Skip:
    """Something that was left out. `line` counts from 1 (0: the whole file); `reason` is a machine name."""

    source: str  # file
    line: int
    id: str | None
    reason: str
    detail: str

    def to_json(self) -> JsonDict:
        return asdict(self)


def find_files(path: str) -> list[Path]:
    """Files of a file, folder (recursive) or glob, sorted. Raises `UserError` when there are none."""
    place = Path(path)
    places = [place] if place.exists() else [Path(p) for p in sorted(glob.glob(path, recursive=True))]
    if not places:
        raise UserError(f"trajectories.path={path}: no such file, folder or match. Give a path that exists.")
    found: dict[Path, None] = {}
    for place in places:
        inside = sorted(place.rglob("*")) if place.is_dir() else [place]
        found.update((p, None) for p in inside if p.is_file() and (p == place or p.name.endswith(SUFFIXES)))
    if not found:
        raise UserError(f"trajectories.path={path}: no {', '.join(SUFFIXES[:4])} file in there (or .gz of one).")
    return list(found)


def read_trajectories(path: str, format: str = "auto") -> Iterator[Trajectory | Skip]:
    """Trajectories of `path` in order, with a `Skip` for each row that cannot be read.

    Raises `UserError` for a missing path, an unknown format name, empty input, or input whose format no reader knows.
    """
    if format != "auto" and format not in FORMATS:
        raise UserError(f"trajectories.format={format!r} is unknown. Known: auto, {', '.join(FORMATS)}.")
    return _read(path, find_files(path), format)


def _read(path: str, files: list[Path], format: str) -> Iterator[Trajectory | Skip]:
    seen: set[bytes] = set()
    rows = recognised = 0
    unknown: Skip | None = None
    for file in files:
        file_rows = 0
        for item in _read_file(file, format, len(files) > 1):
            file_rows += 1
            if isinstance(item, Skip):
                unknown = unknown or (item if item.reason == "unknown_format" else None)
                recognised += item.reason != "unknown_format"
                yield item
                continue
            recognised += 1
            digest = hashlib.blake2b(item.id.encode(), digest_size=16).digest()
            if digest in seen:
                name, _, line = item.source.rpartition(":")
                yield Skip(name, int(line), item.id, "duplicate_id", "an earlier trajectory has this id")
                continue
            seen.add(digest)
            yield item
        rows += file_rows
        if not file_rows and len(files) > 1:
            yield Skip(str(file), 0, None, "empty_file", "no row")
    if not rows:
        raise UserError(f"trajectories.path={path}: empty (no row in {len(files)} file(s)).")
    if not recognised and unknown is not None:
        raise UserError(
            f"{unknown.source}:{unknown.line}: unknown trajectory format ({unknown.detail}). "
            f"Set trajectories.format to one of: {', '.join(FORMATS)}."
        )


def _read_file(file: Path, format: str, many: bool) -> Iterator[Trajectory | Skip]:
    prefix = file.name if not many else f"{file.parent.name}/{file.name}"
    try:
        with _open(file) as stream:
            for raw in raw_rows(stream, file.name.removesuffix(".gz")):
                yield _read_row(file, prefix, raw, format)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        yield Skip(str(file), 0, None, "bad_compression", f"gzip stream broken: {error}")
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror or error}.") from error


def _open(file: Path) -> IO[bytes]:
    if file.name.endswith(".gz"):
        return gzip.open(file, "rb")  # type: ignore[return-value]
    return file.open("rb")


def _read_row(file: Path, prefix: str, raw: RawRow, format: str) -> Trajectory | Skip:
    identity: str | None = None
    try:
        row = strict_json.loads(raw.data)
        if isinstance(row, list) and row and isinstance(row[0], dict) and "role" in row[0]:
            row = {"messages": row}  # a bare list of messages
        if not isinstance(row, dict):
            raise RowError("not_an_object", f"the row is a {type(row).__name__}")
        identity = str(row["id"])[:200] if isinstance(row.get("id"), (str, int)) else None
        reader = _reader(row, format)
        parsed = reader.parse(row)
        identity = parsed.id or f"{prefix}:{raw.line}"
        return Trajectory(
            id=identity,
            domain=parsed.domain,
            messages=parsed.messages,
            tools=parsed.tools,
            task_id=parsed.task_id or identity,
            meta=parsed.meta,
            source=f"{file}:{raw.line}",
        )
    except (RowError, strict_json.StrictJsonError) as error:
        return Skip(str(file), raw.line, identity, error.reason, error.detail)


def _reader(row: JsonDict, format: str) -> Format:
    found = detect(row) if format == "auto" else FORMATS[format]
    if found is None or (format != "auto" and not found.matches(row)):
        keys: list[Any] = sorted(row)[:12]
        raise RowError("unknown_format", f"keys {', '.join(map(repr, keys))}")
    return found
