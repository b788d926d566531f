"""Profiling: adaptive against fixed K, the bookkeeping of many turns, and prompts in the order of the prompt trie.

    python -m benchmarks.profiling [--adaptive-turns 20000] [--turns 5000] [--select-turns 100000] [--replay RUN_DIR]
    python -m benchmarks.profiling --folder DIR --turns 1000000 --phases append
    python -m benchmarks.profiling_prefix [--data FILE] [--engine 3]

(a) The third command: prompt tokens that an engine computes for 24 real trajectories, and a short real run.
(b) Adaptive (benchmarks/profiling_adaptive.py): simulated turns of five kinds, and with --replay those of a real
    profile.
(c) Bookkeeping (benchmarks/profiling_bookkeeping.py): rollouts and statistics of synthetic turns through the store, a
    resume, and `select` without and with limits. With --folder that alone, phase by phase where it takes long; the
    files stay. Targets: selection of 1,000,000 turns in 60 s, memory that does not grow with rollouts.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.profiling_adaptive import (
    DEMO,
    hopeless,
    profiled,
    public,
    replay,
    resampled,
    simulated,
    u_shaped,
    uniform,
    with_histogram,
)
from benchmarks.profiling_bookkeeping import PHASES, bookkeeping


def show(title: str, figures: dict[str, float]) -> None:
    print(f"{title}:\n" + "".join(f"  {name:28} {value:8.3f}\n" for name, value in figures.items()), end="", flush=True)


def adaptive(turns: int, seeds: int, run_dir: Path | None) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for rate in (public, hopeless, u_shaped, uniform):
        figures[rate.__name__] = simulated(rate, turns, 16, seeds)
        show(f"adaptive, {rate.__name__} success rates, K=16, {seeds} x {turns} turns", figures[rate.__name__])
    figures["demo"] = resampled(DEMO, turns, seeds)
    show(f"adaptive, counts of the demo's profile, K={len(DEMO) - 1}, {seeds} x {turns} turns", figures["demo"])
    if run_dir:
        real = profiled(run_dir)
        figures["replay"] = replay(real)
        show(f"adaptive, replayed on {run_dir}", figures["replay"])
        figures["replay_with_histogram"] = with_histogram(real)
        show("adaptive, each half of it by the other half's histogram", figures["replay_with_histogram"])
        k = len(real[0])
        counts = [sum(sum(r) == right for r in real) for right in range(k + 1)]
        figures["replay_resampled"] = resampled(counts, turns, seeds)
        show(f"adaptive, its counts, K={k}, {seeds} x {turns} turns", figures["replay_resampled"])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adaptive-turns", type=int, default=20_000, help="simulated turns of each kind")
    parser.add_argument("--seeds", type=int, default=5, help="simulations of each kind")
    parser.add_argument("--turns", type=int, default=5_000, help="synthetic turns whose rollouts are written and read")
    parser.add_argument("--select-turns", type=int, help="turns to select from (100,000; with --folder, all)")
    parser.add_argument("--rollouts", type=int, default=16, help="K of the bookkeeping")
    parser.add_argument("--folder", type=Path, help="bookkeeping alone, in a folder that stays")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES, help="of the bookkeeping")
    parser.add_argument("--replay", type=Path, help="a run with a profile of fixed K")
    parser.add_argument("--json", action="store_true", help="the figures as JSON on the last line")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    if not options.folder:
        figures = adaptive(options.adaptive_turns, options.seeds, options.replay)
    select_turns = options.select_turns or (options.turns if options.folder else 100_000)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        found = bookkeeping(options.turns, select_turns, options.rollouts, folder, options.phases)
    print(f"{options.turns:,} turns x {options.rollouts} rollouts; selection of {select_turns:,} turns:")
    for name, value in found.items():
        measured = select_turns if name.startswith("select") else options.turns
        million = value * 1e6 / measured
        more = f"  ({million:7.1f} s for 1,000,000 at this pace)" if name.endswith("_seconds") else ""
        print(f"  {name:28} {value:8.3f}{more}")
    figures["bookkeeping"] = {"turns": options.turns, "select_turns": select_turns, **found}
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
