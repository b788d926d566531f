"""Files of a path, and the rows in each: JSON Lines, JSON, `.gz` or `.zst` of one, Parquet. Memory: one row."""

from __future__ import annotations

import glob
import gzip
import importlib
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from pivotrl.errors import UserError
from pivotrl.trajectories import strict_json
from pivotrl.trajectories.json_rows import RawRow, raw_rows

PLAIN = (".jsonl", ".ndjson", ".json", ".traj")
PACKED = (".gz", ".zst")
SUFFIXES = (*PLAIN, *(plain + packed for plain in PLAIN for packed in PACKED), ".parquet")
PARQUET_BATCH = 16  # rows decoded at once


class BrokenFile(Exception):
    """A file whose rest cannot be read: (reason, detail)."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def find_files(path: str) -> list[Path]:
    """Files of a file, folder (recursive) or glob, sorted. Raises `UserError` when there are none."""
    if not path.strip():
        raise UserError("trajectories.path is empty. Give a file, a folder or a glob.")
    place = Path(path)
    places = [place] if place.exists() else [Path(p) for p in sorted(glob.glob(path, recursive=True))]
    if not places:
        raise UserError(f"trajectories.path={path}: no such file, folder or match. Give a path that exists.")
    found: dict[Path, None] = {}
    for place in places:
        inside = sorted(place.rglob("*")) if place.is_dir() else [place]
        # A file that is named may have any suffix, or be a pipe: it is read once.
        found.update((p, None) for p in inside if p == place or (p.is_file() and p.name.endswith(SUFFIXES)))
    if not found:
        raise UserError(
            f"trajectories.path={path}: no {', '.join((*PLAIN, '.parquet'))} file in there (or .gz or .zst of one)."
        )
    return list(found)


def rows_of(file: Path) -> Iterator[RawRow]:
    """Rows of a file, in order; the messages or events of a file that is one trajectory come as one row.

    Raises `BrokenFile` where the bytes end or break, `UserError` where the file or its codec cannot be had.
    """
    try:
        if file.name.endswith(".parquet"):
            yield from _parquet(file)
            return
        name = file.name.removesuffix(".gz").removesuffix(".zst")
        with _open(file) as stream:
            yield from _gathered(raw_rows(stream, name))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise BrokenFile("bad_compression", f"gzip stream broken: {error}") from error
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror or error}.") from error


@contextmanager
def _open(file: Path) -> Iterator[IO[bytes]]:
    if file.name.endswith(".gz"):
        with gzip.open(file, "rb") as packed:
            yield packed  # type: ignore[misc]
    elif file.name.endswith(".zst"):
        zstandard = _optional("zstandard", "zst", file)
        with file.open("rb") as raw:
            reader = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
            try:
                yield io.BufferedReader(reader, 1 << 20)
            except zstandard.ZstdError as error:
                raise BrokenFile("bad_compression", f"zstd stream broken: {error}") from error
    else:
        with file.open("rb") as plain:
            yield plain


def _optional(module: str, extra: str, file: Path) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{file}: reading it needs {module.split('.')[0]}, which is not installed. "
            f"Install the extra: pip install 'pivotrl[{extra}]'."
        ) from error


def _is_piece(data: bytes) -> bool:
    """Whether an array element is a message or an event, so that the whole array is one trajectory."""
    try:
        value = strict_json.loads(data)
    except strict_json.StrictJsonError:
        return False
    if not isinstance(value, dict) or "messages" in value:
        return False
    return "role" in value or (("action" in value or "observation" in value) and "source" in value)


def _gathered(rows: Iterator[RawRow]) -> Iterator[RawRow]:
    first = next(rows, None)
    if first is None:
        return
    if first.element and _is_piece(first.data):
        yield RawRow(first.line, b"[" + b",".join([first.data, *(row.data for row in rows)]) + b"]")
        return
    yield first
    yield from rows


def _parquet(file: Path) -> Iterator[RawRow]:
    """Rows by number from 1. Arrow gives every struct all keys of its column: the null ones are left out."""
    parquet = _optional("pyarrow.parquet", "parquet", file)
    pyarrow = _optional("pyarrow", "parquet", file)
    try:
        with parquet.ParquetFile(file) as table:
            number = 0
            for batch in table.iter_batches(batch_size=PARQUET_BATCH):
                for row in batch.to_pylist():
                    number += 1
                    yield RawRow(number, _encoded(without_nulls(row)))
    except pyarrow.ArrowException as error:
        raise BrokenFile("bad_parquet", str(error).splitlines()[0][:200]) from error


def _encoded(row: Any) -> bytes:
    """JSON of a decoded row; what JSON cannot hold (bytes, dates) becomes a row that is skipped with `not_json`."""
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=True).encode("utf-8", "surrogatepass")
    except TypeError as error:
        return f"<{error}>".encode()


def without_nulls(value: Any) -> Any:
    """The value without keys whose value is null, at any depth of structs and lists."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [without_nulls(inner) for inner in value]
    return value
