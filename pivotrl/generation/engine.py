"""The engine interface: what profiling, training and evaluation need of a generator. Imports no engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from pivotrl.refit.execute import Shard
    from pivotrl.refit.layout import EngineLayout


@dataclass(frozen=True)
class Sampling:
    """One setting for profiling and training alike (method.md 1.2)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    max_new_tokens: int = 512


@dataclass(frozen=True)
class Completion:
    """What the engine sampled: the ids that are trained, never decoded and encoded again (design idea 1).

    `logprobs` are those of the sampling distribution (after temperature, top-k and top-p), one a token.
    A stop id is part of `token_ids` when it was sampled, so it carries loss.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str  # "stop" | "length"
    weight_version: int
    cached_prompt_tokens: int = 0
    # experts of each token, [tokens, MoE layers, top k], with `generation.routed_experts`
    routed_experts: np.ndarray | None = field(default=None, compare=False, repr=False)


# (prompt, sample, completion) of one that is finished, while others are still being sampled. It must return at once.
OnFinished = Callable[[int, int, Completion], None]


class Engine(Protocol):
    """A generator that takes the accelerator in turn with the trainer.

    States: asleep, weights only (awake for a refit), ready. Calls out of order raise `EngineStateError` at once.
    """

    weight_version: int

    @property
    def layout(self) -> EngineLayout:
        """Which ranks of the world serve which part of the weights."""
        ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        n: int,
        seeds: Sequence[int],
        on_finished: OnFinished | None = None,
    ) -> list[list[Completion]]:
        """`n` completions for each prompt (token ids); `seeds[i]` seeds the n samples of prompt i.

        A sample depends on the weights, its prompt, its seed and its number: not on the others nor on their order.
        `on_finished` hears of each completion once, in one of the processes that the engine spans.
        """
        ...

    def score(self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs, at temperature 1, of each continuation's tokens after its prompt."""
        ...

    def forget(self) -> None:
        """Empty the prefix cache: what comes next depends on nothing that was asked before."""
        ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def wake_weights(self) -> None: ...

    def refit(self, weights: Iterable[tuple[str, Tensor | Shard]], version: int) -> None:
        """Load Hugging Face named weights. Raises on missing, unknown or misshapen names; resets the prefix cache."""
        ...

    def close(self) -> None: ...


class EngineStateError(RuntimeError):
    """A call that the engine's present state does not allow."""


class RefitError(RuntimeError):
    """Weights that do not match the engine's model: missing, unknown, misshapen or non-finite."""


class NonFiniteLogprobs(RuntimeError):
    """The engine gave NaN or infinite log-probs. Such samples can be neither trained nor scored; nothing is filled in.

    `samples` lists (prompt index, sample index, token position of the first such value).
    """

    def __init__(self, samples: list[tuple[int, int, int]]) -> None:
        self.samples = samples
        i, k, t = samples[0]
        super().__init__(
            f"{len(samples)} completions have NaN or infinite log-probs; the first: prompt {i}, sample {k}, token {t}. "
            "The weights served overflow or are damaged; look at the last update's gradient norm"
        )

    def __reduce__(self) -> tuple[Any, ...]:  # it travels between ranks
        return type(self), (self.samples,)


def refuse_non_finite(groups: Sequence[Sequence[Completion]]) -> None:
    """Raises NonFiniteLogprobs that names each such sample and its first such token."""
    samples = [
        (i, k, next(t for t, value in enumerate(c.logprobs) if not math.isfinite(value)))
        for i, group in enumerate(groups)
        for k, c in enumerate(group)
        if not all(map(math.isfinite, c.logprobs))
    ]
    if samples:
        raise NonFiniteLogprobs(samples)
