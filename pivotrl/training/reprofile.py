"""Re-profiling during training: what the policy of this moment finds mixed and hard becomes the set of pivots.

A profile belongs to a policy (design idea 5), and training moves the policy. Each re-profile is a folder
train/reprofile/step-<steps done>/ in the layout of a run: sample/ (rollouts and rows of the turns that were profiled
again), profile/turns.jsonl (all turns, each with its newest row), select/ and, written last, summary.json.

In a job of several processes the engines share the turns, and all processes get all rollouts. The first keeps the
books, and tells the others what it read and selected: one set of pivots, whatever the number of processes.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pivotrl.config import Config
from pivotrl.config import Reprofile as Settings
from pivotrl.errors import UserError
from pivotrl.io import keeps_books, read_json, read_jsonl, write_json, write_jsonl
from pivotrl.local_rollouts import LocalRoller, State, seed_for, states_of
from pivotrl.peers import from_first, wait_for_peers
from pivotrl.profiling.profiler import draw_turns
from pivotrl.profiling.select import run_select
from pivotrl.profiling.stage import profile_into
from pivotrl.rendering.chat import Renderer
from pivotrl.trajectories.turn_lines import turns_in
from pivotrl.verifiers.base import Verifier


def is_on(settings: Settings) -> bool:
    return settings.every_steps is not None or settings.below_mixed is not None


def why_due(settings: Settings, steps: int, mixed: Sequence[float]) -> str | None:
    """Why the pivots should be profiled again before the next step, or None.

    `steps` were made on the present pivots; `mixed` are the shares of mixed groups of the last `window` of them.
    """
    if settings.every_steps is not None and steps >= settings.every_steps:
        return f"{steps} steps on the same pivots"
    if settings.below_mixed is not None and len(mixed) >= settings.window:
        share = sum(mixed[-settings.window :]) / settings.window
        if share < settings.below_mixed:
            return f"{share:.2f} of the last groups mixed, below {settings.below_mixed:g}"
    return None


class Reprofiler:
    """Profiles turns again with the engine's present weights, and selects. Every process makes the same calls.

    `renderer` and `verifier` are those of the profile and of training.
    """

    def __init__(self, cfg: Config, run_dir: Path, renderer: Renderer, verifier: Verifier) -> None:
        self.cfg, self.run_dir, self.renderer, self.verifier = cfg, run_dir, renderer, verifier
        self.root = run_dir / "train" / "reprofile"

    def folder(self, step: int) -> Path:
        return self.root / f"step-{step:06d}"

    def forget_after(self, step: int) -> None:
        """Remove what a killed run made after `step`: it is about to be done again, maybe with other weights.

        What it made at `step` itself was made with the weights that training is resumed with, and is gone on with.
        """
        wait_for_peers()
        for path in self.root.glob("step-*") if keeps_books() else ():
            if (found := re.fullmatch(r"step-(\d+)", path.name)) and int(found[1]) > step:
                shutil.rmtree(path)
        wait_for_peers()

    def run(self, step: int, former: int | None, roller: LocalRoller, why: str) -> dict[str, Any]:
        """Profile and select after `step` steps; `former` is the step of the re-profile before (None: the profile).

        Returns the summary. Its `kept` is 0 where the selection has no pivot or cannot be made; `problem` says why.
        """
        clock = time.monotonic()
        table, sample = self._table(former), self.folder(step) / "sample"
        ids = from_first(lambda: self._draw(table, step))
        seed = seed_for(self.cfg.seed, "reprofile", step)  # other rollouts than those of any profile before
        again = replace(self.cfg, seed=seed, profile=replace(self.cfg.profile, second_rollouts=0))
        figures = profile_into(sample, self.states_of(ids), again, lambda: roller, bars=False)
        return from_first(lambda: self._finish(step, former, figures, {"why": why, "clock": clock}))

    def _finish(self, step: int, former: int | None, figures: dict[str, Any], told: dict[str, Any]) -> dict[str, Any]:
        """The new table, selection and summary, from the rows of the sample. On the first process."""
        folder, table = self.folder(step), self._table(former)
        write_jsonl(folder / "profile" / "turns.jsonl", _newest(table, folder / "sample" / "turns.jsonl", step))
        record = read_json(self.run_dir / "profile" / "summary.json")["fingerprint"]
        weights = f"{record['weights']} after {step} training steps"
        write_json(folder / "fingerprint.json", {**record, "weights": weights})
        kept, problem = self._select(folder)
        before = self._pivot_ids(former)
        summary = {
            "step": step,
            "why": told["why"],
            **{key: figures[key] for key in ("turns", "rollouts", "tokens", "engine")},
            **{key: figures[key] for key in ("mean_reward", "mixed", "uninformative_share")},
            "kept": len(kept),
            "entered": len(kept - before),
            "left": len(before - kept) if kept else 0,
            "problem": problem,
            "seconds": time.monotonic() - told["clock"],
        }
        write_json(folder / "summary.json", summary)
        return summary

    def pivot_ids(self, step: int | None) -> set[str]:
        """Turn ids of the pivots of the re-profile at `step`; None: those that training starts with."""
        return from_first(lambda: self._pivot_ids(step))

    def _pivot_ids(self, step: int | None) -> set[str]:
        folder = self.run_dir if step is None else self.folder(step)
        return {row["turn_id"] for row in read_jsonl(folder / "select" / "pivots.jsonl")}

    def states_of(self, ids: set[str]) -> list[State]:
        """Turns with their prompts, in the order of the prompt trie. Prompts were rendered before and are cached."""
        cfg = self.cfg
        turns = list(turns_in(self.run_dir / "turns" / "turns.jsonl", "train", ids))
        states, skipped = states_of(draw_turns(turns, None, cfg.seed), cfg, self.run_dir, self.renderer, self.verifier)
        if skipped or len(states) != len(ids):
            names = sorted(ids - {s.turn.id for s in states})
            path = self.run_dir / "turns" / "turns.jsonl"
            raise UserError(
                f"{path}: {len(names)} turns that were profiled are not there, or are skipped now ({names[0]}); turns "
                "and profile are of two runs, so run `pivotrl profile` again"
            )
        return states

    def _table(self, former: int | None) -> Path:
        folder = self.run_dir if former is None else self.folder(former)
        return folder / "profile" / "turns.jsonl"

    def _draw(self, table: Path, step: int) -> set[str]:
        ids = [row["turn_id"] for row in read_jsonl(table)]
        limit = self.cfg.algorithm.reprofile.turns
        if limit is not None and limit < len(ids):
            ids = sorted(ids, key=lambda i: seed_for(self.cfg.seed, "reprofile", step, i))[:limit]
        return set(ids)

    def _select(self, folder: Path) -> tuple[set[str], str]:
        try:
            run_select(self.cfg, folder)
        except UserError as error:
            return set(), str(error)
        return {row["turn_id"] for row in read_jsonl(folder / "select" / "pivots.jsonl")}, ""


def _newest(former: Path, sample: Path, step: int) -> Iterator[dict[str, Any]]:
    """Every row of `former`, or the one that was made now; rows tell after how many steps they were made."""
    fresh = {row["turn_id"]: {**row, "step": step} for row in read_jsonl(sample)}
    for row in read_jsonl(former):
        yield fresh.get(row["turn_id"], row)
