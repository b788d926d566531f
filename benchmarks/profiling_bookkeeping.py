"""Bookkeeping of a profile: rollouts through the store, a resume, the rows of turns, selection. Seconds and memory.

Turns and rollouts are synthetic, and made one by one; making them is not counted. The files may be kept in a folder,
where a further call goes on as a profile does: what is in the store is not written again.
"""

from __future__ import annotations

import random
import resource
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.profiling_adaptive import hopeless
from pivotrl.config import Config, Select
from pivotrl.generation.engine import Completion
from pivotrl.io import read_jsonl, write_jsonl
from pivotrl.profiling.select import run_select
from pivotrl.profiling.statistics import turn_row
from pivotrl.profiling.store import RolloutStore
from pivotrl.rollouts import Rollout
from pivotrl.trajectories.schema import Action, ToolCall, Turn
from pivotrl.verifiers.base import Verdict

PHASES = ("append", "resume", "statistics", "select")
MOST_TRACED_TURNS = 20_000  # tracing memory slows everything down by much
PER_WRITE = 256  # turns whose rollouts are written together


def turn_of(number: int) -> Turn:
    """Turns of eight a trajectory."""
    name = f"retail_{number // 8:07d}"
    state = [{"role": "user", "content": f"order {number}"}]
    demonstration = Action("", tool_calls=(ToolCall("get_order", {"order_id": "W1"}),))
    return Turn(
        f"{name}#{number % 8}", name, name, number % 8, f"domain{number % 3}", "train", state, [], demonstration
    )


def group_of(turn: Turn, number: int, k: int) -> list[Rollout]:
    """Rollouts of 24 tokens: the shape of rows, not of prompts."""
    draw = random.Random(number)
    p, group = hopeless(draw), []
    for index in range(k):
        right = draw.random() < p
        action = Action("", tool_calls=(ToolCall("get_order", {"order_id": "W1" if right else f"W{index}"}),))
        completion = Completion(tuple(range(24)), (-0.25,) * 24, "stop", 0, 900)
        group.append(Rollout(turn.id, index, 1000, completion, action, Verdict(float(right), "compared")))
    return group


class Stopwatch:
    """Wall and processor seconds by name; on a busy machine only the latter says what the code costs."""

    def __init__(self) -> None:
        self.figures: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        for kind, value in (("wall", time.perf_counter() - wall), ("cpu", time.process_time() - cpu)):
            key = f"{name}_{kind}_seconds"
            self.figures[key] = self.figures.get(key, 0.0) + value


def bookkeeping(
    turns: int, select_turns: int, k: int, folder: Path, phases: Sequence[str] = PHASES
) -> dict[str, float]:
    """Seconds of each phase, and bytes. Selection is of `select_turns`, made of the `turns` if they are fewer."""
    watch, figures = Stopwatch(), dict[str, float]()
    path, rows = folder / "profile" / "rollouts.jsonl", folder / "profile" / "turns.jsonl"
    if "append" in phases:
        figures["appended_rollouts"] = _append(path, turns, k, watch)
        figures["rollouts_gib"] = path.stat().st_size / 2**30
    if "resume" in phases or "statistics" in phases:
        with watch.measure("resume"):
            store = RolloutStore(path, k)
        if len(store) != turns:
            raise SystemExit(f"{path} has the rollouts of {len(store)} turns, not {turns}: run the phase append first")
        if "statistics" in phases:
            made = map(turn_of, range(turns))
            with watch.measure("statistics"):
                write_jsonl(rows, (turn_row(t, store.rows(t.id)) for t in made))
        store.close()
    selections = {"select": Select(), "select_limits": Select(deduplicate=True, max_per_trajectory=2, max_pivots=100)}
    if "select" in phases:
        if select_turns != turns:
            write_jsonl(rows, _copies(list(read_jsonl(rows)), select_turns))
        for name, options in selections.items():
            with watch.measure(name):
                run_select(Config(select=options), folder)
    figures["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if set(phases) == set(PHASES) and turns <= MOST_TRACED_TURNS:
        figures |= _memory(path, k, folder, selections, turns, select_turns)
    return {**watch.figures, **figures}


def _append(path: Path, turns: int, k: int, watch: Stopwatch) -> int:
    """Rollouts written now; those that are there already stay."""
    store, written = RolloutStore(path, k), 0
    batch: list[list[Rollout]] = []
    for number in range(turns):
        turn = turn_of(number)
        if turn.id not in store:
            batch.append(group_of(turn, number, k))
        if batch and (len(batch) == PER_WRITE or number == turns - 1):
            with watch.measure("append"):
                store.append(batch)
            written += k * len(batch)
            batch = []
    store.close()
    return written


def _copies(rows: list[dict[str, Any]], count: int) -> Iterator[dict[str, Any]]:
    """`count` rows of different turns, trajectories and contents, from fewer."""
    for i in range(count):
        row, copy = rows[i % len(rows)], i // len(rows)
        changed = {key: f"{copy}.{row[key]}" for key in ("turn_id", "trajectory_id", "state_action")}
        yield {**row, **changed}


def _memory(
    path: Path, k: int, folder: Path, selections: dict[str, Select], turns: int, select_turns: int
) -> dict[str, float]:
    """Traced bytes a turn: of the store's index, and the peak of each selection."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    store = RolloutStore(path, k)
    figures = {"index_bytes_per_turn": (tracemalloc.get_traced_memory()[0] - before) / turns}
    store.close()
    for name, options in selections.items():
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        run_select(Config(select=options), folder)
        figures[f"{name}_peak_bytes_per_turn"] = (tracemalloc.get_traced_memory()[1] - before) / select_turns
    tracemalloc.stop()
    return figures
