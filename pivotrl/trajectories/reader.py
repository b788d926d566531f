"""Reading trajectories: files, folders and globs in any registered format, row by row.

A row that cannot be read becomes a `Skip` with its place and reason. It is never mended, and never stops other rows.
Memory: one row, and at most 32 bytes for each id seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pivotrl.errors import UserError
from pivotrl.trajectories import strict_json
from pivotrl.trajectories.duplicates import DigestSet
from pivotrl.trajectories.formats import FORMATS, detect
from pivotrl.trajectories.formats.base import Format
from pivotrl.trajectories.json_rows import RawRow
from pivotrl.trajectories.normalise import RowError
from pivotrl.trajectories.schema import JsonDict, Trajectory
from pivotrl.trajectories.sources import BrokenFile, find_files, rows_of


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


def read_trajectories(path: str, format: str = "auto") -> Iterator[Trajectory | Skip]:
    """Trajectories of `path` in order, with a `Skip` for each row that cannot be read.

    Raises `UserError` for a missing path, an unknown format name, empty input, or input whose format no reader knows.
    """
    if format != "auto" and format not in FORMATS:
        raise UserError(f"trajectories.format={format!r} is unknown. Known: auto, {', '.join(FORMATS)}.")
    return _read(path, find_files(path), format)


def _read(path: str, files: list[Path], format: str) -> Iterator[Trajectory | Skip]:
    seen = DigestSet()
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
            if not seen.add(hashlib.blake2b(item.id.encode(), digest_size=8).digest()):
                name, _, line = item.source.rpartition(":")
                yield Skip(name, int(line), item.id, "duplicate_id", "an earlier trajectory has this id")
                continue
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
        for raw in rows_of(file):
            yield from _read_row(file, prefix, raw, format)
    except BrokenFile as error:
        yield Skip(str(file), 0, None, error.reason, error.detail)


def _read_row(file: Path, prefix: str, raw: RawRow, format: str) -> Iterator[Trajectory | Skip]:
    """The trajectory of a row, or those of a row that is a whole file of runs."""
    identity: str | None = None
    try:
        row = _row(strict_json.loads(raw.data))
        identity = _identity(row)
        reader = _reader(row, format)
        inner = reader.expand(row) if reader.expand else None
    except (RowError, strict_json.StrictJsonError) as error:
        yield Skip(str(file), raw.line, identity, error.reason, error.detail)
        return
    for i, run in enumerate([row] if inner is None else inner):
        name = f"{prefix}:{raw.line}" if inner is None else f"{prefix}:{raw.line}[{i}]"
        identity = _identity(run)
        try:
            parsed = reader.parse(run)
            identity = parsed.id or name
            yield Trajectory(
                id=identity,
                domain=parsed.domain,
                messages=parsed.messages,
                tools=parsed.tools,
                task_id=parsed.task_id or identity,
                meta=parsed.meta,
                source=f"{file}:{raw.line}",
                defect=parsed.defect,
            )
        except RowError as error:
            yield Skip(str(file), raw.line, identity, error.reason, error.detail)


def _row(value: Any) -> JsonDict:
    """A decoded row as an object: a bare list of messages or events gets its key, a JSON string of messages is read."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        if "role" in value[0]:
            value = {"messages": value}
        elif "action" in value[0] or "observation" in value[0]:
            value = {"events": value}
    if not isinstance(value, dict):
        raise RowError("not_an_object", f"the row is a {type(value).__name__}")
    for key in ("conversations", "conversation"):  # the list by another name; from/value pairs are ShareGPT's
        turns = value.get(key)
        if "messages" not in value and isinstance(turns, list) and turns and isinstance(turns[0], dict):
            value = {**value, "messages": turns} if "role" in turns[0] else value
    if isinstance(value.get("messages"), str):
        value = {**value, "messages": strict_json.loads(value["messages"])}
    return value


def _identity(row: JsonDict) -> str | None:
    return str(row["id"])[:200] if isinstance(row.get("id"), (str, int)) else None


def _reader(row: JsonDict, format: str) -> Format:
    found = detect(row) if format == "auto" else FORMATS[format]
    if found is None or (format != "auto" and not found.matches(row)):
        keys: list[Any] = sorted(row)[:12]
        raise RowError("unknown_format", f"keys {', '.join(map(repr, keys))}")
    return found
