"""`pivotrl turns` on synthetic trajectories, one core, no rendering: `python -m benchmarks.turns [--json]`.

Runs the stage twice, each in a process of its own: on a tenth of the trajectories and on all of them. Turns a second
come from the whole run (reading, splits, flags, deduplication, files). Growth is the difference of the two peaks over
that of the turns; what may grow is the index of ids, tasks and turns seen (16 to 32 bytes each). Bytes a turn are those
of turns.jsonl and messages.jsonl, beside what rows that repeat their states would take.

`--stream GIB` sends that much through a pipe into the reader alone, and prints its peak after a tenth and at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import environment
from pivotrl.trajectories.schema import Trajectory

TARGET = 5000.0  # turns a second
WORDS = (
    "order",
    "flight",
    "booking",
    "cancel",
    "refund",
    "please",
    "check",
    "status",
    "the",
    "account",
    "update",
    "change",
)


def tools() -> list[dict[str, Any]]:
    made = []
    for i in range(8):
        properties = {f"field_{j}": {"type": "string", "description": f"The field number {j}."} for j in range(4)}
        schema = {"type": "object", "properties": properties, "required": ["field_0"]}
        function = {"name": f"tool_{i}", "description": f"Does the thing number {i}.", "parameters": schema}
        made.append({"type": "function", "function": function})
    return made


def sentence(seed: int, words: int) -> str:
    return " ".join(WORDS[(seed * 7 + i * (seed % 5 + 1)) % len(WORDS)] for i in range(words)) + f" {seed}."


def messages(trajectory: int, turns: int, words: int = 30) -> Iterator[dict[str, Any]]:
    """A policy, then user, call, result (of `words`), answer in turn, until there are `turns` assistant turns."""
    yield {"role": "system", "content": sentence(1, 120)}
    made = 0
    while made < turns:
        seed = trajectory * 1000 + made
        yield {"role": "user", "content": sentence(seed, 20)}
        arguments = json.dumps({"field_0": sentence(seed, 3), "field_1": str(seed)})
        function = {"name": f"tool_{seed % 8}", "arguments": arguments}
        call = {"id": f"call_{made}", "type": "function", "function": function}
        yield {"role": "assistant", "content": None, "tool_calls": [call]}
        yield {"role": "tool", "tool_call_id": f"call_{made}", "content": json.dumps({"result": sentence(seed, words)})}
        made += 1
        if made < turns:
            yield {"role": "assistant", "content": sentence(seed + 1, 25)}
            made += 1


def write(path: Path, count: int, turns: int) -> None:
    listed = tools()
    with path.open("w", encoding="utf-8") as file:
        for i in range(count):
            row = {"id": f"run_{i}", "tools": listed, "messages": list(messages(i, turns)), "meta": {"task_id": i // 2}}
            file.write(json.dumps(row) + "\n")


def stage(path: Path, run_dir: Path) -> dict[str, float]:
    """Run in a process of its own: its peak memory is that of the stage."""
    from pivotrl.config import Config, Trajectories
    from pivotrl.trajectories.turn_lines import turns_in
    from pivotrl.turns_stage import run_turns

    start, cpu = time.perf_counter(), time.process_time()
    summary = run_turns(Config(trajectories=Trajectories(path=str(path))), run_dir)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    start = time.process_time()
    count = sum(1 for _ in turns_in(run_dir / "turns" / "turns.jsonl"))  # as later stages read them
    assert count == summary["turns"]["kept"]
    read = time.process_time() - start
    return {"turns": count, "seconds": seconds, "cpu_seconds": cpu, "read_cpu_seconds": read, "peak_mib": peak}


def stream(path: Path, gib: float, turns: int, words: int) -> dict[str, float]:
    """Read `gib` GiB of rows of `turns` turns that another thread writes into the pipe `path`: no file is whole."""
    from pivotrl.trajectories.reader import read_trajectories

    line = json.dumps({"tools": tools(), "messages": list(messages(1, turns, words)), "meta": {"task_id": 1}})
    rows = max(int(gib * (1 << 30) / (len(line) + 24)), 10)

    def feed() -> None:
        with path.open("w", encoding="utf-8") as pipe:
            for i in range(rows):
                pipe.write(f'{{"id": "run_{i:09}", {line[1:]}\n')

    os.mkfifo(path)
    feeder = threading.Thread(target=feed)
    feeder.start()
    start, tenth = time.process_time(), 0.0
    for number, item in enumerate(read_trajectories(str(path))):
        assert isinstance(item, Trajectory), item
        if number == rows // 10:
            tenth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    feeder.join()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    growth = (peak - tenth) * 1024 / (rows - rows // 10)
    figures = {"gib": rows * (len(line) + 24) / (1 << 30), "rows": rows, "cpu_seconds": time.process_time() - start}
    return {**figures, "tenth_mib": tenth / 1024, "peak_mib": peak / 1024, "growth_bytes_per_row": growth}


STATE_BYTES = re.compile(rb'"state_bytes": (\d+), "demonstration"')


def sizes(folder: Path, count: int) -> dict[str, float]:
    """Bytes a turn of both files, and of one file whose rows would repeat their states."""
    turns, messages, repeated = folder / "turns.jsonl", folder / "messages.jsonl", 0
    with turns.open("rb") as file:
        for line in file:
            found = STATE_BYTES.search(line)
            assert found is not None
            repeated += len(line) + int(found[1])
    written = turns.stat().st_size + messages.stat().st_size
    return {"bytes_per_turn": written / count, "bytes_per_turn_repeated": repeated / count}


def measured(count: int, turns: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trajectories.jsonl"
        write(path, count, turns)
        command = [sys.executable, "-m", "benchmarks.turns", "--stage", str(path)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        rates = sizes(path.parent / "run" / "turns", row["turns"])
        rates["turns_per_second"] = row["turns"] / row["seconds"]
        rates["turns_per_cpu_second"] = row["turns"] / row["cpu_seconds"]  # what a core that is ours alone would give
        rates["read_back_per_cpu_second"] = row["turns"] / row["read_cpu_seconds"]
        return {"trajectories": count, **row, **rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--turns", type=int, default=6, help="assistant turns of each (default 6)")
    parser.add_argument("--words", type=int, default=30, help="of a tool result in --stream (default 30)")
    parser.add_argument("--stage", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--stream", type=float, metavar="GIB", help="read this much through a pipe instead")
    options = parser.parse_args()
    if options.stream is not None:
        with tempfile.TemporaryDirectory() as folder:
            figures = stream(Path(folder) / "rows.jsonl", options.stream, options.turns, options.words)
            print(json.dumps({"benchmark": "turns --stream", **figures}))
        return
    if options.stage is not None:
        print(json.dumps(stage(options.stage, options.stage.parent / "run")))
        return
    small = measured(max(options.trajectories // 10, 1), options.turns)
    whole = measured(options.trajectories, options.turns)
    growth = (whole["peak_mib"] - small["peak_mib"]) * (1 << 20) / max(whole["turns"] - small["turns"], 1)
    if options.json:
        result = {"benchmark": "turns", "target": TARGET, "tenth": small, "whole": whole, **environment()}
        result["growth_bytes_per_turn"] = growth
        print(json.dumps(result), flush=True)
        return
    for row in (small, whole):
        rate = f"{row['turns_per_second']:.0f} turns/s, {row['turns_per_cpu_second']:.0f} a CPU second"
        print(f"{row['trajectories']:>8} trajectories: {rate}, {row['turns']} turns, peak {row['peak_mib']:.0f} MiB")
        size = f"{row['bytes_per_turn']:.0f} bytes a turn ({row['bytes_per_turn_repeated']:.0f} with repeated states)"
        print(f"{'':>8} {size}, {row['read_back_per_cpu_second']:.0f} read back a CPU second")
    print(f"memory grows by {growth:.0f} bytes a turn; target {TARGET:.0f} turns/s on one core")


if __name__ == "__main__":
    main()
