"""Groups of rollouts -> the sequences and the objective of one optimiser step. Pure but for tensors.

A rollout keeps everything of its own in one object and its group by id: nothing is found by strides or parallel lists,
so that leaving some out cannot mix them up (field report C7).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pivotrl.config import Algorithm
from pivotrl.local_rollouts import State
from pivotrl.policy.prefix_tree import TokenSequence
from pivotrl.profiling.statistics import vary
from pivotrl.rollouts import Rollout
from pivotrl.training.advantages import advantages
from pivotrl.training.objective import (
    DpoObjective,
    DpoTerms,
    FlatStreams,
    GrpoObjective,
    Preference,
    preferences,
    token_weights,
)
from pivotrl.training.replay import replayed
from pivotrl.training.surrogate import kl_terms


@dataclass(frozen=True)
class Scored:
    """One rollout with a reward. `group` numbers the draw of its state: a state drawn twice makes two groups."""

    id: str  # "turn id/index", as in rollouts.jsonl
    group: int
    sequence: TokenSequence
    logprobs: tuple[float, ...]  # of the generator, one a target
    reward: float
    fixed_advantage: float | None = None  # of an invalid action that is penalised
    masked: bool = False  # no loss and no place in the denominator; its reward stays in the group


@dataclass(frozen=True)
class Batch:
    rollouts: list[Scored]
    metrics: dict[str, float]


@dataclass(frozen=True)
class Sample:
    """One rollout that is trained on: `index` in the batch, its advantage, and the weight of each of its tokens."""

    index: int
    rollout: Scored
    advantage: float
    weight: float


def _group_metrics(groups: Sequence[Sequence[Rollout]]) -> dict[str, float]:
    rollouts = [r for group in groups for r in group]
    rewards = [[r.verdict.reward for r in group if r.verdict.reward is not None] for group in groups]
    scored = [group for group in rewards if group]
    flat = [r for group in scored for r in group]
    stds = [float(torch.tensor(group, dtype=torch.float64).std(correction=0)) for group in scored]
    count = len(rollouts)
    return {
        "reward": sum(flat) / len(flat) if flat else float("nan"),
        "group_std": sum(stds) / len(stds) if stds else float("nan"),
        "mixed_groups": sum(map(vary, scored)) / len(groups),
        "wrong_groups": sum(not any(group) for group in scored) / len(groups),
        "right_groups": sum(min(group) >= 1 for group in scored) / len(groups),
        "unscorable": sum(r.verdict.reward is None for r in rollouts) / count,
        "truncated": sum(_overlong(r) for r in rollouts) / count,
        "malformed": sum(bool(r.action.problems) for r in rollouts) / count,
        "broken_logprobs": float(sum(not _finite(r) for r in rollouts)),
        "completion_tokens": sum(len(r.completion.token_ids) for r in rollouts) / count,
    }


def _finite(rollout: Rollout) -> bool:
    return all(map(math.isfinite, rollout.completion.logprobs))


def _overlong(rollout: Rollout) -> bool:
    return rollout.completion.finish_reason == "length"


def make_batch(
    states: Sequence[State], groups: Sequence[Sequence[Rollout]], a: Algorithm, replay: bool = False
) -> Batch:
    """The scored rollouts of one step from `groups[i]`, those of `states[i]`, and metrics of all of them.

    Left out, of means and denominators too: unscorable rollouts, and those with a log-prob that is no number (counted
    as `broken_logprobs`; it is never filled in). `replay`: the sequences carry the experts that the engine chose.
    Raises UserError where it gave none.
    """
    found: list[Scored] = []
    for number, (state, group) in enumerate(zip(states, groups, strict=True)):
        for r in group:
            c, name = r.completion, f"{r.turn_id}/{r.index}"
            if len(c.logprobs) != len(c.token_ids):
                raise ValueError(f"{name}: {len(c.token_ids)} tokens but {len(c.logprobs)} log-probs")
            if r.verdict.reward is None or not _finite(r):
                continue
            invalid = bool(r.action.problems)
            masked = (a.overlong_filter and _overlong(r)) or (invalid and a.invalid_action == "mask")
            found.append(
                Scored(
                    id=name,
                    group=number,
                    sequence=TokenSequence.of(state.prompt_ids, c.token_ids, replayed(name, c, replay)),
                    logprobs=c.logprobs,
                    reward=r.verdict.reward,
                    fixed_advantage=a.invalid_advantage if invalid and a.invalid_action == "penalty" else None,
                    masked=masked or not c.token_ids,
                )
            )
    return Batch(found, _group_metrics(groups))


def minibatches(rollouts: Sequence[Scored], count: int, *seed: object) -> list[list[int]]:
    """Indices of the rollouts of each of `count` mini-batches: whole groups, dealt out in an order of the seed.

    One mini-batch is everything. A mini-batch may be empty where few groups were scored.
    """
    groups = sorted({r.group for r in rollouts})
    if count > 1:
        random.Random("/".join(map(str, seed))).shuffle(groups)
    place = {group: i % count for i, group in enumerate(groups)}
    parts: list[list[int]] = [[] for _ in range(count)]
    for i, r in enumerate(rollouts):
        parts[place[r.group]].append(i)
    return parts


def _uniform(rollouts: Sequence[Scored], indices: Sequence[int]) -> set[int]:
    """Groups whose rewards are all equal."""
    rewards: dict[int, set[float]] = {}
    for i in indices:
        rewards.setdefault(rollouts[i].group, set()).add(rollouts[i].reward)
    return {group for group, values in rewards.items() if len(values) == 1}


def make_samples(
    rollouts: Sequence[Scored],
    indices: Sequence[int],
    a: Algorithm,
    max_new_tokens: int,
    penalties: Sequence[float] | None = None,
) -> list[Sample]:
    """What one optimiser step trains on, of `rollouts[i] for i in indices`: whole groups.

    `penalties[i]` is taken off the reward of rollout i (KL in the reward). All rollouts but masked ones count in the
    denominator, those of all-equal groups too unless `drop_uniform_groups`. What has a zero gradient exactly
    (advantage 0 without a KL or entropy term, Proposition 3.1) counts without being computed.
    """
    members: dict[int, list[int]] = {}
    for i in indices:
        members.setdefault(rollouts[i].group, []).append(i)
    advantage: dict[int, float] = {}
    for rows in members.values():
        taken = None if penalties is None else [penalties[i] for i in rows]
        values = advantages([rollouts[i].reward for i in rows], a.advantage, a.std_epsilon, taken)
        for i, value in zip(rows, values, strict=True):
            fixed = rollouts[i].fixed_advantage
            assert value is not None  # every rollout here is scored
            advantage[i] = value if fixed is None else fixed
    dropped = _uniform(rollouts, indices) if a.drop_uniform_groups else set()
    kept = [i for i in indices if not rollouts[i].masked and rollouts[i].group not in dropped]
    if not kept:
        return []
    lengths, groups = [len(rollouts[i].sequence.targets) for i in kept], [rollouts[i].group for i in kept]
    weights = token_weights(lengths, a.aggregation, groups, max_new_tokens)
    everything = a.entropy_bonus > 0 or (a.kl_beta > 0 and a.kl_in == "loss")
    return [
        Sample(i, rollouts[i], advantage[i], weight)
        for i, weight in zip(kept, weights, strict=True)
        if everything or advantage[i] != 0.0
    ]


def kl_penalties(rollouts: Sequence[Scored], reference: Sequence[Tensor], beta: float, estimator: str) -> list[float]:
    """beta times the estimated KL to pi_0 of each rollout, summed over its tokens, under the policy that sampled."""
    return [
        beta * float(kl_terms(torch.tensor(r.logprobs), ref, estimator).sum())
        for r, ref in zip(rollouts, reference, strict=True)
    ]


def make_objective(
    samples: Sequence[Sample], a: Algorithm, old: Sequence[Tensor] | None, reference: Sequence[Tensor] | None
) -> GrpoObjective:
    """The objective over `samples`; `old` and `reference` are log-probs of the targets of every rollout of a batch."""
    return GrpoObjective(
        algorithm=a,
        streams=FlatStreams([len(s.rollout.logprobs) for s in samples]),
        advantages=torch.tensor([s.advantage for s in samples], dtype=torch.float32),
        weights=torch.tensor([s.weight for s in samples], dtype=torch.float32),
        generator=FlatStreams.flatten([s.rollout.logprobs for s in samples]),
        old=None if old is None else torch.cat([old[s.index] for s in samples]),
        reference=None if reference is None else torch.cat([reference[s.index] for s in samples]),
    )


def preference_samples(rollouts: Sequence[Scored], indices: Sequence[int]) -> tuple[list[Sample], list[Preference]]:
    """Rollouts that are in a DPO pair (masked ones are in none), and the pairs by place in that list."""
    usable = [i for i in indices if not rollouts[i].masked]
    pairs = preferences([rollouts[i].reward for i in usable], [rollouts[i].group for i in usable])
    places = sorted({p.winner for p in pairs} | {p.loser for p in pairs})
    number = {place: k for k, place in enumerate(places)}
    samples = [Sample(usable[place], rollouts[usable[place]], 0.0, 0.0) for place in places]
    return samples, [Preference(number[p.winner], number[p.loser], p.weight) for p in pairs]


def make_dpo_objective(
    samples: Sequence[Sample], terms: DpoTerms, old: Sequence[Tensor] | None, reference: Sequence[Tensor]
) -> DpoObjective:
    return DpoObjective(
        streams=FlatStreams([len(s.rollout.logprobs) for s in samples]),
        terms=terms,
        reference=torch.cat([reference[s.index] for s in samples]),
        generator=FlatStreams.flatten([s.rollout.logprobs for s in samples]),
        old=None if old is None else torch.cat([old[s.index] for s in samples]),
    )
