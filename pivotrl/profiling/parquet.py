"""A finished profile as Parquet, for data tools: `python -m pivotrl.profiling.parquet RUN_DIR` (extra `parquet`).

Writes profile/turns.parquet and profile/rollouts.parquet, streamed in row groups, so memory stays flat. Columns are the
keys of the JSONL rows; `action` and `details`, whose shape differs from row to row, are JSON text.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from pivotrl.errors import UserError
from pivotrl.io import read_jsonl

ROWS_PER_GROUP = 20_000


def export(run_dir: Path) -> dict[str, int]:
    """Write both files; returns their numbers of rows. Raises UserError without pyarrow or a finished profile."""
    try:
        import pyarrow
    except ImportError:
        raise UserError("Parquet needs pyarrow: pip install 'pivotrl[parquet]'") from None
    directory = run_dir / "profile"
    if not (directory / "summary.json").is_file():
        raise UserError(f"{directory} holds no finished profile: run `pivotrl profile run_dir={run_dir}` first")
    a = pyarrow
    texts, numbers = a.string(), a.int64()
    turns = {
        **dict.fromkeys(("turn_id", "trajectory_id", "task_id", "domain", "split", "state_action"), texts),
        **dict.fromkeys(("tags", "demonstration"), a.list_(texts)),
        "rewards": a.list_(a.float64()),
        **dict.fromkeys(("mean", "variance"), a.float64()),
        **dict.fromkeys(("depth", "n", "right", "wrong", "unscorable", "truncated", "no_action"), numbers),
        **dict.fromkeys(("unique_actions", "prompt_tokens", "generated_tokens"), numbers),
    }
    rollouts = {
        "turn_id": texts,
        **dict.fromkeys(("index", "prompt_tokens", "weight_version", "cached_prompt_tokens"), numbers),
        "token_ids": a.list_(a.int32()),
        "logprobs": a.list_(a.float32()),
        "reward": a.float64(),
        **dict.fromkeys(("finish_reason", "action", "reason", "details"), texts),
    }
    return {
        "turns": _write(directory / "turns", turns, lambda row: row),
        "rollouts": _write(directory / "rollouts", rollouts, _plain),
    }


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, **{key: json.dumps(row.get(key), ensure_ascii=False) for key in ("action", "details")}}


def _write(stem: Path, columns: dict[str, Any], change: Callable[[dict[str, Any]], dict[str, Any]]) -> int:
    """`stem`.jsonl -> `stem`.parquet, atomically. Keys without a column are an error: nothing is dropped in silence."""
    import pyarrow
    from pyarrow import parquet

    schema = pyarrow.schema(list(columns.items()))
    source, target = stem.with_suffix(".jsonl"), stem.with_suffix(".parquet")
    temporary = target.with_name(target.name + ".tmp")
    total = 0
    with parquet.ParquetWriter(temporary, schema, compression="zstd") as writer:
        for batch in _batches(read_jsonl(source)):
            rows = [change(row) for row in batch]
            if unknown := {key for row in rows for key in row} - set(columns):
                raise UserError(f"{source}: rows have keys without a Parquet column: {', '.join(sorted(unknown))}")
            writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
            total += len(rows)
    temporary.replace(target)
    return total


def _batches(rows: Iterable[Any]) -> Iterator[list[Any]]:
    rows = iter(rows)
    while batch := list(islice(rows, ROWS_PER_GROUP)):
        yield batch


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m pivotrl.profiling.parquet RUN_DIR")
    try:
        print(", ".join(f"{name}.parquet: {count} rows" for name, count in export(Path(sys.argv[1])).items()))
    except UserError as error:
        sys.exit(str(error))
