"""Batch runner of a verifier: worker processes with hard time-outs, caching by content, counts (field report G9)."""

from __future__ import annotations

import functools
import hashlib
import json
import selectors
import threading
import time
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from pivotrl.config import VerifierConfig
from pivotrl.errors import UserError
from pivotrl.trajectories.schema import Action, Turn
from pivotrl.verifiers.base import Verdict, Verifier
from pivotrl.verifiers.guard import checked, safe_verify
from pivotrl.verifiers.registry import get_verifier
from pivotrl.verifiers.stream import Arrivals
from pivotrl.verifiers.worker_process import WorkerProcess, frame

Pair = tuple[Turn, Action]

TIMEOUT = "timeout"
WORKER_DIED = "worker_died"
UNSENDABLE = "unsendable"  # the pair cannot be pickled (nested past the recursion limit)
_CHUNK = 16  # pairs of one turn sent together: the state travels once
_MAX_FAILED_STARTS = 3


def open_verifier(settings: VerifierConfig, stack: ExitStack | None = None) -> VerifierRunner:
    """A runner of the verifier of `settings`: in this process (`workers=0`) or in processes of its own.

    The runner's workers end with `stack`, and in any case with this process.
    """
    factory = functools.partial(get_verifier, settings)
    runner = VerifierRunner(factory, settings.workers, settings.timeout_seconds)
    return stack.enter_context(runner) if stack is not None else runner


def take_counts(verifier: Verifier) -> dict[str, float]:
    """What the runner counted since the last call (see `VerifierRunner.metrics`); {} for a verifier without one."""
    return verifier.take_counts() if isinstance(verifier, VerifierRunner) else {}


def score_pairs(verifier: Verifier, pairs: Sequence[Pair]) -> list[Verdict]:
    """One verdict a pair, in order; all at once where `verifier` is a runner, so that hung pairs wait together."""
    if isinstance(verifier, VerifierRunner):
        return verifier.score(pairs)
    return [safe_verify(verifier, turn, action) for turn, action in pairs]


class _Abandoned(Exception):
    """Nobody wants the verdicts any more."""


@dataclass
class _Work:
    """One call of `score`: its pairs so far, and what became of them."""

    arrivals: Arrivals
    pairs: list[Pair] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    results: list[Verdict | None] = field(default_factory=list)
    first: dict[str, int] = field(default_factory=dict)  # content key -> index of the pair that runs
    pending: deque[int] = field(default_factory=deque)
    fresh: list[int] = field(default_factory=list)  # all that were pending
    turns: dict[int, str] = field(default_factory=dict)  # id of a turn (its pairs keep it alive) -> digest


def _reclaim(workers: list[WorkerProcess], spawner: ThreadPoolExecutor) -> None:
    for worker in workers:
        worker.kill()
    workers.clear()
    spawner.shutdown(wait=False)


class VerifierRunner:
    """Scores (turn, action) pairs; is itself a Verifier, so it stands wherever one does.

    `workers=0` verifies in this process: no start-up, no transfer, and no time-out (use it for verifiers that compute
    only). With workers, each pair has `timeout_seconds` of its own: a worker that is past it is killed with all its
    children and replaced, and its pair becomes `Verdict(None, "timeout")`; where a worker dies, its pair becomes
    `Verdict(None, "worker_died")`. A worker that takes 20 times the usual time of a pair (at most a tenth of the limit)
    is set aside while another takes over the queue, up to `max_stuck` at once, so that hung pairs hold up nobody.

    `verifier_factory` takes no arguments and must be picklable: `functools.partial(get_verifier, config)`.
    Verdicts with a reward are cached by content: verifier name, version and config, the turn (state, tools,
    demonstration) and the action. Unscorable ones are not: an outage passes. Equal pairs of one call run once.
    A verifier whose `ignores_thinking` is true shares verdicts between actions that differ in thinking alone.

    Usable from any thread (no signals); calls from several threads take turns. Use as a context manager, or close().
    """

    def __init__(
        self,
        verifier_factory: Callable[[], Verifier],
        workers: int = 0,
        timeout_seconds: float = 30.0,
        *,
        max_stuck: int = 100,  # each a small process, there only while verdicts hang
        cache_size: int = 20_000,  # rollouts of a turn come together; details may be long
        start_timeout_seconds: float = 120.0,
    ) -> None:
        if workers < 0 or max_stuck < 0 or not timeout_seconds > 0:
            raise UserError(
                f"verifier runner: workers={workers}, max_stuck={max_stuck}, timeout_seconds={timeout_seconds}; "
                "the counts must be at least 0 and the time-out above 0"
            )
        self.verifier = verifier_factory()
        self.name, self.version = self.verifier.name, self.verifier.version
        self.workers, self.timeout_seconds, self.max_stuck = workers, timeout_seconds, max_stuck
        self.start_timeout_seconds = start_timeout_seconds
        self._answered, self._answer_seconds = 0, 0.0  # by workers, for the usual time of a pair
        self._factory_frame = self._pickled(verifier_factory) if workers else b""
        self._ignores_thinking = bool(getattr(self.verifier, "ignores_thinking", False))
        self._identity = json.dumps([self.name, self.version, self.verifier.config()], sort_keys=True, default=repr)
        self._cache: OrderedDict[str, Verdict] = OrderedDict()
        self._cache_size = cache_size
        self._counts: defaultdict[str, float] = defaultdict(float)
        self._taken: dict[str, float] = {}
        self._failed_starts = 0
        self._lock = threading.Lock()
        self._pool: list[WorkerProcess] = []
        self._spawner = ThreadPoolExecutor(1, thread_name_prefix="verifier-spawner")
        self._finalizer = weakref.finalize(self, _reclaim, self._pool, self._spawner)

    @staticmethod
    def _pickled(factory: Callable[[], Verifier]) -> bytes:
        try:
            if getattr(factory, "__module__", None) == "__main__":
                raise ValueError("it is defined in the main script, which workers do not run")
            return frame(factory)
        except Exception as error:
            raise UserError(
                f"verifier runner: the verifier's factory cannot be sent to worker processes ({error}). "
                "Define it at the top level of an importable module, or use workers=0."
            ) from error

    def config(self) -> dict[str, Any]:
        """The verifier's own: processes and limits change no verdict that is a reward."""
        return self.verifier.config()

    def verify(self, turn: Turn, action: Action) -> Verdict:
        return self.score([(turn, action)])[0]

    def score(self, pairs: Sequence[Pair]) -> list[Verdict]:
        """One verdict a pair, in order. Never raises for what a verifier does; raises if no worker can be started."""
        arrivals = Arrivals(pairs, closed=True)
        try:
            return self.score_arriving(arrivals)
        finally:
            arrivals.release()

    def score_arriving(self, arrivals: Arrivals) -> list[Verdict]:
        """`score` of pairs that come while others are being verified; returns when no more come and all are done."""
        with self._lock:
            if not self._finalizer.alive:
                raise RuntimeError("this verifier runner is closed")
            started = time.monotonic()
            work = _Work(arrivals)
            if not self.workers:
                arrivals.wait()
            self._admit(work)
            if self.workers:
                self._run(work)
            else:
                for i in work.pending:
                    work.results[i] = safe_verify(self.verifier, *work.pairs[i])
            if arrivals.abandoned:
                return []
            verdicts = []
            for key, result in zip(work.keys, work.results, strict=True):
                verdict = result if result is not None else work.results[work.first[key]]
                assert verdict is not None
                verdicts.append(verdict)
            self._account(verdicts, work)
            self._counts["seconds"] += time.monotonic() - started
            return verdicts

    def metrics(self) -> dict[str, float]:
        """Counts since the start: pairs, cache_hits, scored, unscorable/<reason>, workers_started, workers_killed,
        seconds; and the sums of what verdicts report in `details["counts"]` (a judge's tokens), under their names."""
        return dict(self._counts)

    def take_counts(self) -> dict[str, float]:
        """`metrics` since the last call of this; counts that did not change are left out."""
        with self._lock:
            now, before = dict(self._counts), self._taken
            self._taken = now
        return {name: count - before.get(name, 0) for name, count in now.items() if count != before.get(name, 0)}

    def close(self) -> None:
        """Kill all workers with their children. The runner cannot be used afterwards."""
        self._finalizer()

    def __enter__(self) -> VerifierRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- caching and counting

    def _admit(self, work: _Work) -> None:
        """Take what arrived: from the cache, as equal to one that runs, or to be run."""
        for pair in work.arrivals.take():
            i, key = len(work.pairs), self._key(pair, work)
            work.pairs.append(pair)
            work.keys.append(key)
            cached = self._cache.get(key)
            work.results.append(cached)
            if cached is not None:
                self._cache.move_to_end(key)
            elif work.first.setdefault(key, i) == i:
                work.pending.append(i)
                work.fresh.append(i)

    def _key(self, pair: Pair, work: _Work) -> str:
        """Content key; a pair that JSON cannot write (nested too deep) gets one of its own and is never shared."""
        turn, action = pair
        try:
            if id(turn) not in work.turns:
                content = [turn.id, turn.domain, turn.messages, turn.tools, turn.demonstration.to_json()]
                digest = hashlib.sha256(json.dumps([self._identity, *content]).encode()).hexdigest()
                work.turns[id(turn)] = digest
            row = action.to_json()
            if self._ignores_thinking:
                row.pop("thinking", None)
            return hashlib.sha256((work.turns[id(turn)] + json.dumps(row)).encode()).hexdigest()
        except (TypeError, ValueError, RecursionError):  # UnicodeEncodeError is a ValueError
            return f"uncached {len(work.pairs)}"

    def _account(self, verdicts: list[Verdict], work: _Work) -> None:
        fresh, keys = work.fresh, work.keys
        self._counts["pairs"] += len(verdicts)
        self._counts["cache_hits"] += len(verdicts) - len(fresh)
        for verdict in verdicts:
            self._counts["scored" if verdict.reward is not None else f"unscorable/{verdict.reason}"] += 1
        for i in fresh:
            counts = verdicts[i].details.get("counts")
            for name, count in counts.items() if isinstance(counts, dict) else ():
                if isinstance(count, (int, float)) and abs(count) < 1e15:  # NaN fails; own verifiers may say anything
                    self._counts[str(name)] += count
            if verdicts[i].reward is not None and not keys[i].startswith("uncached "):
                self._cache[keys[i]] = verdicts[i]
        while len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)

    # --- workers

    def _run(self, work: _Work) -> None:
        pending = work.pending
        try:
            while pending or any(worker.queue for worker in self._pool) or not work.arrivals.done:
                self._hire(pending)
                active = sum(bool(w.queue) for w in self._pool) - self._stuck()
                for worker in self._pool:
                    if pending and not worker.busy and active < self.workers:
                        self._assign(worker, work)
                        active += 1
                self._wait(work.arrivals)
                if work.arrivals.abandoned:
                    raise _Abandoned
                self._admit(work)
                for worker in list(self._pool):
                    self._collect(worker, work)
            for worker in self._pool[self.workers :]:
                self._dismiss(worker)
        except BaseException as error:  # an interrupt too: the workers are in the middle of something
            for worker in list(self._pool):
                if worker.busy or not isinstance(error, _Abandoned):
                    self._dismiss(worker)
            if not isinstance(error, _Abandoned):
                raise

    def _hire(self, pending: deque[int]) -> None:
        """Keep as many workers that make progress as there is work for, beside at most `max_stuck` that do not."""
        stuck = self._stuck()
        free = sum(not w.queue for w in self._pool)
        while (
            free < len(pending)
            and len(self._pool) - stuck < self.workers + min(stuck, self.workers)  # spares start while we find out
            and len(self._pool) < self.workers + self.max_stuck
        ):
            worker = WorkerProcess(self._factory_frame, self._spawner)
            worker.since = time.monotonic()
            self._pool.append(worker)
            self._counts["workers_started"] += 1
            free += 1

    @property
    def _grace(self) -> float:
        """Seconds after which a worker is no longer waited for, though not yet given up."""
        usual = 20 * self._answer_seconds / self._answered if self._answered else 0.5
        return min(max(0.05, usual), self.timeout_seconds / 10)

    def _stuck(self) -> int:
        latest = time.monotonic() - self._grace
        return sum(bool(w.queue) and w.since < latest for w in self._pool)

    def _assign(self, worker: WorkerProcess, work: _Work) -> None:
        """Give the worker the next pairs of one turn."""
        pairs, pending = work.pairs, work.pending
        limit = max(1, min(_CHUNK, len(pending) // (2 * self.workers)))
        turn = pairs[pending[0]][0]
        chunk: list[int] = []
        while pending and len(chunk) < limit and pairs[pending[0]][0] is turn:
            chunk.append(pending.popleft())
        try:
            worker.outbox += frame((turn, [(i, pairs[i][1]) for i in chunk]))
        except Exception as error:
            pending.extendleft(reversed(chunk[1:]))
            try:
                worker.outbox += frame((turn, [(chunk[0], pairs[chunk[0]][1])]))
            except Exception:
                work.results[chunk[0]] = Verdict(None, UNSENDABLE, {"error": f"{type(error).__name__}: {error}"[:200]})
                return
            chunk = chunk[:1]
        worker.queue = chunk
        worker.since = time.monotonic()
        worker.flush()

    def _limit(self, worker: WorkerProcess) -> float:
        return self.timeout_seconds if worker.ready else self.start_timeout_seconds

    def _wait(self, arrivals: Arrivals) -> None:
        """Until a worker or a new pair has something to say, a limit passes, or half a second (the dead are silent)."""
        now = time.monotonic()
        wake, grace = now + 0.5, self._grace
        with selectors.PollSelector() as selector:
            selector.register(arrivals.signal, selectors.EVENT_READ)
            for worker in self._pool:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.outbox else 0)
                selector.register(worker.connection, events)
                if worker.busy:
                    age = now - worker.since
                    wake = min(wake, worker.since + (grace if age < grace else self._limit(worker)))
            selector.select(max(0.0, wake - now) + 0.001)

    def _collect(self, worker: WorkerProcess, work: _Work) -> None:
        """Take what the worker has answered; judge its health after that, so that a late reader blames nobody."""
        alive = worker.flush()
        rows, reads = worker.rows()
        alive = alive and reads
        for row in rows:
            if "failed" in row:
                raise UserError(f"verifier {self.name}: it cannot be made in a worker process: {row['failed']}")
            if "ready" in row:
                worker.ready, self._failed_starts = True, 0
            elif worker.queue and row.get("key") == worker.queue[0]:
                work.results[worker.queue.pop(0)] = checked(Verdict(row["reward"], row["reason"], row["details"]))
                self._answered += 1
                self._answer_seconds += time.monotonic() - worker.since
            else:  # not an answer to what was asked
                alive = False
                break
            worker.since = time.monotonic()
        overdue = worker.busy and time.monotonic() - worker.since > self._limit(worker)
        if alive and not overdue:
            return
        self._dismiss(worker)
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= _MAX_FAILED_STARTS:
                raise RuntimeError(
                    f"verifier {self.name}: {self._failed_starts} worker processes in a row ended before they were "
                    f"ready (exit {worker.process.returncode}); their stderr above says why"
                )
        elif worker.queue:
            self._give_up(worker, work, TIMEOUT if alive else WORKER_DIED)

    def _give_up(self, worker: WorkerProcess, work: _Work, reason: str) -> None:
        """The pair the worker was at is unscorable; the rest of its turn goes last, for it may do the same."""
        pairs, pending = work.pairs, work.pending
        culprit, *rest = worker.queue
        detail = {"seconds": self.timeout_seconds} if reason == TIMEOUT else {"exit": worker.process.returncode}
        work.results[culprit] = Verdict(None, reason, detail)
        turn = pairs[culprit][0]
        same = [i for i in pending if pairs[i][0] is turn]
        others = [i for i in pending if pairs[i][0] is not turn]
        pending.clear()
        pending.extend([*others, *rest, *same])

    def _dismiss(self, worker: WorkerProcess) -> None:
        worker.kill()
        self._pool.remove(worker)
        self._counts["workers_killed"] += 1
