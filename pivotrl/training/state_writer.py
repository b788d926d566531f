"""Writing the checkpoints of a training loop: on every rank, in this thread or beside it, and committing them whole."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pivotrl import __version__, stopping
from pivotrl.config import Config
from pivotrl.configuration import subset
from pivotrl.io import write_json
from pivotrl.policy import agree, rng, state
from pivotrl.policy.policy import MegatronPolicy
from pivotrl.policy.state_files import Written, checksum, write_index, write_pieces
from pivotrl.stages import ROLLOUT_STAGES
from pivotrl.state_folder import STATE, StateFolder, kept, remedy
from pivotrl.tracking.metrics import METRICS, WANDB_ID


@dataclass(frozen=True)
class Boundary:
    """What a checkpoint after `step` steps holds besides the policy's tensors; the policy is as it was then."""

    step: int
    policy_step: int
    rng: dict[str, Any]
    extra: dict[str, Any]
    logs: dict[str, int]  # bytes of each log
    score: float | None
    seconds: float  # since the stage began, of all attempts


class _Writing:
    """One checkpoint on its way to the disk, in this thread or beside it."""

    def __init__(self, boundary: Boundary, adam_steps: int, work: Callable[[], Written], background: bool) -> None:
        self.boundary, self.adam_steps, self._work = boundary, adam_steps, work
        self.written: Written | None = None
        self.error: Exception | None = None
        self._thread: threading.Thread | None = None
        if background:
            self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
            self._thread.start()
        else:
            self._run()

    def _run(self) -> None:
        try:
            self.written = self._work()
        except Exception as error:  # told by `StateWriter`, on every rank alike
            self.error = error

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()


class StateWriter:
    """Writes, commits and prunes the checkpoints of one stage. All ranks make the same calls in the same order."""

    def __init__(
        self,
        cfg: Config,
        stage: str,
        directory: Path,
        policy: MegatronPolicy,
        identity: Mapping[str, Any],
        logs: Sequence[str],
    ) -> None:
        self.cfg, self.stage, self.directory, self.policy = cfg, stage, directory, policy
        self.identity, self.logs = dict(identity), tuple(logs)
        self.folder = StateFolder(directory)
        self.first = agree.rank() == 0
        self.saved: set[int] = set()
        self.scores: dict[int, float] = {}
        self.seconds = 0.0  # that the longest save has held up the loop
        self._writing: _Writing | None = None

    @property
    def pending(self) -> bool:
        return self._writing is not None

    @property
    def busy(self) -> bool:
        return self._writing is not None and self._writing.busy

    def save(self, boundary: Boundary, background: bool) -> str:
        """Write a checkpoint; returns what went wrong, or "" (in the background: so far)."""
        if self._writing is not None:
            self.commit()
        if boundary.step in self.saved:
            return ""
        begun, target = time.monotonic(), self.folder.temporary(boundary.step)
        failure = None
        try:
            if self.first:
                self.folder.begin(boundary.step)
                self._sync_logs()
        except OSError as caught:
            failure = caught
        if error := self._agreed(failure):
            return self._failed(boundary.step, error)
        with self.policy.memory.resident():
            failed = self._write(boundary, target, background)
        self.seconds = max(self.seconds, time.monotonic() - begun)
        return failed

    def _write(self, boundary: Boundary, target: Path, background: bool) -> str:
        (count,) = agree.highest([state.adam_steps(self.policy)])
        pieces = list(state.snapshot(self.policy, count))
        if background:  # the next step changes the tensors
            pieces = [p._replace(tensor=p.tensor.to("cpu", copy=True)) for p in pieces]
        rank = agree.rank()
        own = {"place": rng.place(), "rng": boundary.rng}

        def work() -> Written:
            written = write_pieces(target, rank, pieces)
            write_json(target / rank_file(rank), own, every_rank=True)
            return Written(written.entries, {**written.files, rank_file(rank): checksum(target / rank_file(rank))})

        self._writing = _Writing(boundary, count, work, background)
        return "" if background else self.commit()

    def commit(self) -> str:
        """Wait for the checkpoint that is being written, and commit it; returns what went wrong, or ""."""
        writing, self._writing = self._writing, None
        assert writing is not None
        writing.wait()
        step = writing.boundary.step
        if writing.error is not None and not isinstance(writing.error, OSError):
            raise writing.error
        error = self._agreed(writing.error)
        if not error:
            written, failure = agree.to_first(writing.written), None
            try:
                if self.first:
                    self._name(writing, [w for w in written if w is not None])
            except OSError as caught:
                failure = caught
            error = self._agreed(failure)
        if error:
            return self._failed(step, error)
        self.saved.add(step)
        stopping.kept()
        if writing.boundary.score is not None:
            self.scores[step] = writing.boundary.score
        self.prune(finished=False)
        return ""

    def _agreed(self, failure: OSError | None) -> str:
        """What failed on any rank, told on every rank; "" when nothing did."""
        if not any(agree.highest([int(failure is not None)])):
            return ""
        texts = agree.everyone("" if failure is None else remedy(failure, self.folder.root))
        return next(text for text in texts if text)

    def _failed(self, step: int, error: str) -> str:
        if self.first:
            self.folder.clean()
            last = max(self.saved, default=0)
            self.say(f"the checkpoint of step {step} was not written: {error}. The last one is that of step {last}")
        return error

    def _name(self, writing: _Writing, written: list[Written]) -> None:
        """Rank 0: index, state.json, and the name that commits."""
        boundary, target = writing.boundary, self.folder.temporary(writing.boundary.step)
        index = write_index(target, written, boundary.step)
        id_file = self.directory / WANDB_ID
        write_json(
            target / STATE,
            {
                "format": 1,
                "stage": self.stage,
                "step": boundary.step,
                "policy_step": boundary.policy_step,
                "adam_steps": writing.adam_steps,
                "score": boundary.score,
                "seconds": boundary.seconds,
                "extra": boundary.extra,
                "logs": boundary.logs,
                "identity": self.identity,
                "engine_seed": self.cfg.seed,
                "wandb_id": id_file.read_text(encoding="utf-8").strip() if id_file.is_file() else None,
                "world_size": agree.world(),
                "versions": {"pivotrl": __version__, "torch": torch.__version__},
                "config": subset(self.cfg, self.stage),
                "resolved": asdict(self.cfg),
                "files": {name: list(facts) for part in written for name, facts in part.files.items()}
                | {name: list(facts) for name, facts in index.items()},
            },
        )
        self.folder.commit(boundary.step)

    def _sync_logs(self) -> None:
        """What a checkpoint says was logged must be on the disk before it."""
        for name in (*self.logs, METRICS):
            path = self.directory / name
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())

    @property
    def exports_best(self) -> bool:
        """Whether the weights of the highest score are to be exported (`watch.export_best`; SFT is not watched)."""
        return self.cfg.watch.export_best and self.stage in ROLLOUT_STAGES

    def prune(self, finished: bool) -> None:
        """Delete what the configuration does not keep; once the stage has `finished`, all but what is kept for good."""
        c = self.cfg.checkpoint
        best = max(c.keep_best, int(self.exports_best and not finished))
        keep = kept(sorted(self.saved), self.scores, c.keep_last, c.keep_every, best, finished)
        for step in sorted(self.saved - keep) if self.first else ():
            try:
                self.folder.remove(self.folder.path(step))
            except OSError as error:
                self.say(f"the checkpoint of step {step} could not be removed: {error}")
        self.saved &= keep
        if finished and not self.saved and self.first:
            with suppress(OSError):  # not there, or not empty: damaged checkpoints stay for a person to look at
                self.folder.root.rmdir()

    def say(self, text: str) -> None:
        print(f"{self.stage}: {text}", file=sys.stderr, flush=True)


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.json"
