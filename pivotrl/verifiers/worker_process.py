"""The parent's side of one verifier worker: start, send, receive, and a kill that leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pivotrl.verifiers.worker import HEADER, MAX_FRAME

# A fresh interpreter, not multiprocessing: nothing is forked from a parent that holds torch or vLLM threads, and the
# user's main module is not run a second time.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from pivotrl.verifiers.worker import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)


def frame(value: Any) -> bytes:
    """A pickled frame for the worker. Raises what pickle raises."""
    payload = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    if len(payload) > MAX_FRAME:
        raise ValueError(f"{len(payload)} bytes, more than {MAX_FRAME}")
    return HEADER.pack(len(payload)) + payload


def descendants(root: int) -> set[int]:
    """Process ids below `root`, by /proc; empty where there is none (macOS: the process group is killed alone)."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            text = entry.read_text(errors="replace")
            parents[int(entry.parent.name)] = int(text.rpartition(")")[2].split()[1])
    found: set[int] = set()
    frontier = {root}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier} - found
        found |= frontier
    return found


def kill_tree(root: int) -> None:
    """Kill `root` (a session leader), its process group and every descendant, daemons that left the group included.

    Each is stopped before it is killed, until no new one appears, so that a fork in progress cannot escape.
    """
    stopped: set[int] = set()
    while new := ({root} | descendants(root)) - stopped:
        for pid in new:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGSTOP)
        stopped |= new
    with contextlib.suppress(OSError):
        os.killpg(root, signal.SIGKILL)
    for pid in stopped:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


class WorkerProcess:
    """One worker. All methods are called by one thread at a time; none blocks on the worker."""

    def __init__(self, factory_frame: bytes, spawner: ThreadPoolExecutor) -> None:
        """`spawner`: a thread as long-lived as the runner, for Linux ties a worker to the thread that started it."""
        self.connection, theirs = socket.socketpair()
        self.connection.setblocking(False)
        self.process = spawner.submit(self._spawn, theirs).result()
        theirs.close()
        self.outbox = bytearray(factory_frame)
        self.inbox = bytearray()
        self.ready = False
        self.queue: list[int] = []  # keys sent and unanswered; the worker is at the first
        self.since = 0.0  # when the worker came to the first of `queue` (or was started), time.monotonic() seconds

    @staticmethod
    def _spawn(theirs: socket.socket) -> subprocess.Popen[bytes]:
        path = json.dumps([p or os.getcwd() for p in sys.path])
        return subprocess.Popen(
            [sys.executable, "-c", _BOOT, str(theirs.fileno()), str(os.getpid()), path],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a verifier prints is for the person, not for whoever reads our stdout
            start_new_session=True,
        )

    @property
    def busy(self) -> bool:
        return bool(self.queue) or not self.ready

    def flush(self) -> bool:
        """Send what the socket takes now; False if the worker is gone."""
        try:
            while self.outbox:
                del self.outbox[: self.connection.send(self.outbox)]
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def rows(self) -> tuple[list[dict[str, Any]], bool]:
        """The answers that have come, and whether the worker still lives."""
        alive = not self._exited()  # asked before reading: what a worker sent before it died still counts
        try:
            for _ in range(64):  # a verifier that floods the socket does not keep us here
                part = self.connection.recv(1 << 20)
                if not part:
                    alive = False
                    break
                self.inbox += part
        except BlockingIOError:
            pass
        except OSError:
            alive = False
        rows: list[dict[str, Any]] = []
        while len(self.inbox) >= HEADER.size:
            size = HEADER.unpack(self.inbox[: HEADER.size])[0]
            if size > MAX_FRAME:
                return rows, False
            if len(self.inbox) < HEADER.size + size:
                break
            try:
                rows.append(json.loads(self.inbox[HEADER.size : HEADER.size + size]))
            except ValueError:  # a verifier wrote into our socket
                return rows, False
            del self.inbox[: HEADER.size + size]
        return rows, alive

    def _exited(self) -> bool:
        """Peeks without reaping: the process id stays ours until `kill`. (A child may hold the socket: no EOF.)"""
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def kill(self) -> None:
        """Kill the worker with all its children and reap it. Safe to call twice."""
        if self.process.returncode is None:
            kill_tree(self.process.pid)
            self.process.wait()
        self.connection.close()
