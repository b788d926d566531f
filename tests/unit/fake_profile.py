"""A whole `pivotrl profile` without a model: turns on disk, a scripted engine, a letter-by-letter renderer."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from pivotrl.config import Config, Profile, Rendering
from pivotrl.generation.engine import Sampling
from pivotrl.generation.scripted import ScriptedEngine
from pivotrl.io import write_jsonl
from pivotrl.profiling import stage
from pivotrl.trajectories.schema import Action, Turn
from pivotrl.verifiers.base import Verdict

STOP = 0


class Letters:
    """A renderer of one token a character; a completion is its text."""

    stop_token_ids = (STOP,)

    def prompt_ids(self, messages: list[dict[str, Any]], tools: list[Any]) -> list[int]:
        return [ord(c) for m in messages for c in m["content"]]

    def parse(self, ids: Sequence[int], tools: Sequence[Any] = ()) -> Action:
        return Action("".join(chr(i) for i in ids if i != STOP))

    def fingerprint(self) -> str:
        return "letters"


class Equal:
    name, version = "equal", "1"

    def config(self) -> dict[str, Any]:
        return {}

    def verify(self, turn: Turn, action: Action) -> Verdict:
        if action.text == "?":
            return Verdict(None, "judge_down")
        return Verdict(float(action.text == turn.demonstration.text), "compared")


def script(prompt: Sequence[int], k: int, seed: int) -> list[int]:
    """Right ("a") with a chance that the prompt tells: its second letter, 0 to 9 tenths, 9 meaning certain."""
    tenths = prompt[1] - ord("0")
    draw = random.Random(f"{prompt}/{k}/{seed}").random()
    return [ord("a" if tenths == 9 or draw < tenths / 10 else "b"), STOP]


def turns(trajectories: int, seed: int = 0, split: str = "train") -> list[Turn]:
    """Trajectories of 1 to 6 turns, most of them hopeless or certain."""
    draw, made = random.Random(seed), []
    for i in range(trajectories):
        for depth in range(draw.randint(1, 6)):
            chance = draw.choice([0, 0, 0, 0, 9, 9, 1, 3, 5, 8])
            state = [{"role": "user", "content": f"p{chance} {i}" + "x" * depth}]
            name = f"{split}{i:03d}"
            made.append(Turn(f"{name}#{depth}", name, name, depth, "d", split, state, [], Action("a"), "f:1"))
    return made


@dataclass
class Bench:
    start_policy: Path
    seconds_per_call: float = 0.0
    renderer = Letters()
    verifier = Equal()
    sampling = Sampling(max_new_tokens=4)

    @contextmanager
    def engine(self) -> Iterator[ScriptedEngine]:
        engine = ScriptedEngine(script, stop_token_ids=[STOP])
        if self.seconds_per_call:
            generate = engine.generate

            def slow(*arguments: Any) -> Any:
                time.sleep(self.seconds_per_call)
                return generate(*arguments)

            engine.generate = slow  # type: ignore[method-assign]
        yield engine


def use(monkeypatch: pytest.MonkeyPatch, run_dir: Path, seconds_per_call: float = 0.0) -> None:
    """Let `run_profile` work on the fake bench."""
    bench = Bench(run_dir / "no-weights", seconds_per_call)
    monkeypatch.setattr(stage.Workbench, "build", classmethod(lambda cls, cfg, run_dir: bench))


def make(run_dir: Path, made: list[Turn], in_flight: int = 6, **profile: Any) -> Config:
    """Write the turns; returns the configuration of a profile of 8 rollouts a turn, a few turns in flight."""
    write_jsonl(run_dir / "turns" / "turns.jsonl", (t.to_json() for t in made))
    rendering = Rendering(workers=1, cache=False)  # other processes would need a real tokenizer
    cfg = Config(
        run_dir=str(run_dir), seed=3, rendering=rendering, profile=Profile(**{"rollouts_per_turn": 8, **profile})
    )
    return replace(cfg, generation=replace(cfg.generation, max_sequences=in_flight))
