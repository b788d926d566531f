"""One rollout file format, shared by the profiler, the trainer and the report (JSONL, one row per rollout)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
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


def read_rollouts(path: Path) -> Iterator[Rollout]:
    """Rollouts of a file, in order. A torn last line (a killed writer) is ignored: it was never committed."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield Rollout.from_json(json.loads(line))
