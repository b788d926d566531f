"""Ports for servers that start later than they are given one."""

from __future__ import annotations

import random
import socket
from pathlib import Path

OURS = range(10_000, 20_000)  # launch/job.sh takes its own from 20000 on
_GIVEN_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")
_TRIES = 100


def free_port(given_out: Path = _GIVEN_OUT) -> int:
    """A port on which nobody listens, and that the system gives to no connection before the server takes it.

    A server needs seconds to minutes until it binds. A port that the system picks (bind to 0) may be the near end of
    any outgoing connection by then, as of vLLM's or NCCL's. So one outside `given_out` (two numbers: the first and
    the last that connections get) is taken; only where that range covers all of OURS does the system pick.
    """
    first, last = _first_last(given_out)
    ports = [port for port in OURS if not first <= port <= last]
    for port in random.SystemRandom().sample(ports, min(_TRIES, len(ports))):  # a seeded generator is left alone
        if _bound(port) is not None:
            return port
    picked = _bound(0)
    if picked is None:
        raise OSError("no free port on this machine")
    return picked


def _first_last(given_out: Path) -> tuple[int, int]:
    try:
        first, last = given_out.read_text(encoding="ascii").split()
    except OSError:
        return 32_768, 65_535  # not Linux: no system begins lower
    return int(first), int(last)


def _bound(port: int) -> int | None:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return None
        return int(probe.getsockname()[1])
