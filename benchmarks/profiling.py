"""Profiling: adaptive against fixed K, the bookkeeping of many turns, and prompts in the order of the prompt trie.

    python -m benchmarks.profiling [--turns 5000] [--select-turns 100000] [--replay RUN_DIR] [--json]
    python -m benchmarks.profiling_prefix [--data FILE] [--engine 3]

(a) The second command: prompt tokens that an engine computes for 24 real trajectories, and a short real run.
(b) Adaptive: turns with known success rates, of three kinds, and with --replay those of a real profile. Both profiles
    see the same rollouts, the adaptive one fewer of them. Agreement is of the kept sets (profiling/adaptive.py); beside
    it the best that any stopping rule could do that knew the success rates' distribution, and how far two fixed
    profiles agree.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pivotrl.config import Adaptive, Config, Select
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


Rate = Callable[[random.Random], float]


def public(draw: random.Random) -> float:
    """71 % without signal, as in the paper; of those of mean <= 0.6, 44.7 % all wrong, as in the public set."""
    return draw.choices([0.0, 1.0, draw.random()], [0.13, 0.55, 0.32])[0]


def hopeless(draw: random.Random) -> float:
    """The same share without signal, most of it all wrong: a policy that is too weak for most turns."""
    return draw.choices([0.0, 1.0, draw.random()], [0.42, 0.26, 0.32])[0]


def u_shaped(draw: random.Random) -> float:
    """No turn is exactly hopeless or certain: many are nearly so."""
    return draw.betavariate(0.25, 0.35)


def simulate(rate: Rate, turns: int, k: int, draw: random.Random) -> tuple[list[list[float]], list[list[float]]]:
    """Two independent profiles of the same turns."""
    rates = [rate(draw) for _ in range(turns)]
    first, second = ([[float(draw.random() < p) for _ in range(k)] for p in rates] for _ in range(2))
    return first, second


def adaptive_against_fixed(rewards: list[list[float]], k: int, calibration: int) -> dict[str, float]:
    """Of turns with all K rewards each: what the adaptive profile would have sampled, and which turns it keeps."""
    counts = Counter(int(sum(r)) for r in rewards[:calibration])
    plan = make_plan([counts[j] for j in range(k + 1)], Adaptive().round, LAMBDA, 0.05)
    seen = rewards[:calibration] + [_play(plan, r) for r in rewards[calibration:]]
    fixed, early = ([_kept(r) for r in profile] for profile in (rewards, seen))
    return {
        "uninformative_share": 1 - sum(0 < sum(r) < k for r in rewards) / len(rewards),
        "fewer_rollouts": k * len(rewards) / sum(map(len, seen)),
        **agreement(fixed, early),
        "agreement_promised": plan.agreement_bound,
        "agreement_over_all_turns": sum(a == b for a, b in zip(fixed, early, strict=True)) / len(fixed),
    }


def agreement(fixed: list[bool], other: list[bool]) -> dict[str, float]:
    both = sum(a and b for a, b in zip(fixed, other, strict=True))
    return {
        "agreement": 2 * both / (sum(fixed) + sum(other)),
        "lost": 1 - both / sum(fixed),
        "foreign": 1 - both / sum(other),
    }


def simulated(rate: Rate, turns: int, k: int, seeds: int) -> dict[str, float]:
    runs = []
    for seed in range(seeds):
        first, second = simulate(rate, turns, k, random.Random(seed))
        two = agreement([_kept(r) for r in first], [_kept(r) for r in second])
        runs.append(
            {
                **adaptive_against_fixed(first, k, Adaptive().calibration_turns),
                "agreement_of_two_fixed": two["agreement"],
            }
        )
    mean = {name: sum(run[name] for run in runs) / len(runs) for name in runs[0]}
    mean["least_agreement"] = min(run["agreement"] for run in runs)
    many = Counter(int(sum(r)) for r in simulate(rate, 100_000, k, random.Random(99))[0])
    known = make_plan([1e3 * many[j] for j in range(k + 1)], 1, LAMBDA, 0.05)
    mean["fewer_rollouts_at_best"] = k / known.expected_rollouts  # nothing calibrated, the distribution known
    return mean


def replay(run_dir: Path) -> dict[str, float]:
    """A real profile of fixed K; half of its turns calibrate, in an order that tells nothing."""
    rows = [row["rewards"] for row in read_jsonl(run_dir / "profile" / "turns.jsonl")]
    k = max(map(len, rows))
    rewards = [r for r in rows if len(r) == k and set(r) <= {0.0, 1.0}]
    runs = []
    for seed in range(20):
        random.Random(seed).shuffle(rewards)
        runs.append(adaptive_against_fixed(rewards, k, min(Adaptive().calibration_turns, len(rewards) // 2)))
    return {"turns": len(rewards), "k": k} | {name: sum(r[name] for r in runs) / len(runs) for name in runs[0]}


def _play(plan: Plan, rewards: list[float]) -> list[float]:
    n = plan.round
    while not plan.is_decided(rewards[:n]):
        n += plan.round
    return rewards[:n]


def _kept(rewards: list[float]) -> bool:
    return is_kept(int(sum(rewards)), len(rewards), LAMBDA)


def synthetic(turns: int, k: int) -> Iterator[tuple[Turn, list[Rollout]]]:
    """Turns of eight a trajectory, with rollouts of 24 tokens: the shape of rows, not of prompts."""
    draw = random.Random(0)
    demonstration = Action("", tool_calls=(ToolCall("get_order", {"order_id": "W1"}),))
    for i in range(turns):
        name = f"retail_{i // 8:07d}"
        state = [{"role": "user", "content": f"order {i}"}]
        turn = Turn(f"{name}#{i % 8}", name, name, i % 8, f"domain{i % 3}", "train", state, [], demonstration)
        p, group = hopeless(draw), []
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


def show(title: str, figures: dict[str, float]) -> None:
    print(f"{title}:\n" + "".join(f"  {name:28} {value:8.3f}\n" for name, value in figures.items()), end="", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5_000, help="synthetic turns whose rollouts are written and read")
    parser.add_argument("--select-turns", type=int, default=100_000, help="turns to select from")
    parser.add_argument("--rollouts", type=int, default=16, help="K")
    parser.add_argument("--replay", type=Path, help="a run with a profile of fixed K")
    parser.add_argument("--json", action="store_true", help="the figures as JSON on the last line")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    for rate in (public, hopeless, u_shaped):
        figures[rate.__name__] = simulated(rate, 5000, 16, 5)
        show(f"adaptive, {rate.__name__} success rates, K=16, 5 x 5000 turns", figures[rate.__name__])
    if arguments.replay:
        figures["replay"] = replay(arguments.replay)
        show(f"adaptive, replayed on {arguments.replay}", figures["replay"])
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
