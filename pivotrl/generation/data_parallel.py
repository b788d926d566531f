"""Several engines in one world: each samples a share of the prompts, every rank gets all completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from pivotrl.generation.engine import Completion
from pivotrl.peers import parts

K = TypeVar("K")
V = TypeVar("V")


def share(order: Sequence[int], engine: int, engines: int) -> list[int]:
    """A contiguous part of `order`, of equal size but for one: neighbours, which share prefixes, stay together."""
    return list(order[len(order) * engine // engines : len(order) * (engine + 1) // engines])


def gather_groups(
    count: int, mine: Sequence[int], sample: Callable[[], list[list[Completion]]]
) -> list[list[Completion]]:
    """All ranks' completions of `count` prompts. `sample` gives this rank's, at the places `mine`.

    An error on one rank is raised on every rank, so that none waits for it.
    """

    def own() -> dict[int, list[Completion]]:
        groups = sample()
        return {i: groups[i] for i in mine}

    found = merged(own)
    return [found[i] for i in range(count)]


def merged(mine: Callable[[], dict[K, V]]) -> dict[K, V]:
    """The parts that the ranks found, put together on all of them. An error of one is raised on all."""
    return {key: value for part in parts(mine) for key, value in part.items()}
