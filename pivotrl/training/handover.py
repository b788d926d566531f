"""Who has the accelerator: the order in which trainer and engine give memory back and take it, enforced and logged.

    start -> generate -> sleep -> reload -> train -> offload -> wake_weights -> refit -> free_staging -> wake_cache
               ^                                                                                            |
               +--------------------------------------------------------------------------------------------+

Gradients and optimiser states leave before the engine's weights come; the trainer's parameters are the staging of the
refit and leave before the KV cache comes. So at no time do trainer and KV cache share the accelerator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pivotrl.generation.engine import Engine

if TYPE_CHECKING:
    from pivotrl.rollouts import Rollout

CYCLE = ("generate", "sleep", "reload", "train", "offload", "wake_weights", "refit", "free_staging", "wake_cache")
START = "start"
GIB = 2**30


class LedgerError(RuntimeError):
    """A phase out of order, or more memory than the budget."""


class Meter(Protocol):
    """Bytes in use on the accelerator."""

    def reset(self) -> None:
        """Peaks count from here."""
        ...

    def peak(self) -> int: ...


class DeviceMeter:
    """CUDA: what the device reports, and torch's own peak. CPU: the resident set of this process."""

    def reset(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            return max(total - free, torch.cuda.max_memory_allocated())
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * 4096


class MemoryLedger:
    """Runs phases in the order above and keeps the peak of each. `budget`: bytes that no phase may exceed."""

    def __init__(self, meter: Meter, budget: int | None = None) -> None:
        self._meter, self._budget = meter, budget
        self.last: str | None = None
        self.peaks: dict[str, int] = {}  # bytes, of the latest time that a phase ran

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Raises LedgerError before the block if it is not the turn of `name`, after it if the budget was exceeded."""
        expected = START if self.last is None else CYCLE[(self._place() + 1) % len(CYCLE)]
        if name != expected:
            raise LedgerError(f"memory order: {name!r} after {self.last!r}; the next phase is {expected!r}")
        self._meter.reset()
        yield
        self.last = name
        peak = self.peaks[name] = self._meter.peak()
        if self._budget is not None and peak > self._budget:
            held = ", ".join(f"{phase} {bytes_ / GIB:.3g}" for phase, bytes_ in self.peaks.items())
            raise LedgerError(
                f"memory: {name!r} reached {peak / GIB:.3g} GiB, the budget is {self._budget / GIB:.3g} ({held})"
            )

    def metrics(self) -> dict[str, float]:
        return {f"memory_gib_{name}": peak / GIB for name, peak in self.peaks.items()}

    def _place(self) -> int:
        return CYCLE.index("wake_cache") if self.last == START else CYCLE.index(str(self.last))


class Trainer(Protocol):
    """The part of `MegatronPolicy` that changes hands."""

    @property
    def memory(self) -> Any: ...

    def weights_for(self, engine: Any) -> Any: ...


class Handover:
    """Moves the accelerator between a trainer and an engine.

    Args:
        moves: whether the trainer's memory really leaves. The default is to move it where there is CUDA: between two
            places in the same RAM nothing would be gained. The order of calls is the same.
    """

    def __init__(self, trainer: Trainer, ledger: MemoryLedger | None = None, moves: bool | None = None) -> None:
        self.trainer = trainer
        self.ledger = ledger or MemoryLedger(DeviceMeter())
        self.refits = 0
        self.seconds: dict[str, float] = {}  # metrics of the latest rollouts
        self._moves = torch.cuda.is_available() if moves is None else moves
        with self.ledger.phase(START):  # before the engine is built with the start policy's weights
            self._release("gradients", "optimizer", "parameters")

    @property
    def lags(self) -> bool:
        """Whether rollouts may be of the weights before the trainer's."""
        return False

    def rollouts(self, engine: Engine, sample: Callable[[int], Any], step: int) -> Any:
        """What `sample(step)` gives, sampled now."""
        clock = time.monotonic()
        found = self.generate(engine, lambda: sample(step))
        self.seconds = {"seconds_generate": time.monotonic() - clock}
        return found

    def begin(self, engine: Engine, start: int, recorded: Callable[[], Any]) -> None:
        """Before the first step of this process, of which `recorded()` gives the rollouts that were sampled early."""

    def settle(self) -> dict[str, float]:
        """After the update: wait for what is sampled beside it (here nothing is). Metrics of the rollouts."""
        return self.seconds

    def generate(self, engine: Engine, work: Callable[[], Any]) -> Any:
        """Run `work` (which samples from the engine), then give the accelerator to the trainer.

        It begins with an empty prefix cache: a canary or an evaluation since the refit, which a run that continues may
        not have had there, would else show in cached tokens, and in the last bits of log-probs.
        """
        with self.ledger.phase("generate"):
            engine.forget()
            result = work()
        with self.ledger.phase("sleep"):
            engine.sleep()
        with self.ledger.phase("reload"):
            if self._moves:
                self.trainer.memory.restore("parameters", "gradients", "optimizer")
        return result

    @contextmanager
    def training(self) -> Iterator[None]:
        with self.ledger.phase("train"):
            yield

    def to_engine(self, engine: Engine, version: int) -> None:
        """Refit the engine with the trainer's weights and wake it."""
        with self.ledger.phase("offload"):
            self._release("gradients", "optimizer")
        with self.ledger.phase("wake_weights"):
            engine.wake_weights()
        with self.ledger.phase("refit"):
            engine.refit(self.trainer.weights_for(engine.layout), version)
        self.refits += 1
        with self.ledger.phase("free_staging"):
            self._release("parameters")
        with self.ledger.phase("wake_cache"):
            engine.wake()

    def catch_up(self, engine: Engine, version: int) -> None:
        """When a run continues: the engine was started with pi_0 and gets the weights that were loaded. Not a phase."""
        engine.sleep()
        engine.wake_weights()
        if self._moves:
            self.trainer.memory.restore("parameters")
        engine.refit(self.trainer.weights_for(engine.layout), version)
        self._release("parameters")
        engine.wake()

    def _release(self, *kinds: str) -> None:
        if self._moves:
            self.trainer.memory.release(*kinds, keep_gradients=False)  # the next step zeroes them first
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def check_weight_version(groups: Sequence[Sequence[Rollout]], version: int, lags: bool = False) -> dict[str, float]:
    """{"staleness": steps that the trainer is ahead of the weights that made the rollouts}: 0, or up to 1 with `lags`.

    Raises RuntimeError for any other: a refit was missed.
    """
    versions = {r.completion.weight_version for group in groups for r in group}
    if not versions:
        return {}
    if len(versions) > 1 or version - min(versions) not in ((0, 1) if lags else (0,)):
        raise RuntimeError(
            f"rollouts of weight versions {sorted(versions)}, the trainer is at {version}: a refit was missed"
        )
    return {"staleness": float(version - min(versions))}
