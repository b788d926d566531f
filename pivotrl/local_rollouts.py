"""The local rollout (method.md 1.3): sample exactly one assistant turn per state and score it."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pivotrl.config import Config
from pivotrl.generation.data_parallel import merged
from pivotrl.generation.engine import Completion, Engine, Sampling
from pivotrl.peers import work_together
from pivotrl.rendering.prompts import prompts_of
from pivotrl.rollouts import Rollout
from pivotrl.trajectories.duplicates import TurnDigests
from pivotrl.trajectories.schema import Action, Turn
from pivotrl.verifiers.base import Verdict, Verifier
from pivotrl.verifiers.runner import VerifierRunner, score_pairs
from pivotrl.verifiers.stream import VerdictStream
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
    turns: Iterable[Turn],
    renderer: Renderer,
    verifier: Verifier,
    context_length: int,
    max_new_tokens: int,
    workers: int = 1,
    cache: Path | None = None,
    duplicates: Collection[str] = (),
) -> tuple[list[State], list[SkippedState]]:
    """Render every turn; those past the context, or whose own demonstration the verifier does not accept, are audited.

    A prompt is never cut (field report E8), and a turn whose demonstration cannot score 1 can teach nothing.
    `workers`, `cache`: as in `prompts_of`. `duplicates`: ids of turns to leave out, from `duplicate_prompts`.
    """
    turns = list(turns)
    order = {turn.id: i for i, turn in reversed(list(enumerate(turns)))}
    skipped = [
        SkippedState(turn.id, turn.source, "duplicate_prompt", "an earlier turn has this prompt and action")
        for turn in turns
        if turn.id in duplicates
    ]
    unique = [turn for turn in turns if turn.id not in duplicates]
    accepted: list[Turn] = []
    verdicts = work_together([(turn, turn.demonstration) for turn in unique], partial(score_pairs, verifier))
    for turn, verdict in zip(unique, verdicts, strict=True):
        if verdict.reward == 1.0:
            accepted.append(turn)
            continue
        reason = "demonstration_unscorable" if verdict.reward is None else "demonstration_rejected"
        skipped.append(SkippedState(turn.id, turn.source, reason, verdict.reason))
    states = []
    prompts = prompts_of([(turn.messages, turn.tools) for turn in accepted], renderer, workers, cache)
    for turn, prompt in zip(accepted, prompts, strict=True):
        if len(prompt) + max_new_tokens > context_length:
            detail = f"prompt {len(prompt)} + new {max_new_tokens} > context {context_length} tokens"
            skipped.append(SkippedState(turn.id, turn.source, "beyond_context", detail))
        else:
            states.append(State(turn, prompt))
    return states, sorted(skipped, key=lambda s: order[s.turn_id])


def prompt_cache(cfg: Config, run_dir: Path) -> Path | None:
    """Where the prompts of a run are kept between stages; None: nowhere."""
    return run_dir / "prompts" if cfg.rendering.cache else None


def states_of(
    turns: Iterable[Turn],
    cfg: Config,
    run_dir: Path,
    renderer: Renderer,
    verifier: Verifier,
    duplicates: Collection[str] = (),
) -> tuple[list[State], list[SkippedState]]:
    """`render_states` with the settings of a run, which are the same in every stage."""
    return render_states(
        turns,
        renderer,
        verifier,
        cfg.model.context_length,
        cfg.sampling.max_new_tokens,
        cfg.rendering.workers,
        prompt_cache(cfg, run_dir),
        duplicates,
    )


def duplicate_prompts(
    turns: Iterable[Turn], renderer: Renderer, workers: int = 1, cache: Path | None = None
) -> set[str]:
    """Ids of turns whose prompt ids and action are those of an earlier turn, though their messages differ.

    Only the thinking of earlier turns can make that difference (templates drop it), so that only turns that are equal
    without it are rendered: every shard of a profile can afford to look at all turns.
    """
    digests = TurnDigests(thinking=False)
    groups: dict[bytes, list[Turn]] = {}
    for turn in turns:
        groups.setdefault(digests.of(turn), []).append(turn)
    alike = [(key, turn) for key, group in groups.items() if len(group) > 1 for turn in group]
    prompts = prompts_of([(turn.messages, turn.tools) for _, turn in alike], renderer, workers, cache)
    seen: set[tuple[bytes, tuple[int, ...]]] = set()
    found = set()
    for (key, turn), prompt in zip(alike, prompts, strict=True):
        if (key, prompt) in seen:
            found.add(turn.id)
        seen.add((key, prompt))
    return found


def score(
    states: Sequence[State],
    completions: Sequence[Sequence[Completion]],
    renderer: Renderer,
    verifier: Verifier,
    first_index: int = 0,
) -> list[list[Rollout]]:
    """Parse and verify the completions of each state; all of them together, so that slow verdicts overlap."""
    actions = [
        [renderer.parse(completion.token_ids, state.turn.tools) for completion in group]
        for state, group in zip(states, completions, strict=True)
    ]
    pairs = [(s.turn, action) for s, group in zip(states, actions, strict=True) for action in group]
    verdicts = iter(work_together(pairs, partial(score_pairs, verifier)))
    return [
        [
            Rollout(state.turn.id, index, len(state.prompt_ids), completion, action, next(verdicts))
            for index, (completion, action) in enumerate(zip(group, parsed, strict=True), start=first_index)
        ]
        for state, group, parsed in zip(states, completions, actions, strict=True)
    ]


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
        """The groups, whose rollouts are numbered from `first_index`, and the seconds that the engine took for them.

        A verifier with worker processes scores each rollout as it finishes, beside the sampling of the others; one
        that computes in this process does so when the engine has finished.
        """
        if isinstance(self.verifier, VerifierRunner) and (self.verifier.workers or self._is_apart()):
            return self._scored_beside(self.verifier, states, n, seeds, first_index)
        clock = time.perf_counter()
        completions = self.engine.generate([s.prompt_ids for s in states], self.sampling, n, seeds)
        seconds = time.perf_counter() - clock
        beat()
        return score(states, completions, self.renderer, self.verifier, first_index), seconds

    def _is_apart(self) -> bool:
        """Whether one process of several is alone with the engine (a server): it then meets no other in here."""
        return int(os.environ.get("WORLD_SIZE", "1")) > 1 and self._spans() == 1

    def _spans(self) -> int:
        """Processes that the engine spans."""
        return self.engine.layout.engines * self.engine.layout.tensor

    def _scored_beside(
        self, runner: VerifierRunner, states: Sequence[State], n: int, seeds: Sequence[int], first_index: int
    ) -> tuple[list[list[Rollout]], float]:
        told: list[tuple[int, int]] = []  # places in the order in which they finished
        actions: list[Action] = []  # in the same order

        def pair(i: int, completion: Completion) -> tuple[Turn, Action]:
            actions.append(self.renderer.parse(completion.token_ids, states[i].turn.tools))
            return states[i].turn, actions[-1]

        def on_finished(i: int, k: int, completion: Completion) -> None:
            told.append((i, k))
            stream.put(partial(pair, i, completion))

        clock = time.perf_counter()
        with VerdictStream(runner) as stream:
            completions = self.engine.generate([s.prompt_ids for s in states], self.sampling, n, seeds, on_finished)
            seconds = time.perf_counter() - clock
            beat()

            def mine() -> dict[tuple[int, int], tuple[Action, Verdict]]:
                verdicts = stream.verdicts()
                return dict(zip(told, zip(actions, verdicts, strict=True), strict=True))

            # where the engine spans processes each was told of a part, and one verdict holds for all
            found = mine() if self._spans() == 1 else merged(mine)
        groups = [
            [
                Rollout(state.turn.id, first_index + k, len(state.prompt_ids), completion, *found[i, k])
                for k, completion in enumerate(group)
            ]
            for i, (state, group) in enumerate(zip(states, completions, strict=True))
        ]
        return groups, seconds
