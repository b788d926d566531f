"""Verdicts a second of the tool-call and edit verifiers on one core: `python -m benchmarks.verifiers_calls [--json]`.

Tool calls: the recorded tau2 and tau-bench turns ($PIVOTRL_SHARED/data; calls made up here where that is absent), each
with the demonstration and its mutations, by the rules of `domain=tau2`. Edits: see benchmarks.verifiers_shell. CPU time
of this process, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.verifier_agreement import FILES, call_turns
from benchmarks.verifiers_shell import edit_pairs, rate
from pivotrl.configuration import load_config
from pivotrl.trajectories.schema import Action, JsonDict, ToolCall, Turn
from pivotrl.verifiers.edits import EditsVerifier
from pivotrl.verifiers.mutations import mutations
from pivotrl.verifiers.registry import get_verifier

TARGETS = {"tool_calls": 5000.0, "edits": 500.0}  # verdicts a second


def recorded() -> list[Turn]:
    data = Path(os.environ.get("PIVOTRL_SHARED", "../shared")) / "data"
    return [turn for name in FILES if (data / name).is_file() for turn in call_turns(data / name, 20)]


def made_up(count: int = 200) -> list[Turn]:
    """Bookings with a nested list of passengers."""
    passenger: JsonDict = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    properties: JsonDict = {
        "user_id": {"type": "string"},
        "price": {"type": "number"},
        "cabin": {"type": "string", "enum": ["economy", "business"], "default": "economy"},
        "passengers": {"type": "array", "items": passenger},
    }
    schema = {"type": "object", "properties": properties, "required": ["user_id", "price", "passengers"]}
    tools = [{"type": "function", "function": {"name": "book", "description": "", "parameters": schema}}]
    turns = []
    for i in range(count):
        people = [{"name": f"person {k}", "age": 20 + k} for k in range(3)]
        call = ToolCall("book", {"user_id": f"user_{i}", "price": i, "passengers": people})
        state: list[JsonDict] = [{"role": "user", "content": "Book it."}]
        turns.append(Turn(f"t{i}#0", f"t{i}", "t", 0, "tau2", "train", state, tools, Action(tool_calls=(call,))))
    return turns


def pairs(turns: list[Turn]) -> Iterator[tuple[Turn, Action, float | None]]:
    made = [(turn, action) for turn in turns for action in (turn.demonstration, *(m.action for m in mutations(turn)))]
    while True:
        for turn, action in made:
            yield turn, action, 1.0 if action is turn.demonstration else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="CPU time to measure each verifier for")
    parser.add_argument("--json", action="store_true", help="the figures as JSON on the last line")
    arguments = parser.parse_args()
    rules = get_verifier(load_config(["domain=tau2"]).domain.verifier)
    turns = recorded()
    figures = {
        "tool_calls": rate(rules, pairs(turns or made_up()), arguments.seconds, time.process_time),
        "edits": rate(EditsVerifier({}), edit_pairs(), arguments.seconds, time.process_time),
    }
    source = f"{len(turns)} recorded turns" if turns else "turns made up"
    for name, value in figures.items():
        of = f", {source}" if name == "tool_calls" else ""
        print(f"{name:10} {value:10,.0f} verdicts a second of one core (target {TARGETS[name]:,.0f}{of})")
    if arguments.json:
        print(json.dumps({f"{name}_verdicts_per_second": round(value, 1) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
