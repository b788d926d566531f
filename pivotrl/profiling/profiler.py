"""The profiling loop: K local rollouts of the frozen start policy for every turn (method.md 1.2). Knows no engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pivotrl.local_rollouts import LocalRoller, State, seed_for
from pivotrl.profiling.store import RolloutStore
from pivotrl.trajectories.schema import Turn


def draw_turns(turns: Sequence[Turn], limit: int | None, seed: int) -> list[Turn]:
    """At most `limit` turns, drawn by their id alone, in the order of the prompt trie: by trajectory, then depth.

    So the engine's prefix cache serves turn t + 1 from turn t.
    """
    chosen = list(turns)
    if limit is not None:
        chosen = sorted(turns, key=lambda t: seed_for(seed, "draw", t.id))[:limit]
    return sorted(chosen, key=lambda t: (t.trajectory_id, t.depth))


def profile_states(
    states: Sequence[State],
    roller: LocalRoller,
    store: RolloutStore,
    rollouts_per_turn: int,
    turns_per_chunk: int,
    seed: int,
    on_chunk: Callable[[int], None],
) -> None:
    """Fill the store with `rollouts_per_turn` rollouts of every state it lacks; `on_chunk` hears the turns done."""
    waiting = [s for s in states if s.turn.id not in store.groups]
    for start in range(0, len(waiting), turns_per_chunk):
        chunk = waiting[start : start + turns_per_chunk]
        seeds = [seed_for(seed, "profile", s.turn.id) for s in chunk]
        store.append(roller.groups(chunk, rollouts_per_turn, seeds))
        on_chunk(len(chunk))
