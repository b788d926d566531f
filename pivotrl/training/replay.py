"""Which experts a rollout is trained with (R3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pivotrl.errors import UserError
from pivotrl.generation.engine import Completion

if TYPE_CHECKING:
    from pivotrl.policy.prefix_tree import Ints


def replayed(name: str, completion: Completion, replay: bool) -> Ints | None:
    """The engine's choices with `experts.replay`, else None: the trainer's own. UserError where it gave none."""
    if replay and completion.routed_experts is None:
        raise UserError(f"experts.replay: the engine gave no routed experts for {name}")
    return completion.routed_experts if replay else None
