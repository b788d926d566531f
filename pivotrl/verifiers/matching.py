"""Maximum bipartite matching: which expected call (or query) is answered by which actual one."""

from __future__ import annotations

from collections.abc import Sequence


def maximum_matching(edges: Sequence[Sequence[int]]) -> dict[int, int]:
    """{right: left} of a largest matching; `edges[left]` lists the right indices it may take (augmenting paths)."""
    taken: dict[int, int] = {}

    def augment(left: int, seen: set[int]) -> bool:
        for right in edges[left]:
            if right not in seen:
                seen.add(right)
                if right not in taken or augment(taken[right], seen):
                    taken[right] = left
                    return True
        return False

    for left in range(len(edges)):
        augment(left, set())
    return taken
