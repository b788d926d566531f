"""Rendering of states, four ways in one run: `python -m benchmarks.rendering [--json] [--model DIR]`.

One process; `--workers` processes (0: all CPUs), their start included; a cache that is empty, with one process; and a
cache that holds everything. Every way must give the same ids. States are those of synthetic trajectories with tools, so
that they grow as those of users do.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import environment, interleave, median, parser
from benchmarks.turns import messages, tools
from pivotrl.models.builtin import resolve_model
from pivotrl.rendering.chat import Renderer
from pivotrl.rendering.prompts import State, default_workers, prompts_of
from pivotrl.trajectories.normalise import messages_of, tools_of

Render = Callable[[], list[tuple[int, ...]]]


def states(trajectories: int, turns: int) -> list[State]:
    """States of all turns; those of a trajectory share their messages."""
    made: list[State] = []
    listed = tools_of(tools())
    for i in range(trajectories):
        whole = messages_of(list(messages(i, turns)))
        made.extend((whole[:at], listed) for at, message in enumerate(whole) if message["role"] == "assistant")
    return made


def sides(made: list[State], model: Path, workers: int, folder: Path) -> dict[str, Render]:
    """The ways by name. Each makes a renderer of its own: the last prompts of one are not at hand for the next."""

    def run(workers: int, cache: Path | None, empty: bool) -> list[tuple[int, ...]]:
        if empty and cache is not None:
            shutil.rmtree(cache, ignore_errors=True)
        return list(prompts_of(made, Renderer(model, "hermes"), workers, cache))

    return {
        "one process": partial(run, 1, None, False),
        f"{workers} processes": partial(run, workers, None, False),
        "one process, empty cache": partial(run, 1, folder / "empty", True),
        "full cache": partial(run, 1, folder / "full", False),
    }


def measured(trajectories: int, turns: int, model: Path, workers: int, repeats: int) -> dict[str, Any]:
    """States, tokens and the median seconds of each way. Raises `AssertionError` where two differ in an id."""
    made = states(trajectories, turns)
    alone = list(prompts_of(made, Renderer(model, "hermes")))
    with tempfile.TemporaryDirectory() as folder:

        def checked(name: str, run: Render) -> None:
            if run() != alone:
                raise AssertionError(f"{name} gives other ids than one process")

        ways = sides(made, model, workers, Path(folder))
        ways["full cache"]()  # fills it
        runs = {name: partial(checked, name, run) for name, run in ways.items()}
        seconds = {name: median(each) for name, each in interleave(runs, repeats, warmup=0).items()}
    tokens = sum(map(len, alone))
    return {"states": len(made), "tokens": tokens, "workers": workers, "seconds": seconds}


def main() -> None:
    made = parser(__doc__)
    made.set_defaults(repeats=3)
    made.add_argument("--trajectories", type=int, default=500)
    made.add_argument("--turns", type=int, default=12, help="assistant turns of each (default 12)")
    made.add_argument("--workers", type=int, default=0, help="processes (default: the CPUs of this process)")
    made.add_argument("--model", default="builtin:smollm2-135m", help="folder whose tokenizer renders")
    options = made.parse_args()
    workers, model = options.workers or default_workers(), resolve_model(options.model)
    row = measured(options.trajectories, options.turns, model, workers, options.repeats)
    if options.json:
        print(json.dumps({"benchmark": "rendering", **row, **environment()}), flush=True)
        return
    print(
        f"{row['states']} states, {row['tokens']} tokens; all ways give the same ids (median of {options.repeats} runs)"
    )
    alone = row["seconds"]["one process"]
    for name, seconds in row["seconds"].items():
        print(f"  {name:<26} {seconds:>8.2f} s {row['states'] / seconds:>9.0f} states/s {alone / seconds:>7.2f} times")


if __name__ == "__main__":
    main()
