"""Meeting points of the processes of one stage, for parts that know no torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def wait_for_peers() -> None:
    """Until every process of this stage is here. Alone: nothing is done, nothing imported."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from pivotrl.policy import agree

        agree.wait()


def merged(mine: Callable[[], dict[K, V]]) -> dict[K, V]:
    """What every process of this stage found, on all of them. An error of one is raised on all: none waits for it."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return mine()
    from pivotrl.policy import agree

    found: dict[K, V] = {}
    failed: Exception | None = None
    try:
        found = mine()
    except Exception as error:
        failed = error
    everyone = agree.everyone((found, failed))
    for _, raised in everyone:
        if raised is not None:
            raise raised
    return {key: value for part, _ in everyone for key, value in part.items()}
