"""Profiling without an engine: adaptive against fixed K on simulated turns, and the bookkeeping of many turns.

    python -m benchmarks.profiling [--turns 5000] [--select-turns 100000] [--json]

(b) Adaptive: turns with known success rates, two kinds. Both profiles see the same rollouts, the adaptive one fewer of
    them. Agreement is over all turns; beside it the kept set alone, and how far two fixed profiles agree.
(c) Bookkeeping: rollouts and statistics of synthetic turns through the store, a resume, and `select` without and with
    limits.
    Targets: selection of 1,000,000 turns in 60 s, memory that does not grow with rollouts.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pivotrl.config import Config, Select
from pivotrl.generation.engine import Completion
from pivotrl.io import read_jsonl, write_jsonl
from pivotrl.profiling.adaptive import Plan, is_kept, make_plan
from pivotrl.profiling.select import run_select
from pivotrl.profiling.statistics import turn_row
from pivotrl.profiling.store import RolloutStore
from pivotrl.rollouts import Rollout
from pivotrl.trajectories.schema import Action, ToolCall, Turn
from pivotrl.verifiers.base import Verdict

LAMBDA = 0.6
MOST_TRACED_TURNS = 20_000  # tracing memory slows everything down by much


def spiked(draw: random.Random) -> float:
    """Two thirds of the turns can teach nothing, as the paper reports (71 % gave no signal); the rest are uniform."""
    return draw.choices([0.0, 1.0, draw.random()], [0.42, 0.26, 0.32])[0]


def u_shaped(draw: random.Random) -> float:
    """No turn is exactly hopeless or certain: many are nearly so."""
    return draw.betavariate(0.25, 0.35)


def adaptive_against_fixed(rate: Any, turns: int, k: int, seed: int) -> dict[str, float]:
    draw = random.Random(seed)
    rates = [rate(draw) for _ in range(turns)]
    first, second = ([[float(draw.random() < p) for _ in range(k)] for p in rates] for _ in range(2))
    calibration = 256
    counts = Counter(int(sum(rewards)) for rewards in first[:calibration])
    plan = make_plan([counts[j] for j in range(k + 1)], 2, LAMBDA, 0.05)
    seen = first[:calibration] + [_play(plan, rewards) for rewards in first[calibration:]]
    fixed, again, early = ([_kept(r) for r in profile] for profile in (first, second, seen))
    both = sum(a and b for a, b in zip(fixed, early, strict=True))
    return {
        "uninformative_share": 1 - sum(0 < sum(r) < k for r in first) / turns,
        "fewer_rollouts": k * turns / sum(map(len, seen)),
        "agreement": _agreement(fixed, early),
        "agreement_of_two_fixed": _agreement(fixed, again),
        "kept_recall": both / sum(fixed),
        "kept_precision": both / sum(early),
        "kept_recall_of_two_fixed": sum(a and b for a, b in zip(fixed, again, strict=True)) / sum(fixed),
    }


def _play(plan: Plan, rewards: list[float]) -> list[float]:
    n = plan.round
    while not plan.is_decided(rewards[:n]):
        n += plan.round
    return rewards[:n]


def _kept(rewards: list[float]) -> bool:
    return is_kept(int(sum(rewards)), len(rewards), LAMBDA)


def _agreement(one: list[bool], other: list[bool]) -> float:
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)


def synthetic(turns: int, k: int) -> Iterator[tuple[Turn, list[Rollout]]]:
    """Turns of eight a trajectory, with rollouts of 24 tokens: the shape of rows, not of prompts."""
    draw = random.Random(0)
    demonstration = Action("", tool_calls=(ToolCall("get_order", {"order_id": "W1"}),))
    for i in range(turns):
        name = f"retail_{i // 8:07d}"
        state = [{"role": "user", "content": f"order {i}"}]
        turn = Turn(f"{name}#{i % 8}", name, name, i % 8, f"domain{i % 3}", "train", state, [], demonstration)
        p, group = spiked(draw), []
        for index in range(k):
            right = draw.random() < p
            action = Action("", tool_calls=(ToolCall("get_order", {"order_id": "W1" if right else f"W{index}"}),))
            completion = Completion(tuple(range(24)), (-0.25,) * 24, "stop", 0, 900)
            group.append(Rollout(turn.id, index, 1000, completion, action, Verdict(float(right), "compared")))
        yield turn, group


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


def _copies(rows: list[dict[str, Any]], count: int) -> Iterator[dict[str, Any]]:
    """`count` rows of different turns, trajectories and contents, from fewer."""
    for i in range(count):
        row, copy = rows[i % len(rows)], i // len(rows)
        changed = {key: f"{copy}.{row[key]}" for key in ("turn_id", "trajectory_id", "state_action")}
        yield {**row, **changed}


def bookkeeping(turns: int, select_turns: int, k: int, folder: Path) -> dict[str, float]:
    """Seconds and bytes of each part; making the rollouts themselves is not counted. Selection is of `select_turns`."""
    path, watch = folder / "profile" / "rollouts.jsonl", Stopwatch()
    store = RolloutStore(path, k)
    batch: list[list[Rollout]] = []
    made: list[Turn] = []
    for turn, group in synthetic(turns, k):
        batch.append(group)
        made.append(turn)
        if len(batch) == 256 or len(made) == turns:
            with watch.measure("append"):
                store.append(batch)
            batch = []
    store.close()
    with watch.measure("resume"):
        store = RolloutStore(path, k)
    with watch.measure("statistics"):
        write_jsonl(folder / "profile" / "turns.jsonl", (turn_row(t, store.rollouts(t.id)) for t in made))
    store.close()
    figures = {"rollouts_gib": path.stat().st_size / 2**30}
    rows = list(read_jsonl(folder / "profile" / "turns.jsonl"))
    selected = write_jsonl(folder / "profile" / "turns.jsonl", _copies(rows, select_turns))
    limits = Select(deduplicate=True, max_per_trajectory=2, max_pivots=selected // 10)
    for name, options in (("select", Select()), ("select_limits", limits)):
        with watch.measure(name):
            run_select(Config(select=options), folder)
    write_jsonl(folder / "profile" / "turns.jsonl", rows)
    if turns <= MOST_TRACED_TURNS:
        figures |= memory(path, k, folder, {"select": Select(), "select_limits": limits}, turns)
    return {**watch.figures, **figures}


def memory(path: Path, k: int, folder: Path, selections: dict[str, Select], turns: int) -> dict[str, float]:
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
        figures[f"{name}_peak_bytes_per_turn"] = (tracemalloc.get_traced_memory()[1] - before) / turns
    tracemalloc.stop()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5_000, help="synthetic turns whose rollouts are written and read")
    parser.add_argument("--select-turns", type=int, default=100_000, help="turns to select from")
    parser.add_argument("--rollouts", type=int, default=16, help="K")
    parser.add_argument("--json", action="store_true", help="the figures as JSON on the last line")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    for rate in (spiked, u_shaped):
        runs = [adaptive_against_fixed(rate, 5000, 16, seed) for seed in range(5)]
        mean = {name: sum(run[name] for run in runs) / len(runs) for name in runs[0]}
        mean["least_agreement"] = min(run["agreement"] for run in runs)
        figures[rate.__name__] = mean
        print(f"adaptive, {rate.__name__} success rates, K=16, 5 x 5000 turns:")
        print("".join(f"  {name:28} {value:8.3f}\n" for name, value in mean.items()), end="")
    with tempfile.TemporaryDirectory() as folder:
        found = bookkeeping(arguments.turns, arguments.select_turns, arguments.rollouts, Path(folder))
    measured = {n: arguments.select_turns if n.startswith("select") else arguments.turns for n in found}
    million = {n: v * 1e6 / measured[n] for n, v in found.items() if n.endswith("_seconds")}
    print(f"{arguments.turns:,} turns x {arguments.rollouts} rollouts; selection of {arguments.select_turns:,} turns:")
    for name, value in found.items():
        more = f"  ({million[name]:7.1f} s for 1,000,000 at this pace)" if name in million else ""
        print(f"  {name:28} {value:8.3f}{more}")
    figures["bookkeeping"] = {"turns": arguments.turns, "select_turns": arguments.select_turns, **found}
    if arguments.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
