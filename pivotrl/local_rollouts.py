"""The local rollout (method.md 1.3): sample exactly one assistant turn per state and score it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pivotrl.generation.engine import Completion, Engine, Sampling
from pivotrl.rollouts import Rollout
from pivotrl.trajectories.schema import Turn
from pivotrl.verifiers.base import Verifier
from pivotrl.watchdog import beat

if TYPE_CHECKING:
    from pivotrl.rendering.chat import Renderer


@dataclass(frozen=True)
class State:
    """A turn with its prompt as the engine sees it: token ids, rendered once and kept (design idea 1)."""

    turn: Turn
    prompt_ids: tuple[int, ...]


@dataclass(frozen=True)
class SkippedState:
    """A turn that cannot be rolled out, for the audit file."""

    turn_id: str
    source: str
    reason: str
    detail: str


def seed_for(*parts: object) -> int:
    """A 31-bit seed that depends on the parts alone: not on sharding, order or process."""
    return int.from_bytes(hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()[:4], "big") >> 1


def render_states(
    turns: Iterable[Turn], renderer: Renderer, verifier: Verifier, context_length: int, max_new_tokens: int
) -> tuple[list[State], list[SkippedState]]:
    """Render every turn; those past the context, or whose own demonstration the verifier does not accept, are audited.

    A prompt is never cut (field report E8), and a turn whose demonstration cannot score 1 can teach nothing.
    """
    states, skipped = [], []
    for turn in turns:
        verdict = verifier.verify(turn, turn.demonstration)
        if verdict.reward != 1.0:
            reason = "demonstration_unscorable" if verdict.reward is None else "demonstration_rejected"
            skipped.append(SkippedState(turn.id, turn.source, reason, verdict.reason))
            continue
        prompt = tuple(renderer.prompt_ids(turn.messages, turn.tools))
        if len(prompt) + max_new_tokens > context_length:
            detail = f"prompt {len(prompt)} + new {max_new_tokens} > context {context_length} tokens"
            skipped.append(SkippedState(turn.id, turn.source, "beyond_context", detail))
            continue
        states.append(State(turn, prompt))
    return states, skipped


def score(
    state: State, completions: Sequence[Completion], renderer: Renderer, verifier: Verifier, first_index: int = 0
) -> list[Rollout]:
    rollouts = []
    for index, completion in enumerate(completions, start=first_index):
        action = renderer.parse(completion.token_ids, state.turn.tools)
        verdict = verifier.verify(state.turn, action)
        rollouts.append(Rollout(state.turn.id, index, len(state.prompt_ids), completion, action, verdict))
    return rollouts


@dataclass(frozen=True)
class LocalRoller:
    """Engine, renderer and verifier put together: states in, scored groups of rollouts out."""

    engine: Engine
    renderer: Renderer
    verifier: Verifier
    sampling: Sampling

    def groups(self, states: Sequence[State], n: int, seeds: Sequence[int]) -> list[list[Rollout]]:
        """`n` rollouts of each state, in one submission to the engine."""
        return self.timed_groups(states, n, seeds)[0]

    def timed_groups(
        self, states: Sequence[State], n: int, seeds: Sequence[int], first_index: int = 0
    ) -> tuple[list[list[Rollout]], float]:
        """The groups, whose rollouts are numbered from `first_index`, and the seconds that the engine took for them."""
        clock = time.perf_counter()
        completions = self.engine.generate([s.prompt_ids for s in states], self.sampling, n, seeds)
        seconds = time.perf_counter() - clock
        beat()
        pairs = zip(states, completions, strict=True)
        return [score(s, group, self.renderer, self.verifier, first_index) for s, group in pairs], seconds
