"""Batched episodes: all unfinished ones take a turn together, so that one engine call serves them all."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from pivotrl.environments.base import Environment, Episode, Outcome, Task
from pivotrl.trajectories.schema import Action, JsonDict

_THREADS = 32  # episodes that wait for others at a time
# (messages, tools) of each unfinished episode -> its action; None: the policy cannot act (its context is full).
Act = Callable[[Sequence[tuple[list[JsonDict], list[JsonDict]]]], Sequence[Action | None]]


@dataclass(frozen=True)
class EpisodeResult:
    """One episode. `outcome` is None where the environment broke: that is counted apart, never as a failure."""

    task: Task
    trial: int
    outcome: Outcome | None
    error: str | None
    turns: int  # assistant turns taken
    messages: list[JsonDict] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)  # as `act` gave them, one an assistant turn


@dataclass
class _Running:
    task: Task
    trial: int
    episode: Episode | None = None
    turns: int = 0
    actions: list[Action] = field(default_factory=list)
    result: EpisodeResult | None = None

    def finish(self, outcome: Outcome | None, error: str | None = None) -> None:
        messages = list(self.episode.messages) if self.episode is not None else []
        self.result = EpisodeResult(self.task, self.trial, outcome, error, self.turns, messages, self.actions)

    def guarded(self, do: Callable[[], None]) -> None:
        """Run a part of the environment; what it raises ends this episode only."""
        try:
            do()
        except Exception as error:  # any bug of an environment; the trace goes into the result
            where = "".join(traceback.format_exception(error)[-2:]).strip()
            self.finish(None, f"{type(error).__name__}: {error}\n{where}")


def episodes_of(tasks: Sequence[Task], trials: int = 1) -> list[tuple[Task, int]]:
    """Every task `trials` times: (task, trial), in this order."""
    return [(task, trial) for task in tasks for trial in range(trials)]


def run_episodes(
    environment: Environment,
    episodes: Sequence[tuple[Task, int]],
    act: Act,
    max_turns: int,
    any_open: Callable[[bool], bool] = bool,
) -> list[EpisodeResult]:
    """Play `episodes` (task, trial); results in their order.

    `act` gets the messages and tools of all unfinished episodes (read-only) and returns one action each. What `act`
    raises is the engine's error, not an episode's: it is passed on. Raises ValueError for another number of actions.
    `any_open`: whether this process or, where several play with one `act`, another has unfinished ones; while it says
    so, `act` is called in all of them, in some with nothing.
    """
    running = [_Running(task, trial) for task, trial in episodes]
    together = bool(getattr(environment, "waits", False))
    _do([partial(one.guarded, partial(_start, environment, one, max_turns)) for one in running], together)
    while any_open(bool(active := [one for one in running if one.result is None])):
        states = [(list(_episode(one).messages), _episode(one).tools) for one in active]
        actions = act(states)
        if len(actions) != len(active):
            raise ValueError(f"act returned {len(actions)} actions for {len(active)} episodes")
        steps = zip(active, actions, strict=True)
        _do([partial(one.guarded, partial(_advance, one, action, max_turns)) for one, action in steps], together)
    return [one.result for one in running if one.result is not None]


def _do(work: Sequence[Callable[[], None]], together: bool) -> None:
    if not together:
        for piece in work:
            piece()
        return
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="episode") as pool:
        for done in [pool.submit(piece) for piece in work]:
            done.result()


def _episode(one: _Running) -> Episode:
    assert one.episode is not None
    return one.episode


def _start(environment: Environment, one: _Running, max_turns: int) -> None:
    one.episode = environment.reset(one.task, max_turns)
    if one.episode.done:
        one.finish(one.episode.outcome())


def _advance(one: _Running, action: Action | None, max_turns: int) -> None:
    episode = _episode(one)
    if action is None:
        one.finish(Outcome(False, "context_full", {"turns": one.turns}))
        return
    one.turns += 1
    one.actions.append(action)
    episode.step(action)
    if episode.done:
        one.finish(episode.outcome())
    elif one.turns >= max_turns:
        raise RuntimeError(f"the environment did not end the episode after {max_turns} turns")
