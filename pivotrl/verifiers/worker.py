"""The process that runs a verifier for the runner: pairs come in over a socket, verdicts go back, one frame each.

Frames are a 4-byte big-endian length and a payload. The parent sends pickles: the factory, then
`(turn, [(key, action), ...])`. The worker answers in JSON only: nothing a verifier executed is unpickled by the parent.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import signal
import socket
import struct
import sys
from typing import Any

from pivotrl.verifiers.guard import safe_verify

HEADER = struct.Struct(">I")
MAX_FRAME = 1 << 28  # bytes; a longer frame is a broken peer
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def _receive(connection: socket.socket, size: int) -> bytes | None:
    parts = []
    while size:
        part = connection.recv(min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def receive(connection: socket.socket) -> Any:
    """The next object from the parent; None at the end."""
    header = _receive(connection, HEADER.size)
    payload = _receive(connection, HEADER.unpack(header)[0]) if header else None
    return None if payload is None else pickle.loads(payload)


def send(connection: socket.socket, row: dict[str, Any]) -> None:
    payload = json.dumps(row, default=repr).encode()
    connection.sendall(HEADER.pack(len(payload)) + payload)


def bind_to_parent(parent: int) -> None:
    """Die with the parent, and keep orphaned grandchildren below this process, where the parent finds them (Linux)."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        if os.getppid() != parent:  # it died before the first prctl
            os._exit(1)


def main(descriptor: int, parent: int) -> None:
    """Serve one verifier until the parent closes the socket."""
    bind_to_parent(parent)
    connection = socket.socket(fileno=descriptor)
    connection.setblocking(True)
    try:
        verifier = receive(connection)()
    except Exception as error:
        send(connection, {"failed": f"{type(error).__name__}: {error}"})
        return
    send(connection, {"ready": True})
    while (task := receive(connection)) is not None:
        turn, actions = task
        for key, action in actions:
            verdict = safe_verify(verifier, turn, action)
            row = {"key": key, "reward": verdict.reward, "reason": verdict.reason}
            try:
                send(connection, row | {"details": verdict.details})
            except (TypeError, ValueError, RecursionError) as error:  # details that JSON cannot hold
                send(connection, row | {"details": {"details_lost": str(error)}})
