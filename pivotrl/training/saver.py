"""Saving and resuming a training loop, so that a run that was killed at any instant goes on bit for bit.

A checkpoint holds what the next step depends on: weights, optimizer, position in the data, random number generators,
and how far the logs were written. It is committed whole or not at all (`pivotrl.state_folder`).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from pivotrl import stopping
from pivotrl.config import Config
from pivotrl.configuration import subset, upgraded
from pivotrl.errors import UserError
from pivotrl.policy import agree, rng, state
from pivotrl.policy.policy import MegatronPolicy
from pivotrl.policy.state_files import checksum
from pivotrl.stage_state import hindrances
from pivotrl.tracking.metrics import WANDB_ID
from pivotrl.training.state_writer import Boundary, StateWriter, rank_file

_RECENT = 5  # steps whose longest tells how long the next may take


def rows_digest(rows: Iterable[tuple[str, Sequence[int]]]) -> str:
    """Identity of what is trained on, in its order: (name, token ids) of every row."""
    hasher = hashlib.sha256()
    for name, ids in rows:
        hasher.update(f"{name}\x1f{len(ids)}\x1f".encode())
        hasher.update(np.asarray(ids, dtype=np.int64).tobytes())
    return hasher.hexdigest()[:16]


class Saver:
    """The checkpoints of one training loop. All ranks make the same calls in the same order.

        saver = Saver(cfg, "train", directory, policy, total, identity={...}, logs=("rollouts.jsonl",))
        start = saver.resume()
        with saver:  # innermost: at its beginning the random number generators are put where they were
            for step in range(start, total):
                with saver.generating():
                    ...  # leaves the policy as it is: a stop here loses nothing but this
                ...
                saver.step_done(step + 1, score=...)
            saver.choose()  # then export
        saver.finished()

    `extra` are the loop's own counters (JSON values). `identity` names what must be the same when resuming: the rows,
    the reference policy.
    """

    def __init__(
        self,
        cfg: Config,
        stage: str,
        directory: Path,
        policy: MegatronPolicy,
        total: int,
        identity: Mapping[str, Any],
        logs: Sequence[str] = (),
        extra: dict[str, Any] | None = None,
    ) -> None:
        self.cfg, self.stage, self.directory, self.policy, self.total = cfg, stage, directory, policy, total
        self.settings = cfg.checkpoint
        self.writer = StateWriter(cfg, stage, directory, policy, identity, logs)
        self.folder = self.writer.folder
        self.extra: dict[str, Any] = dict(extra or {})
        self.start = 0
        self.seconds_before = 0.0  # that earlier attempts took for the steps that are done
        self._first = agree.rank() == 0
        self._resumed: dict[str, Any] | None = None
        self._boundary: Boundary | None = None
        self._saved_at = self._stepped_at = time.monotonic()
        self._durations: list[float] = []
        self._began = time.monotonic()
        self._hold: Any = None

    # Resuming

    def resume(self) -> int:
        """Load the newest checkpoint that is whole; returns the number of steps that are done (0 without one).

        Half-written and damaged ones are reported. Raises UserError with the differences when the configuration or
        the data is another, and when only damaged checkpoints are there.
        """
        if self._first and (half := self.folder.clean()):
            self.writer.say(f"ignored what was half-written when it was ended: {', '.join(half)}")
        steps = agree.everyone(self.folder.committed())[0]
        damaged = []
        for step in reversed(steps):
            if not (problem := self._damage(step)):
                self._load(step)
                break
            damaged.append(step)
            if self._first:
                place = self.folder.set_aside(step)
                self.writer.say(f"the checkpoint of step {step} is damaged ({problem}); it is now {place.name}")
        if steps and self._resumed is None:
            raise UserError(
                f"{self.folder.root}: all checkpoints are damaged (steps {', '.join(map(str, sorted(damaged)))}). "
                "Restore one from a backup (step-NNNNNNNN), or delete the folder "
                f"{self.directory} to start {self.stage} again"
            )
        self.writer.saved = {s for s in steps if s not in damaged}
        if self._first:
            self._cut_logs()
        agree.wait()
        return self.start

    def _damage(self, step: int) -> str:
        """What is wrong with a checkpoint's files, or "". Each rank looks at its share of them."""
        path, problem = self.folder.path(step), ""
        try:
            files = sorted(self.folder.read(step)["files"].items())
            for name, (size, crc) in files[agree.rank() :: agree.world()]:
                if Path(name).name != name:
                    raise ValueError(f"{name!r} is not the name of a file in it")
                found = checksum(path / name)
                if found[0] != size:
                    problem = problem or f"{name} has {found[0]} of {size} bytes"
                elif found[1] != crc:
                    problem = problem or f"the content of {name} has changed"
        except (UserError, OSError, TypeError, ValueError) as error:
            problem = str(error)
        return next((p for p in agree.everyone(problem) if p), "")

    def _load(self, step: int) -> None:
        saved = self.folder.read(step)
        before, now = saved["config"], subset(self.cfg, self.stage)
        if self.cfg.run.accept_upgrade:
            before = upgraded(before, now)
        refused = hindrances(before, now, self.stage, step)
        refused += [
            f"{key}: {saved['identity'].get(key)} -> {value}"
            for key, value in self.writer.identity.items()
            if saved["identity"].get(key) != value
        ]
        if refused:
            listed = "\n".join(f"  {line}" for line in refused)
            raise UserError(
                f"{self.folder.path(step)} belongs to another {self.stage}:\n{listed}\n"
                f"Undo the change to continue it, choose another run_dir=..., or move {self.directory} away"
            )
        state.load(self.policy, self.folder.path(step), saved["policy_step"], saved["adam_steps"])
        self.start, self.extra, self._resumed = step, saved["extra"], saved
        self.seconds_before = saved["seconds"]
        for other in self.folder.committed():
            score = self.folder.read(other).get("score") if other <= step else None
            if score is not None:
                self.writer.scores[other] = score
        if self._first:
            self.writer.say(f"continues after step {step} of {self.total}, from {self.folder.path(step)}")
            id_file = self.directory / WANDB_ID
            if saved.get("wandb_id") and not id_file.is_file():
                id_file.write_text(saved["wandb_id"], encoding="utf-8")

    def _cut_logs(self) -> None:
        """Drop what was logged after the checkpoint: it is done again. (metrics.jsonl: the Tracker does.)"""
        logged = self._resumed["logs"] if self._resumed else {}
        for name in self.writer.logs:
            path, size = self.directory / name, logged.get(name, 0)
            held = path.stat().st_size if path.is_file() else 0
            if held < size:
                self.writer.say(f"{path} has {held} of the {size} bytes of step {self.start}: rows are lost")
            elif held:
                os.truncate(path, size)

    def __enter__(self) -> Saver:
        if self._resumed is not None:
            self._restore_rng()
        else:  # python's and numpy's generators start from the clock otherwise
            rng.reseed(self.cfg.seed, self.stage, rng.place())
        self._hold = stopping.held()
        self._hold.__enter__()
        self._boundary = self._now(self.start, None)
        self._stepped_at = time.monotonic()
        return self

    def _restore_rng(self) -> None:
        path = self.folder.path(self.start) / rank_file(agree.rank())
        saved = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if saved.get("place") == rng.place():
            rng.restore(saved["rng"])
        else:
            rng.reseed(self.cfg.seed, self.start, rng.place())
            if self._first:
                self.writer.say("the parallel layout has changed: new random numbers, results agree up to rounding")

    # The loop

    @contextmanager
    def generating(self) -> Iterator[None]:
        """A part of a step that leaves the policy alone. A process alone is stopped within it, several after it."""
        if agree.world() == 1:
            with stopping.released():
                yield
            return
        yield
        if any(agree.highest([int(stopping.requested() is not None)])):
            raise stopping.Stopped(stopping.requested() or "another process was told to stop")

    def step_done(self, done: int, score: float | None = None) -> None:
        """After each step (`done` of them are behind): save when it is due, stop when told to.

        `score`: higher is better, for checkpoint.keep_best and watch.export_best; None: unknown. Raises
        stopping.Stopped.
        """
        now = time.monotonic()
        self._durations = [*self._durations[1 - _RECENT :], now - self._stepped_at]
        self._stepped_at = now
        self._boundary = self._now(done, score)
        short = stopping.seconds_left() < max(self._durations) + self.writer.seconds
        stop, due, busy = agree.highest(
            [
                int(stopping.requested() is not None or (short and done < self.total)),
                int(self._first and self._due(done, now, score)),
                int(self.writer.busy),
            ]
        )
        if self.writer.pending and not busy:
            self.writer.commit()
        if stop:
            raise stopping.Stopped(stopping.requested() or "the deadline is near")
        if due:
            self._saved_at = now
            self.writer.save(self._boundary, self._in_background())
            self._stepped_at = time.monotonic()

    def _due(self, done: int, now: float, score: float | None) -> bool:
        s = self.settings
        best_so_far = score is not None and score >= max(self.writer.scores.values(), default=score)
        if self.writer.exports_best and best_so_far and done < self.total:
            return True
        if s.keep_every is not None and done % s.keep_every == 0:
            return True
        if s.every_steps is not None and done % s.every_steps == 0:
            return done < self.total or s.keep_best > 0  # the result of the last step is exported
        return done < self.total and s.every_minutes is not None and now - self._saved_at >= 60 * s.every_minutes

    def choose(self) -> int:
        """After the last step: put the weights where they are to be exported from, and return their step.

        The last step's, or with watch.export_best those of the highest score. All ranks call it.
        """
        assert self._boundary is not None
        last = self._boundary.step
        if not self.writer.exports_best:
            return last
        if self.writer.pending:
            self.writer.commit()
        scores = {step: self.writer.scores[step] for step in self.writer.saved if step in self.writer.scores}
        if self._boundary.score is not None:
            scores[last] = self._boundary.score
        best = max(scores, key=lambda step: (scores[step], step), default=last)
        if best != last:
            saved = self.folder.read(best)
            self.policy.settle()
            with self.policy.memory.resident():
                state.load(self.policy, self.folder.path(best), saved["policy_step"], saved["adam_steps"])
        if self._first:
            self.writer.say(f"exports step {best} of {last}: watched success {scores.get(best, math.nan):.1%}")
        return best

    def _in_background(self) -> bool:
        wanted = self.settings.asynchronous
        return torch.cuda.is_available() if wanted is None else wanted

    def _now(self, step: int, score: float | None) -> Boundary:
        logs = {}
        for name in self.writer.logs if self._first else ():
            path = self.directory / name
            logs[name] = path.stat().st_size if path.is_file() else 0
        good = score if score is not None and math.isfinite(score) else None
        extra = json.loads(json.dumps(self.extra))
        seconds = self.seconds_before + time.monotonic() - self._began
        return Boundary(step, self.policy.step, rng.collect(), extra, logs, good, seconds)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if isinstance(error, stopping.Stopped):
                self._save_and_tell(error)
            elif kind is None and self.writer.pending:
                self.writer.commit()
        finally:
            self._hold.__exit__(None, None, None)

    def _save_and_tell(self, stopped: stopping.Stopped) -> None:
        boundary = self._boundary
        assert boundary is not None
        failed = self.writer.commit() if self.writer.pending else ""
        if boundary.step:
            failed = self.writer.save(boundary, background=False)
        if failed:
            last = max(self.writer.saved, default=0)
            raise UserError(
                f"stopped ({stopped.why}), and step {boundary.step} could not be saved: {failed}.\n"
                f"The same command continues after step {last}"
            ) from stopped
        if self._first:
            self.writer.say(f"stopped ({stopped.why}) after step {boundary.step} of {self.total}")

    def finished(self) -> None:
        """The stage's result is written: keep only what is to be kept for good."""
        self.writer.prune(finished=True)
