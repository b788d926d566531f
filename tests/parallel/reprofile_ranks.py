"""Training in small with re-profiling, alone or under torchrun (run by test_reprofile_ranks.py).

Arguments: a folder. Writes `seen-<rank>.json` of every case: what each step drew, sampled and was told.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from fake_profile import STOP, Equal, Letters, make, turns, use

from pivotrl.config import Adaptive, Config, Reprofile
from pivotrl.generation.data_parallel import gather_groups, share
from pivotrl.generation.engine import Completion, Sampling
from pivotrl.generation.scripted import ScriptedEngine
from pivotrl.io import keeps_books, read_jsonl
from pivotrl.local_rollouts import LocalRoller, State
from pivotrl.peers import wait_for_peers
from pivotrl.profiling.select import run_select
from pivotrl.profiling.stage import run_profile
from pivotrl.training.pivot_source import PivotSource

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
TURNS, STEPS = turns(30, seed=11), 10
CASES: dict[str, tuple[Reprofile, int, Adaptive]] = {
    "all": (Reprofile(every_steps=4), 0, Adaptive()),
    "some": (Reprofile(every_steps=4, below_mixed=0.6, window=3, turns=20), 2, Adaptive()),
    "adaptive": (Reprofile(every_steps=4), 0, Adaptive(enabled=True, calibration_turns=20, error=0.1)),
}


class Learner:
    """Several engines in one world, as vLLM's are; right with a chance that grows with `skill`."""

    def __init__(self) -> None:
        self.skill, self.sampled = 0.0, 0
        self._engine = ScriptedEngine(self._script, stop_token_ids=[STOP])

    def _script(self, prompt: Sequence[int], k: int, seed: int) -> list[int]:
        tenths = prompt[1] - ord("0")
        chance = 0.0 if tenths == 0 else 1.0 if tenths == 9 else tenths / 10 + self.skill
        return [ord("a" if random.Random(f"{prompt}/{k}/{seed}").random() < chance else "b"), STOP]

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, n: int, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        mine = share(range(len(prompts)), RANK, WORLD)
        self.sampled += n * len(mine)

        def sample() -> list[list[Completion]]:
            found = self._engine.generate([prompts[i] for i in mine], sampling, n, [seeds[i] for i in mine])
            groups: list[list[Completion]] = [[]] * len(prompts)
            for i, group in zip(mine, found, strict=True):
                groups[i] = group
            return groups

        return gather_groups(len(prompts), mine, sample) if WORLD > 1 else sample()

    def forget(self) -> None:
        self._engine.forget()


def source(cfg: Config, run_dir: Path, learner: Learner) -> PivotSource:
    ids = {row["turn_id"] for row in read_jsonl(run_dir / "select" / "pivots.jsonl")}
    chosen = sorted((t for t in TURNS if t.id in ids), key=lambda t: (t.trajectory_id, t.depth))
    states = [State(t, tuple(Letters().prompt_ids(t.messages, []))) for t in chosen]
    roller = LocalRoller(learner, Letters(), Equal(), Sampling(max_new_tokens=4))  # type: ignore[arg-type]
    return PivotSource(states, roller, cfg, run_dir)


def train(made: PivotSource, learner: Learner, steps: range, states: dict[int, Any]) -> list[Any]:
    seen = []
    for step in steps:
        states[step] = made.state()
        learner.skill = 0.04 * step
        told = {k: v for k, v in made.renew(step).items() if not k.startswith("seconds")}
        drawn, groups = made.sample(step)
        actions = ["".join(r.action.text for r in group) for group in groups]
        seen.append([step, [s.turn.id for s in drawn], actions, told])
    return seen


def cut(run_dir: Path, step: int) -> None:
    """As a kill in the middle of that re-profile leaves it."""
    folder = run_dir / "train" / "reprofile" / f"step-{step:06d}"
    (folder / "summary.json").unlink()
    rollouts = folder / "sample" / "rollouts.jsonl"
    rollouts.write_bytes(rollouts.read_bytes()[:-700])


def run(folder: Path, name: str) -> None:
    run_dir, (reprofile, refills, adaptive) = folder / name, CASES[name]
    cfg = make(run_dir, TURNS, in_flight=16, adaptive=adaptive)
    cfg.algorithm.pivots_per_step, cfg.algorithm.group_size = 4, 6
    cfg.algorithm.reprofile, cfg.algorithm.dynamic_sampling = reprofile, refills
    wait_for_peers()
    with pytest.MonkeyPatch.context() as patch:
        use(patch, run_dir)
        run_profile(cfg, run_dir)
    if keeps_books():
        run_select(cfg, run_dir)
    wait_for_peers()
    learner, states = Learner(), dict[int, Any]()
    seen = train(source(cfg, run_dir, learner), learner, range(STEPS), states)
    wait_for_peers()
    if keeps_books():
        cut(run_dir, 4)
    again = source(cfg, run_dir, learner)
    again.restore(states[4], 4)
    assert train(again, learner, range(4, STEPS), {}) == seen[4:], name
    (run_dir / f"seen-{RANK}.json").write_text(json.dumps({"seen": seen, "sampled": learner.sampled}))
    wait_for_peers()
    if name == "all":
        fails_everywhere(again, run_dir)


def fails_everywhere(made: PivotSource, run_dir: Path) -> None:
    """What the first process cannot do is an error of all of them, and none waits."""
    if keeps_books():
        (run_dir / "profile" / "summary.json").rename(run_dir / "profile" / "summary.away")
    with pytest.raises(FileNotFoundError, match=r"summary\.json"):
        made.renew(STEPS + 4)
    if keeps_books():
        shutil.rmtree(run_dir / "train" / "reprofile" / f"step-{STEPS + 4:06d}")
    wait_for_peers()


def main(folder: Path) -> None:
    if WORLD > 1:
        from pivotrl.policy import agree

        agree.join()
    for name in CASES:
        run(folder, name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
