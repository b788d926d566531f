"""In-domain success: end-to-end episodes where the domain has an environment, held-out local reward elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pivotrl.environments.base import Environment, Task
from pivotrl.environments.rollout import EpisodeResult, episodes_of, run_episodes
from pivotrl.evaluation.statistics import interval, pass_at_k, success_row
from pivotrl.generation.engine import Completion, Engine, Sampling
from pivotrl.local_rollouts import LocalRoller, State, seed_for
from pivotrl.peers import anyone, pooled, work_together
from pivotrl.profiling.ledger import Cost
from pivotrl.rendering.chat import Renderer
from pivotrl.trajectories.schema import Action, JsonDict

View = tuple[list[JsonDict], list[JsonDict]]  # messages, tools


@dataclass(frozen=True)
class SampledAction(Action):
    """An action with what was sampled for it, so that an episode can be trained on as it was generated."""

    prompt_ids: tuple[int, ...] = ()
    completion: Completion | None = None


class Validity:
    """How many assistant turns could be read, and how many of their calls fit the tools' schemas."""

    def __init__(self) -> None:
        self.turns = self.malformed = self.calls = self.valid_calls = 0

    def add(self, action: Action, tools: Sequence[JsonDict]) -> None:
        schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        self.turns += 1
        self.malformed += bool(action.problems)
        self.calls += len(action.tool_calls)
        self.valid_calls += sum(c.name in schemas and fits(c.arguments, schemas[c.name]) for c in action.tool_calls)

    def to_json(self) -> dict[str, Any]:
        tried = self.calls + self.malformed  # a turn that cannot be read is a call that failed
        return {**vars(self), "share": self.valid_calls / tried if tried else None}


def fits(arguments: JsonDict, schema: JsonDict) -> bool:
    """Whether `arguments` satisfy a tool's JSON Schema."""
    from jsonschema import Draft202012Validator

    return bool(Draft202012Validator(schema).is_valid(arguments))


class EngineActor:
    """Acts for all unfinished episodes at once; None where the prompt has outgrown the context.

    Where several processes play, each calls it with the states of its own episodes and gets their actions; the engine
    samples for all of them together. What is counted is of all, and the same in every process.
    """

    def __init__(self, engine: Engine, renderer: Renderer, sampling: Sampling, context_length: int, seed: int):
        self.engine, self.renderer, self.sampling = engine, renderer, sampling
        self.room, self.seed = context_length - sampling.max_new_tokens, seed
        self.calls = 0
        self.validity = Validity()
        self.spent = Cost()

    @property
    def cost(self) -> dict[str, float]:
        return self.spent.to_json()

    def __call__(self, views: Sequence[View]) -> list[Action | None]:
        asked, own = pooled(lambda: [(self.renderer.prompt_ids(messages, tools), tools) for messages, tools in views])
        fits = [i for i, (prompt, _) in enumerate(asked) if len(prompt) <= self.room]
        seeds = [seed_for(self.seed, "episode", self.calls, i) for i in fits]
        self.calls += 1
        clock = time.perf_counter()
        groups = self.engine.generate([asked[i][0] for i in fits], self.sampling, 1, seeds) if fits else []
        self.spent += Cost(seconds=time.perf_counter() - clock)
        actions: list[Action | None] = [None] * len(asked)
        for i, (completion,) in zip(fits, groups, strict=True):
            prompt, tools = asked[i]
            action = self.renderer.parse(completion.token_ids, tools)
            self.validity.add(action, tools)
            actions[i] = SampledAction(**vars(action), prompt_ids=tuple(prompt), completion=completion)
            self.spent += Cost(1, len(prompt), completion.cached_prompt_tokens, len(completion.token_ids))
        return actions[own.start : own.stop]


def play_together(
    environment: Environment, tasks: Sequence[Task], actor: EngineActor, max_turns: int, trials: int = 1
) -> list[EpisodeResult]:
    """Play every task `trials` times; results in the order of (task, trial), the same in every process of the stage.

    Each process plays a share of the episodes. An environment need not answer the same twice (a user's model, a time
    limit): processes that played all of them each for itself would part ways.
    """
    episodes = episodes_of(tasks, trials)
    return work_together(episodes, lambda own: run_episodes(environment, own, actor, max_turns, anyone))


def episode_summary(results: Sequence[EpisodeResult]) -> dict[str, Any]:
    """Success over tasks with an interval; episodes that the environment broke are counted, never failures."""
    judged = [r for r in results if r.outcome is not None]
    by_task: dict[str, list[float]] = {}
    families: dict[str, list[float]] = {}
    reasons: dict[str, int] = {}
    for r in judged:
        assert r.outcome is not None
        by_task.setdefault(r.task.id, []).append(float(r.outcome.success))
        families.setdefault(r.task.family, []).append(float(r.outcome.success))
        reasons[r.outcome.reason] = reasons.get(r.outcome.reason, 0) + 1
    per_task = {task: sum(v) / len(v) for task, v in by_task.items()}
    trials = max((len(v) for v in by_task.values()), default=0)
    successes = sum(sum(v) for v in by_task.values())
    return {
        "success": successes / len(judged) if judged else None,
        "ci": list(interval(list(per_task.values()))),
        "n": len(judged),
        "trials": trials,
        "pass_at": _pass_at(by_task.values()),
        "errors": len(results) - len(judged),
        "by_family": {f: sum(v) / len(v) for f, v in sorted(families.items())},
        "reasons": dict(sorted(reasons.items())),
        "per_task": per_task,
    }


def _pass_at(by_task: Iterable[Sequence[float]]) -> dict[str, float]:
    """Mean pass@k over the tasks that have k judged trials, for k = 1, 2, 4, ... ."""
    tasks, result, k = [v for v in by_task if v], {}, 1
    while counted := [pass_at_k(len(v), int(sum(v)), k) for v in tasks if len(v) >= k]:
        result[str(k)] = sum(counted) / len(counted)
        k *= 2
    return result


def episode_row(result: EpisodeResult) -> dict[str, Any]:
    """One episode for a person to read (evaluate/episodes.jsonl)."""
    outcome = result.outcome
    return {
        "task": result.task.id,
        "family": result.task.family,
        "trial": result.trial,
        "success": None if outcome is None else outcome.success,
        "reason": result.error if outcome is None else outcome.reason,
        "turns": result.turns,
        "messages": result.messages,
    }


def play(
    environment: Environment, tasks: Sequence[Task], trials: int, max_turns: int, actor: EngineActor
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The summary of all episodes, and their rows."""
    results = play_together(environment, tasks, actor, max_turns, trials)
    summary = {**episode_summary(results), "tool_calls": actor.validity.to_json()}
    return summary, [episode_row(result) for result in results]


def evaluate_turns(states: Sequence[State], roller: LocalRoller, trials: int, seed: int) -> dict[str, Any]:
    """Mean local reward on held-out turns, for domains without an environment here. Unscorable rollouts are counted."""
    seeds = [seed_for(seed, "evaluate", s.turn.id) for s in states]
    groups, seconds = roller.timed_groups(states, trials, seeds)
    per_turn = {}
    unscorable = 0
    for state, group in zip(states, groups, strict=True):
        rewards = [r.verdict.reward for r in group if r.verdict.reward is not None]
        unscorable += len(group) - len(rewards)
        if rewards:
            per_turn[state.turn.id] = sum(rewards) / len(rewards)
    cost = Cost.of((r for group in groups for r in group), seconds).to_json()
    return success_row(per_turn) | {"trials": trials, "unscorable": unscorable, "cost": cost}
