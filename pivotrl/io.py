"""Files that stages hand over: JSONL rows and atomic JSON summaries.

Of several processes of a stage (torchrun, srun) the first keeps the books: all hold the same rows, so what the others
write with these functions is left unwritten.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


def keeps_books() -> bool:
    """Whether this process writes the files of its stage: the only one, or the first of several."""
    return os.environ.get("RANK", "0") == "0"


def write_json(path: Path, value: Any, every_rank: bool = False) -> None:
    """Write atomically: a reader sees the old file or the new one, never half of one.

    `every_rank`: the file is this rank's own, so that every one writes its.
    """
    if not (every_rank or keeps_books()):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file, ensure_ascii=False, indent=2)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def write_jsonl(path: Path, rows: Iterable[Any]) -> int:
    """Write rows atomically, one a line; returns their number."""
    if not keeps_books():
        return 0
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    count = 0
    with temporary.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return count


def read_jsonl(path: Path) -> Iterator[Any]:
    """Rows of a file that this package wrote (split on "\\n" only: U+2028 may occur inside strings)."""
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                yield json.loads(line)


def whole_rows(path: Path) -> Iterator[Any]:
    """Rows of a JSONL file that may not exist, or whose last line is torn (its writer is at work, or was killed)."""
    if path.is_file():
        with path.open("rb") as file:
            yield from (json.loads(line) for line in file if line.endswith(b"\n") and line.strip())


def append_jsonl(path: Path, rows: Iterable[Any]) -> None:
    """Append rows, flushed; a writer killed in between leaves at most one torn last line."""
    if not keeps_books():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def end_torn_line(path: Path) -> None:
    """End a last line that a killed writer left open, so that rows appended from now on are whole."""
    if not keeps_books() or not path.is_file():
        return
    with path.open("r+b") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
