"""Meeting points of the processes of one stage, for parts that know no torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from pivotrl.io import keeps_books

T = TypeVar("T")


def wait_for_peers() -> None:
    """Until every process of this stage is here. Alone: nothing is done, nothing imported."""
    if _are_several():
        from pivotrl.policy import agree

        agree.wait()


def from_first(make: Callable[[], T]) -> T:
    """What the first process made, on every process. Only the first makes it: of files that it alone has written.

    An error there is raised on every process, so that none waits for it.
    """
    if not _are_several():
        return make()
    from pivotrl.policy import agree

    made: tuple[T | None, Exception | None] = (None, None)
    if keeps_books():
        try:
            made = (make(), None)
        except Exception as error:
            made = (None, error)
    value, failed = agree.everyone(made)[0]
    if failed is not None:
        raise failed
    return value  # type: ignore[return-value]


def _are_several() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1
