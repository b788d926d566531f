"""Pairs that are verified in worker processes while others are still being made."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from pivotrl.verifiers.base import Verdict

if TYPE_CHECKING:
    from pivotrl.verifiers.runner import Pair, VerifierRunner


class Arrivals:
    """A queue of pairs between the thread that makes them and the one that has them verified."""

    def __init__(self, pairs: Sequence[Pair] = (), closed: bool = False) -> None:
        self._makers: deque[Callable[[], Pair]] = deque((lambda pair=pair: pair) for pair in pairs)  # type: ignore[misc]
        self.closed = closed  # nothing comes any more
        self.abandoned = False  # nobody wants the verdicts
        self.signal, self._bell = os.pipe()  # readable when something came, for a selector
        os.set_blocking(self.signal, False)
        os.set_blocking(self._bell, False)

    @property
    def done(self) -> bool:
        return self.closed and not self._makers

    def put(self, maker: Callable[[], Pair]) -> None:
        """`maker` gives the pair, and runs in the thread that takes it."""
        self._makers.append(maker)
        self._ring()

    def close(self, abandon: bool = False) -> None:
        self.closed, self.abandoned = True, self.abandoned or abandon
        self._ring()

    def wait(self) -> None:
        """Until nothing comes any more."""
        while not self.closed:
            select.select([self.signal], [], [])
            os.read(self.signal, 1 << 16)

    def take(self) -> list[Pair]:
        """What came since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.signal, 1 << 16)
        return [self._makers.popleft()() for _ in range(len(self._makers))]

    def release(self) -> None:
        """Close the pipe, when no thread uses it any more."""
        os.close(self.signal)
        os.close(self._bell)

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it rings already
            os.write(self._bell, b".")


class VerdictStream:
    """Verifies pairs as they come, in a thread that only talks to the runner's worker processes (without any: at last).

        with VerdictStream(runner) as stream:
            ...  stream.put(lambda: (turn, action))
            verdicts = stream.verdicts()  # in the order of `put`

    Time-outs, caching and counts are those of `VerifierRunner.score`. Left without `verdicts()`, for an error,
    the workers that are busy are ended.
    """

    def __init__(self, runner: VerifierRunner) -> None:
        self._runner = runner
        self._arrivals = Arrivals()
        self._found: list[Verdict] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="verdict-stream", daemon=True)

    def __enter__(self) -> VerdictStream:
        self._thread.start()
        return self

    def put(self, maker: Callable[[], Pair]) -> None:
        self._arrivals.put(maker)

    def verdicts(self) -> list[Verdict]:
        """Wait for the rest. Raises what a maker raised, or the runner."""
        self._arrivals.close()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._found

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._arrivals.close(abandon=True)
        self._thread.join()
        self._arrivals.release()

    def _work(self) -> None:
        try:
            self._found = self._runner.score_arriving(self._arrivals)
        except BaseException as error:
            self._error = error
