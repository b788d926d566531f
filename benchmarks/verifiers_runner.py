"""The verifier runner: what hanging verifiers cost, and what processes cost.

    python -m benchmarks.verifiers_runner [--hangs 100] [--limit 10] [--workers 2] [--max-stuck 100] [--pairs 4000]
    [--json]

1. `hangs` pairs that never return, of as many turns, before 50 that do: wall time against the limit, when the good ones
   were done, and the processes left. 2. Verdicts a second in this process and through workers, on short and long
   states.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections.abc import Iterator
from typing import Any

from pivotrl.trajectories.schema import Action, ToolCall, Turn
from pivotrl.verifiers.base import Verdict
from pivotrl.verifiers.nemo_gym import SingleStepToolUse
from pivotrl.verifiers.runner import Pair, VerifierRunner
from pivotrl.verifiers.worker_process import descendants

TURNS, ROLLOUTS = 250, 16


class SleepsForever:
    """Never returns for the action "hang"; touches a clock for the others."""

    name, version = "sleeps_forever", "1"

    def config(self) -> dict[str, Any]:
        return {}

    def verify(self, turn: Turn, action: Action) -> Verdict:
        while action.text == "hang":
            time.sleep(3600)
        return Verdict(1.0, "match", {"at": time.monotonic()})


def make_turn(index: int, characters: int) -> Turn:
    call = ToolCall("find", {"query": f"item {index} in stock", "limit": 10})
    state = [{"role": "user", "content": "x" * characters}]
    return Turn(f"t{index}#0", f"t{index}", "task", 0, "bench", "train", state, [], Action(tool_calls=(call,)))


def rollouts(characters: int) -> Iterator[Pair]:
    """TURNS turns of ROLLOUTS different actions each."""
    for i in range(TURNS):
        turn = make_turn(i, characters)
        for k in range(ROLLOUTS):
            arguments = {**turn.demonstration.tool_calls[0].arguments, "limit": 10 + k}
            yield turn, Action(tool_calls=(ToolCall("find", arguments),))


def hangs(args: argparse.Namespace) -> dict[str, float]:
    # The benchmark's own module, by name: workers do not run the main script.
    from benchmarks.verifiers_runner import SleepsForever as Verifier

    before = descendants(os.getpid())
    bad = [(make_turn(i, 100), Action(text="hang")) for i in range(args.hangs)]
    good = [(make_turn(args.hangs + i, 100), Action(text="fine")) for i in range(50)]
    with VerifierRunner(Verifier, args.workers, args.limit, max_stuck=args.max_stuck) as runner:
        runner.score([(make_turn(-i - 1, 100), Action(text="warm")) for i in range(args.workers)])
        started = time.monotonic()
        verdicts = runner.score([*bad, *good])
        wall = time.monotonic() - started
        last_good = max(v.details["at"] for v in verdicts[args.hangs :]) - started
    timeouts = sum(v.reason == "timeout" for v in verdicts)
    scored = sum(v.reward is not None for v in verdicts)
    left = len(descendants(os.getpid()) - before)
    assert (timeouts, scored) == (args.hangs, 50), "a hang was scored, or a good pair was not"
    return {
        "hangs": args.hangs,
        "limit_seconds": args.limit,
        "wall_seconds": round(wall, 2),
        "last_good_seconds": round(last_good, 2),
        "one_after_another_seconds": round(args.hangs * args.limit / args.workers, 2),
        "processes_left": left,
    }


def throughput(args: argparse.Namespace, workers: int, characters: int) -> dict[str, float]:
    pairs = list(rollouts(characters))[: args.pairs]
    factory = functools.partial(SingleStepToolUse, {})
    with VerifierRunner(factory, workers, args.limit) as runner:
        runner.score([(make_turn(-1 - i, 10), Action(text="warm")) for i in range(max(1, workers) * 2)])
        started = time.monotonic()
        runner.score(pairs)
        fresh = time.monotonic() - started
        started = time.monotonic()
        runner.score(pairs)
        cached = time.monotonic() - started
    return {
        "workers": workers,
        "state_characters": characters,
        "verdicts_per_second": round(len(pairs) / fresh),
        "cached_per_second": round(len(pairs) / cached),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hangs", type=int, default=100)
    parser.add_argument("--limit", type=float, default=10.0, help="seconds a pair may take")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--max-stuck", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=TURNS * ROLLOUTS)
    parser.add_argument("--json", action="store_true", help="a JSON object as the last line")
    args = parser.parse_args()
    hang = hangs(args)
    print(
        f"{hang['hangs']} hanging pairs, limit {hang['limit_seconds']} s, {args.workers} workers: all done after "
        f"{hang['wall_seconds']} s (one after another: {hang['one_after_another_seconds']} s), the good pairs after "
        f"{hang['last_good_seconds']} s, {hang['processes_left']} processes left"
    )
    rows = [throughput(args, workers, size) for size in (1_000, 50_000) for workers in (0, args.workers)]
    for row in rows:
        where = f"{row['workers']} workers" if row["workers"] else "in process"
        print(
            f"states of {row['state_characters']:>6} characters, {where:>10}: {row['verdicts_per_second']:>6} "
            f"verdicts/s, {row['cached_per_second']:>6}/s from the cache"
        )
    if args.json:
        print(json.dumps({"hangs": hang, "throughput": rows}))


if __name__ == "__main__":
    main()
