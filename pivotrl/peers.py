"""Meeting points of the processes of one stage, for parts that know no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from pivotrl.io import keeps_books

Item = TypeVar("Item")
Result = TypeVar("Result")


def _alone() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) == 1


def wait_for_peers() -> None:
    """Until every process of this stage is here. Alone: nothing is done, nothing imported."""
    if not _alone():
        from pivotrl.policy import agree

        agree.wait()


def parts(make: Callable[[], Result]) -> list[Result]:
    """What every process made, on every process. An error of one is raised on all, so that none waits for it."""
    from pivotrl.policy import agree

    own: tuple[Result | None, Exception | None]
    try:
        own = (make(), None)
    except Exception as error:
        own = (None, error)
    everyone = agree.everyone(own)
    for _, failed in everyone:
        if failed is not None:
            raise failed
    return [part for part, _ in everyone]  # type: ignore[misc]


def pooled(make: Callable[[], Sequence[Item]]) -> tuple[list[Item], range]:
    """The items that all processes made, in their order, and the places of this one's among them."""
    if _alone():
        own = list(make())
        return own, range(len(own))
    from pivotrl.policy import agree

    made, rank = parts(make), agree.rank()
    before = sum(map(len, made[:rank]))
    return [item for part in made for item in part], range(before, before + len(made[rank]))


def anyone(flag: bool) -> bool:
    """Whether `flag` is true in any process."""
    return flag if _alone() else any(parts(lambda: flag))


def work_together(items: Sequence[Item], work: Callable[[Sequence[Item]], list[Result]]) -> list[Result]:
    """`work(items)`, one result an item, in order: each process does a share, and all hold the same results.

    For what need not come out the same twice (a judge, a user's model, a time-out): processes that went on with
    different results would part ways. An error in one process is raised in every one, so that none waits for it.
    """
    if _alone():
        return work(items)
    from pivotrl.policy import agree

    rank, world = agree.rank(), agree.world()
    mine = items[len(items) * rank // world : len(items) * (rank + 1) // world]
    return pooled(lambda: work(mine))[0]


def sum_of_all(counts: Mapping[str, float]) -> dict[str, float]:
    """The counts of every process of this stage, added up by name, in every process."""
    if _alone():
        return dict(counts)
    from pivotrl.policy import agree

    total: dict[str, Any] = {}
    for part in agree.everyone(dict(counts)):
        for name, count in part.items():
            total[name] = total.get(name, 0) + count
    return dict(sorted(total.items()))


def from_first(make: Callable[[], Result]) -> Result:
    """What the first process made, on every process. Only the first makes it: of files that it alone has written.

    An error there is raised on every process, so that none waits for it.
    """
    if _alone():
        return make()
    return parts(lambda: make() if keeps_books() else None)[0]  # type: ignore[return-value]
