"""Checks and seeds of a generation request, the same for every engine. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from pivotrl.errors import UserError


def check_request(prompts: Sequence[Sequence[int]], n: int, seeds: Sequence[int]) -> None:
    """Raises ValueError for a request that no engine can mean (a programming error, not a user's)."""
    if len(prompts) != len(seeds):
        raise ValueError(f"generate: {len(prompts)} prompts but {len(seeds)} seeds")
    if n < 1:
        raise ValueError(f"generate: n must be at least 1, not {n}")
    for i, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"generate: prompt {i} is empty")


def check_lengths(prompts: Sequence[Sequence[int]], max_new_tokens: int, max_length: int) -> None:
    """Raises UserError if a prompt and its completion may not fit: nothing is ever cut silently."""
    too_long = [i for i, prompt in enumerate(prompts) if len(prompt) + max_new_tokens > max_length]
    if too_long:
        i = too_long[0]
        raise UserError(
            f"prompt {i} has {len(prompts[i])} tokens; with sampling.max_new_tokens={max_new_tokens} that is over "
            f"model.context_length={max_length} ({len(too_long)} of {len(prompts)} prompts are); "
            "leave these turns out, or raise model.context_length"
        )


def check_token_ids(prompts: Sequence[Sequence[int]], vocabulary: int) -> None:
    """Raises UserError if an id is outside the model's vocabulary (a tokenizer of another model)."""
    for i, prompt in enumerate(prompts):
        if min(prompt) < 0 or max(prompt) >= vocabulary:
            bad = next(token for token in prompt if not 0 <= token < vocabulary)
            raise UserError(
                f"prompt {i} holds token id {bad}, the model's vocabulary has {vocabulary} ids; "
                "use the tokenizer of the model in model.path"
            )


def first_seed(seed: int) -> int:
    """Seed of the first sample of a prompt, in [0, 2**62); vLLM seeds the others of one request with this + k.

    Hashed: neighbouring seeds would otherwise share the noise of n - 1 of their samples.
    """
    digest = hashlib.blake2b(f"{seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


def sample_seed(seed: int, k: int) -> int:
    """Seed of sample `k` of a prompt, the same whether its samples are one request or many."""
    return first_seed(seed) + k
