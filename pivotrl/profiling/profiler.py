"""The profiling loop: K local rollouts of the frozen start policy for every turn (method.md 1.2). Knows no engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

from pivotrl.local_rollouts import LocalRoller, State, seed_for
from pivotrl.profiling.adaptive import Plan
from pivotrl.profiling.evidence import State as Counts
from pivotrl.profiling.ledger import Cost
from pivotrl.profiling.store import GroupSize, RolloutStore
from pivotrl.trajectories.schema import Turn

BLOCK_CHUNKS = 4  # submissions of a block's first round: later rounds, of fewer turns, still fill the engine

OnChunk = Callable[[Sequence[State], Cost], None]
GetRoller = Callable[[], LocalRoller]  # called before the first rollout only, so that nothing to do starts no engine


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
    get_roller: GetRoller,
    store: RolloutStore,
    rollouts_per_turn: int,
    turns_per_chunk: int,
    seed: int,
    on_chunk: OnChunk,
    purpose: str = "profile",
) -> None:
    """Fill the store with `rollouts_per_turn` rollouts of every state it lacks.

    `on_chunk` hears what was done and what it cost. Another `purpose` draws other, independent rollouts.
    """
    waiting = [s for s in states if s.turn.id not in store]
    for chunk in _chunks(waiting, turns_per_chunk):
        seeds = [seed_for(seed, purpose, s.turn.id) for s in chunk]
        groups, seconds = get_roller().timed_groups(chunk, rollouts_per_turn, seeds)
        store.append(groups)
        on_chunk(chunk, Cost.of((r for group in groups for r in group), seconds))


def calibration_draw(states: Sequence[State], count: int, seed: int) -> list[State]:
    """The turns that get all K rollouts whatever they show: drawn by id, in the order of `states`."""
    ids = sorted((s.turn.id for s in states), key=lambda i: seed_for(seed, "calibration", i))[:count]
    chosen = set(ids)
    return [s for s in states if s.turn.id in chosen]


def adaptive_sizes(full: Collection[str], rollouts_per_turn: int, round: int) -> GroupSize:
    """Group sizes of an adaptive profile: all K at once for the turns `full`, else rounds."""

    def size(turn_id: str, done: int) -> int:
        left = rollouts_per_turn - done
        return left if turn_id in full else min(round, left)

    return size


def profile_in_rounds(
    states: Sequence[State],
    get_roller: GetRoller,
    store: RolloutStore,
    plan: Plan,
    turns_per_chunk: int,
    seed: int,
    on_chunk: OnChunk,
) -> None:
    """Rounds of `plan.round` rollouts for the states that the plan has not decided, until none is left.

    All rounds of a block of neighbouring states come before the next block, so that the engine's prefix cache still
    holds their prompts. Each decision reads that turn's own rollouts only, so interruptions and shards change nothing.
    """
    for block in _chunks(states, BLOCK_CHUNKS * turns_per_chunk):
        for done in range(0, plan.rollouts, plan.round):
            waiting = [s for s in block if store.count(s.turn.id) == done and not _is_decided(s, store, plan, seed)]
            size = min(plan.round, plan.rollouts - done)
            for chunk in _chunks(waiting, turns_per_chunk):
                # The first round has the seeds of a fixed profile: its rollouts are those of a smaller K.
                seeds = [seed_for(seed, "profile", s.turn.id, *([done] if done else [])) for s in chunk]
                groups, seconds = get_roller().timed_groups(chunk, size, seeds, first_index=done)
                store.append(groups)
                on_chunk(chunk, Cost.of((r for group in groups for r in group), seconds))


def _is_decided(state: State, store: RolloutStore, plan: Plan, seed: int) -> bool:
    if state.turn.id not in store:
        return False
    draw = seed_for(seed, "plan", state.turn.id) / 2**31
    return plan.is_decided([row["reward"] for row in store.rows(state.turn.id)], draw)


def waves(states: Sequence[State], known: int, seed: int) -> Iterator[list[State]]:
    """`states` in waves, each of about as many turns as were known before it, `known` at first; 0: one wave of all.

    Whole trajectories, drawn by id, so that each wave is like the next ones; in the order of `states` within a wave.
    """
    sizes = Counter(s.turn.trajectory_id for s in states)
    wave_of: dict[str, int] = {}
    number, turns, limit = 0, 0, known or len(states)
    for trajectory in sorted(sizes, key=lambda t: (seed_for(seed, "wave", t), t)):
        if turns >= limit:
            number, turns, limit = number + 1, 0, limit + turns
        wave_of[trajectory] = number
        turns += sizes[trajectory]
    parts: list[list[State]] = [[] for _ in range(number + 1)]
    for state in states:
        parts[wave_of[state.turn.trajectory_id]].append(state)
    yield from parts


def stopped_at(states: Sequence[State], store: RolloutStore) -> Counter[Counts]:
    """Turns by (rollouts, right); those with an unscorable or partial reward are left out."""
    found: Counter[Counts] = Counter()
    for state in states:
        rewards = [row["reward"] for row in store.rows(state.turn.id)]
        if rewards.count(1.0) + rewards.count(0.0) == len(rewards):
            found[len(rewards), rewards.count(1.0)] += 1
    return found


def _chunks(states: Sequence[State], size: int) -> Iterator[Sequence[State]]:
    for start in range(0, len(states), size):
        yield states[start : start + size]
