"""Training beside a server engine, which has accelerators of its own: nothing changes hands but weights.

With `algorithm.one_step_off` the server samples while the trainer works:

    server   | rollouts 0 | rollouts 1          |refit 1| rollouts 2          |refit 2| ...
    trainer               | step 0 (weights 0->1)|      | step 1 (weights 1->2)|      | ...

Rollouts of step n are then of weights n - 1, those of the first step of its own. They are logged as soon as they are
sampled, so that a run that continues finds the rollouts of its next step in the log, with their log-probs: the weights
that made them are gone.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pivotrl.config import Config
from pivotrl.generation.engine import Engine
from pivotrl.generation.server_files import FileSender
from pivotrl.generation.server_weights import NcclSender
from pivotrl.io import read_jsonl
from pivotrl.local_rollouts import State
from pivotrl.policy import agree
from pivotrl.ports import free_port
from pivotrl.refit.layout import EngineLayout
from pivotrl.rollouts import Rollout
from pivotrl.training.handover import Handover, Trainer

if TYPE_CHECKING:
    from pivotrl.generation.server_engine import WeightSender
    from pivotrl.policy.policy import MegatronPolicy

Sample = Callable[[int], Any]  # step -> its rollouts


class _Task:
    """A call in a thread, which does not keep the process from ending."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._value: Any = None
        self._error: BaseException | None = None
        self.seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="next-rollouts", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        clock = time.monotonic()
        try:
            self._value = self._work()
        except BaseException as error:
            self._error = error
        self.seconds = time.monotonic() - clock

    def result(self) -> Any:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._value


def _of_first(work: Callable[[], Any]) -> Any:
    """What `work` gives on rank 0, on every rank; its error is raised on all, so that none waits for it."""
    value: Any = None
    error: Exception | None = None
    if agree.rank() == 0:
        try:
            value = work()
        except Exception as raised:
            error = raised
    value, error = agree.of_first((value, error))
    if error is not None:
        raise error
    return value


class ServerHandover(Handover):
    """The turns of a trainer and a server engine. Rank 0 alone samples; the others get its rollouts.

    Args:
        steps: of the whole run; nothing is sampled for later ones.
        ahead: sample the next step's rollouts beside the update.
    """

    def __init__(self, trainer: Trainer, steps: int, ahead: bool) -> None:
        super().__init__(trainer, moves=False)
        self._steps, self._ahead = steps, ahead
        self._next: Any = None  # what was sampled already
        self._task: _Task | None = None

    @property
    def lags(self) -> bool:
        """Whether rollouts may be of the weights before the trainer's."""
        return self._ahead

    def rollouts(self, engine: Engine, sample: Sample, step: int) -> Any:
        """Those of `step`; from here to `settle` the server samples those of the next one."""
        clock = time.monotonic()
        found, self._next = self._next, None
        if found is None:
            found = _of_first(lambda: sample(step))
        self.seconds = {"seconds_generate": time.monotonic() - clock}
        if self._ahead and step + 1 < self._steps and agree.rank() == 0:
            self._task = _Task(lambda: sample(step + 1))
        return found

    def settle(self) -> dict[str, float]:
        """Wait for what is sampled beside the update: in `seconds_generate` the wait, in `seconds_beside` all of it."""
        task, self._task = self._task, None
        if self._ahead:
            clock = time.monotonic()
            self._next = _of_first(lambda: task.result() if task else None)
            self.seconds["seconds_generate"] += time.monotonic() - clock
        return self.seconds | ({"seconds_beside": task.seconds} if task else {})

    @contextmanager
    def training(self) -> Iterator[None]:
        yield

    def to_engine(self, engine: Engine, version: int) -> None:
        engine.sleep()
        engine.wake_weights()
        engine.refit(self.trainer.weights_for(engine.layout), version)
        agree.wait()  # rank 0 has heard that the server serves them
        engine.wake()
        self.refits += 1

    def begin(self, engine: Engine, start: int, recorded: Callable[[], Any]) -> None:
        """Also before the first step: whatever the server served, it now serves the policy that is trained."""
        self.to_engine(engine, start)
        self.refits = 0
        self._next = recorded() if self._ahead and start else None

    def catch_up(self, engine: Engine, version: int) -> None:
        """`begin` has done it."""


def recorded_rollouts(path: Path, step: int, states: Sequence[State]) -> tuple[list[State], list[list[Rollout]]] | None:
    """The states and groups of `step` that are in a log of rollouts; None: it has none of them."""
    by_id = {state.turn.id: state for state in states}
    drawn: list[State] = []
    groups: list[list[Rollout]] = []
    for row in read_jsonl(path) if path.is_file() else ():
        if row["step"] != step:
            continue
        rollout = Rollout.from_json(row)
        if rollout.index == 0:
            drawn.append(by_id[rollout.turn_id])
            groups.append([])
        groups[-1].append(rollout)
    return (drawn, groups) if groups else None


def hand_over(policy: MegatronPolicy, cfg: Config, directory: Path) -> tuple[Handover, WeightSender | None]:
    """How trainer and engine take turns, and what carries weights to a server (None: the engine is in this process)."""
    if cfg.generation.server is None:
        return Handover(policy), None
    folder = directory / "weights" if cfg.generation.weight_transfer == "file" else None
    return ServerHandover(policy, cfg.algorithm.steps, cfg.algorithm.one_step_off), weight_sender(policy, folder)


def weight_sender(policy: MegatronPolicy, folder: Path | None) -> WeightSender:
    """By files in `folder`, else by NCCL. Every rank calls it."""
    if folder is not None:
        return FileSender(folder, agree.rank())
    # one pass tells the order and shapes in which the stream comes, which NCCL must know beforehand
    stream: Any = policy.weights_for(EngineLayout())  # whole tensors, on the first rank
    shapes = agree.of_first([(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in stream])
    address, port = agree.of_first((socket.gethostname(), free_port()))
    return NcclSender(shapes, agree.rank(), address, port)
