"""The paper's theory, watched while training: what profiling/theory.py says of the groups of a step. Pure Python."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from pivotrl.profiling import theory
from pivotrl.training.batch import Scored


def _groups(rollouts: Sequence[Scored]) -> list[list[int]]:
    members: dict[int, list[int]] = {}
    for i, r in enumerate(rollouts):
        members.setdefault(r.group, []).append(i)
    return list(members.values())


def _means(values: dict[str, list[float]]) -> dict[str, float]:
    return {name: fmean(found) for name, found in values.items() if found}


def group_theory(rollouts: Sequence[Scored]) -> dict[str, float]:
    """Means over the scored groups of a step; names without a value are absent.

    theory_signal_std: std of the reward, the size of the natural gradient (Theorem 3.2);
    theory_mixed_expected: share of mixed groups that the success rates predict (corollary of Proposition 3.1), to hold
    against `mixed_groups`; theory_accepted_mass: share of the policy's actions that the verifier accepts (Theorem 3.3).
    """
    found: dict[str, list[float]] = {
        "theory_signal_std": [],
        "theory_mixed_expected": [],
        "theory_accepted_mass": [],
    }
    for rows in _groups(rollouts):
        rewards, sampled = [rollouts[i].reward for i in rows], [1.0 / len(rows)] * len(rows)
        found["theory_signal_std"].append(theory.signal_std(sampled, rewards))
        mass = theory.accepted_mass(sampled, [r == 1.0 for r in rewards])
        found["theory_accepted_mass"].append(mass)
        found["theory_mixed_expected"].append(theory.informative_share(mass, len(rows)))
    return _means(found)


def reference_theory(rollouts: Sequence[Scored], reference: Sequence[float], kl_beta: float) -> dict[str, float]:
    """What pi_0's log-probs of the same actions add: `reference[i]` is that of the whole action of rollout i.

    theory_accepted_mass_start: pi_0(M), by self-normalised importance weights on the policy's samples;
    theory_accepted_mass_optimal: where Theorem 3.3 says that it goes (with a KL term only);
    theory_ratio_accepted, theory_ratio_other: correlation of log pi with log pi_0 over the distinct actions of a group
    that are accepted, and over the others. Theorem 3.3 predicts 1 for both.
    """
    found: dict[str, list[float]] = {
        "theory_accepted_mass_start": [],
        "theory_accepted_mass_optimal": [],
        "theory_ratio_accepted": [],
        "theory_ratio_other": [],
    }
    for rows in _groups(rollouts):
        trained = [math.fsum(rollouts[i].logprobs) for i in rows]
        start = [reference[i] for i in rows]
        accepted = [rollouts[i].reward == 1.0 for i in rows]
        top = max(s - t for s, t in zip(start, trained, strict=True))
        weights = [math.exp(s - t - top) for s, t in zip(start, trained, strict=True)]
        mass = theory.accepted_mass([w / math.fsum(weights) for w in weights], accepted)
        found["theory_accepted_mass_start"].append(mass)
        if kl_beta > 0:
            found["theory_accepted_mass_optimal"].append(theory.optimal_mass(mass, kl_beta))
        distinct = {rollouts[i].sequence.token_ids: k for k, i in enumerate(rows)}.values()
        inside, outside = theory.ratio_preservation(
            [trained[k] for k in distinct], [start[k] for k in distinct], [accepted[k] for k in distinct]
        )
        if inside is not None:
            found["theory_ratio_accepted"].append(inside)
        if outside is not None:
            found["theory_ratio_other"].append(outside)
    return _means(found)
