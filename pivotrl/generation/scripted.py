"""Engines without a model: scripted completions and replayed rollouts. For tests and for work that needs no sampling.

Both keep the states and checks of the real engine, so a caller that is right here is in order there. No torch.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pivotrl.errors import UserError
from pivotrl.generation.base import StatefulEngine
from pivotrl.generation.engine import Completion, OnFinished, Sampling
from pivotrl.generation.refit_check import ExpectedWeights, RefitCheck
from pivotrl.generation.requests import check_request

if TYPE_CHECKING:
    from pivotrl.rollouts import Rollout

Script = Callable[[Sequence[int], int, int], Sequence[int]]
Weight = Any  # a float, a flat list of floats, or anything with .shape and .tolist()


class ScriptedEngine(StatefulEngine):
    """Deterministic completions: `script(prompt_ids, k, seed)` gives the ids of sample k of a prompt.

    Log-probs depend on the weights, the prompt and the sample. As in a real engine, a prompt's prefix is computed once
    and kept; it is computed from the weights of that moment, so an engine that did not reset it at a refit would go on
    giving the log-probs of the old weights, and a test would see it.
    """

    def __init__(
        self, script: Script, weights: Mapping[str, Weight] | None = None, stop_token_ids: Sequence[int] = ()
    ) -> None:
        super().__init__()
        self.script = script
        self.weights: dict[str, Weight] = dict(weights or {"weight": 0.0})
        self.generate_calls = 0
        self.cache_resets = 0
        self._stop = frozenset(stop_token_ids)
        self._expected = ExpectedWeights({name: weight_shape(value) for name, value in self.weights.items()})
        self._prefix_cache: dict[tuple[int, ...], str] = {}  # prompt -> digest of the weights that computed it

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        n: int,
        seeds: Sequence[int],
        on_finished: OnFinished | None = None,
    ) -> list[list[Completion]]:
        self._state.require_generate()
        check_request(prompts, n, seeds)
        self.generate_calls += 1
        groups: list[list[Completion]] = []
        for i, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            groups.append([])
            for k in range(n):
                groups[i].append(self._complete(tuple(prompt), k, seed, sampling))
                if on_finished:
                    on_finished(i, k, groups[i][k])
        return groups

    def score(self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]) -> list[list[float]]:
        """Numbers that depend on weights and tokens alone."""
        self._state.require_generate()
        digest = weight_digest(self.weights)
        return [
            [-_unit_interval((digest, tuple(prompt), tuple(ids[: i + 1]))) for i in range(len(ids))]
            for prompt, ids in zip(prompts, continuations, strict=True)
        ]

    def _forget(self) -> None:
        self._prefix_cache.clear()

    def _sleep(self, discard_weights: bool) -> None:
        self._reset_prefix_cache()

    def _wake(self) -> None:
        pass

    def _load(self, weights: Iterable[tuple[str, Weight]], version: int) -> None:
        check = RefitCheck(self._expected)
        fresh: dict[str, Weight] = {}
        for name, value in weights:
            check.add(name, weight_shape(value), finite=weight_digest({name: value}) is not None)
            fresh[name] = value
        check.finish()
        self.weights = fresh
        self._reset_prefix_cache()

    def _close(self) -> None:
        self._prefix_cache.clear()

    def _reset_prefix_cache(self) -> None:
        self._prefix_cache.clear()
        self.cache_resets += 1

    def _complete(self, prompt: tuple[int, ...], k: int, seed: int, sampling: Sampling) -> Completion:
        cached = len(prompt) if prompt in self._prefix_cache else 0
        if not cached:
            digest = weight_digest(self.weights)
            assert digest is not None  # refit refuses weights that are not finite
            self._prefix_cache[prompt] = digest
        ids = tuple(self.script(prompt, k, seed))[: sampling.max_new_tokens]
        stop = next((i for i, token in enumerate(ids) if token in self._stop), None)
        ids = ids if stop is None else ids[: stop + 1]
        base = (self._prefix_cache[prompt], prompt, k, seed)
        logprobs = tuple(-_unit_interval((*base, position, token)) for position, token in enumerate(ids))
        return Completion(ids, logprobs, "length" if stop is None else "stop", self.weight_version, cached)


class ReplayEngine(StatefulEngine):
    """Gives back recorded completions: training or profiling from a rollout file, with no model.

    `prompts` maps turn ids to prompt token ids (rollout files keep only their number). Each call for a prompt takes its
    next `n` recorded completions, in file order.
    """

    def __init__(self, rollouts: Iterable[Rollout], prompts: Mapping[str, Sequence[int]]) -> None:
        super().__init__()
        self._turns: dict[tuple[int, ...], list[str]] = defaultdict(list)
        self._recorded: dict[tuple[int, ...], list[Completion]] = defaultdict(list)
        for turn_id, ids in prompts.items():
            self._turns[tuple(ids)].append(turn_id)
        for rollout in rollouts:
            if (prompt := prompts.get(rollout.turn_id)) is None:
                raise UserError(
                    f"replay: rollout of turn {rollout.turn_id!r} has no prompt; is it of another turn file?"
                )
            if len(prompt) != rollout.prompt_tokens:
                raise UserError(
                    f"replay: turn {rollout.turn_id!r} was recorded with {rollout.prompt_tokens} prompt tokens but "
                    f"renders to {len(prompt)} now; template, tokenizer or turns changed, so record the rollouts again"
                )
            self._recorded[tuple(prompt)].append(rollout.completion)
        self._next: dict[tuple[int, ...], int] = defaultdict(int)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        n: int,
        seeds: Sequence[int],
        on_finished: OnFinished | None = None,
    ) -> list[list[Completion]]:
        self._state.require_generate()
        check_request(prompts, n, seeds)
        groups = [self._take(tuple(prompt), i, n) for i, prompt in enumerate(prompts)]
        if on_finished:
            for i, group in enumerate(groups):
                for k, completion in enumerate(group):
                    on_finished(i, k, completion)
        return groups

    def score(self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]) -> list[list[float]]:
        raise UserError("replay: recorded rollouts cannot score other tokens; use an engine with a model")

    def _sleep(self, discard_weights: bool) -> None:
        pass

    def _wake(self) -> None:
        pass

    def _load(self, weights: Iterable[tuple[str, Weight]], version: int) -> None:
        """Consumes `weights` (they may be a collective gather on other ranks) and keeps none."""
        for _ in weights:
            pass

    def _close(self) -> None:
        pass

    def _take(self, prompt: tuple[int, ...], index: int, n: int) -> list[Completion]:
        recorded = self._recorded.get(prompt, [])
        start = self._next[prompt]
        if start + n > len(recorded):
            turns = ", ".join(self._turns.get(prompt, [])) or "no recorded turn"
            raise UserError(
                f"replay: prompt {index} ({turns}) needs {n} completions, {len(recorded) - start} of {len(recorded)} "
                "recorded are left; record more rollouts or ask for fewer"
            )
        self._next[prompt] = start + n
        return recorded[start : start + n]


def weight_shape(value: Weight) -> tuple[int, ...]:
    if hasattr(value, "shape"):
        return tuple(value.shape)
    return (len(value),) if isinstance(value, list | tuple) else ()


def weight_digest(weights: Mapping[str, Weight]) -> str | None:
    """Hash of names and values; None if a value is NaN or infinite."""
    hasher = hashlib.sha256()
    for name in sorted(weights):
        value = weights[name]
        text = repr(value.tolist() if hasattr(value, "tolist") else value)
        if "nan" in text or "inf" in text:
            return None
        hasher.update(f"{name}={text};".encode())
    return hasher.hexdigest()


def _unit_interval(key: object) -> float:
    """A number in (0, 1] from a key, the same on every machine."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return (int.from_bytes(digest[:6], "big") + 1) / 2**48
