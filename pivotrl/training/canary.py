"""After the first refit: does the engine compute with the weights that the trainer has now?

The gate before the first step compares weights that both loaded from one folder. This compares weights that only a
right refit can have brought over: one rollout of the step, scored by both after the update.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pivotrl.generation.engine import Engine
from pivotrl.training.gate import Mismatch, require_agreement

if TYPE_CHECKING:
    from pivotrl.policy.policy import MegatronPolicy
    from pivotrl.policy.prefix_tree import TokenSequence


def canary_logprobs(policy: MegatronPolicy, sequence: TokenSequence) -> list[float]:
    """The trainer's log-probs of the sequence's targets at temperature 1, with its present weights."""
    plain = replace(sequence, experts=None)  # the engine scores with its own choices of now
    values: list[float] = policy.logprobs([plain], 1.0)[0].tolist()
    return values


def check_canary(engine: Engine, sequence: TokenSequence, trainer: list[float], limit: float, name: str) -> Mismatch:
    """`name` is the rollout's. Raises MismatchError when the engine's log-probs of the same tokens differ by more than
    `limit` on average."""
    first = sequence.targets[0]  # a rollout: all from here on carries loss
    scored = engine.score([sequence.token_ids[:first]], [sequence.token_ids[first:]])
    found = Mismatch.of([trainer], scored, [name])
    require_agreement(found, limit, "on a rollout scored by both after the first refit")
    return found
