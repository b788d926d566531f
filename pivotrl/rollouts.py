"""One rollout file format, shared by the profiler, the trainer and the report (JSONL, one row per rollout)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pivotrl.generation.engine import Completion
from pivotrl.trajectories.schema import Action
from pivotrl.verifiers.base import Verdict


@dataclass(frozen=True)
class Rollout:
    """One sampled action for one turn, with its verdict."""

    turn_id: str
    index: int  # k in profiling, g in training
    prompt_tokens: int
    completion: Completion
    action: Action
    verdict: Verdict

    def to_json(self) -> dict[str, Any]:
        c, v = self.completion, self.verdict
        return {
            "turn_id": self.turn_id,
            "index": self.index,
            "prompt_tokens": self.prompt_tokens,
            "token_ids": list(c.token_ids),
            "logprobs": list(c.logprobs),
            "finish_reason": c.finish_reason,
            "weight_version": c.weight_version,
            "cached_prompt_tokens": c.cached_prompt_tokens,
            "action": self.action.to_json(),
            "reward": v.reward,
            "reason": v.reason,
            "details": v.details,
        }

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Rollout:
        completion = Completion(
            tuple(row["token_ids"]),
            tuple(row["logprobs"]),
            row["finish_reason"],
            row["weight_version"],
            row.get("cached_prompt_tokens", 0),
        )
        verdict = Verdict(row["reward"], row["reason"], row.get("details", {}))
        action = Action.from_json(row["action"])
        return cls(row["turn_id"], row["index"], row["prompt_tokens"], completion, action, verdict)


@dataclass(frozen=True)
class TokenCounts:
    """What rollouts cost in turns and tokens. Addition sums every field."""

    rollouts: int = 0  # generated turns: the unit of the paper's comparison (method.md 3.3)
    prompt: int = 0  # tokens asked for, cached ones included; one prompt for each rollout
    cached: int = 0  # of these, served from the engine's prefix cache
    generated: int = 0

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(
            self.rollouts + other.rollouts,
            self.prompt + other.prompt,
            self.cached + other.cached,
            self.generated + other.generated,
        )

    @classmethod
    def of_completion(cls, prompt_tokens: int, completion: Completion) -> TokenCounts:
        return cls(1, prompt_tokens, completion.cached_prompt_tokens, len(completion.token_ids))

    @classmethod
    def of(cls, rollouts: Iterable[Rollout]) -> TokenCounts:
        return sum((cls.of_completion(r.prompt_tokens, r.completion) for r in rollouts), cls())

    def to_json(self) -> dict[str, int]:
        return asdict(self)


def read_rollouts(path: Path) -> Iterator[Rollout]:
    """Rollouts of a file, in order. A torn last line (a killed writer) is ignored: it was never committed."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield Rollout.from_json(json.loads(line))
