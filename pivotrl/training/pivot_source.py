"""Which pivots a step trains on, and their groups of rollouts: the draw, dynamic sampling, re-profiling.

All that a resumed run needs to go on as an uninterrupted one is `PivotSource.state()`, a small JSON value.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pivotrl.config import Config
from pivotrl.io import keeps_books
from pivotrl.local_rollouts import LocalRoller, State, seed_for
from pivotrl.profiling.ledger import Cost, CostLog
from pivotrl.profiling.statistics import vary
from pivotrl.rollouts import Rollout
from pivotrl.training.batch import Batch
from pivotrl.training.reprofile import Reprofiler, is_on, why_due
from pivotrl.training.sampling import EpochSampler

Groups = list[list[Rollout]]


class PivotSource:
    """Draws the pivots of each step from the set in force and rolls them out.

    `directory`/cost.jsonl is told what that costs: purposes "train" and "refill".
    """

    def __init__(self, pivots: Sequence[State], roller: LocalRoller, cfg: Config, run_dir: Path) -> None:
        self._cfg, self._roller = cfg, roller
        self._log = CostLog(run_dir / "train" / "cost.jsonl")
        self._reprofiler = Reprofiler(cfg, run_dir, roller.renderer, roller.verifier)
        self._set: int | None = None  # the step whose re-profile made the pivots in force; None: `pivotrl select`
        self._since = 0  # the step at which they came into force
        self._position = 0  # how many were drawn of them
        self._mixed: list[float] = []  # share of mixed groups of the last steps on them
        self._sampler = self._new_sampler(pivots)
        self.pivots = len(pivots)

    def state(self) -> dict[str, Any]:
        """What a checkpoint after a step must hold, for `restore`."""
        return {"set": self._set, "since": self._since, "position": self._position, "mixed": list(self._mixed)}

    def restore(self, state: dict[str, Any] | None, step: int) -> None:
        """Go on after `step` steps as the source whose `state()` this is; None: from the start."""
        self._reprofiler.forget_after(step)
        if state is None:
            return
        self._since, self._position, self._mixed = state["since"], state["position"], list(state["mixed"])
        if state["set"] is not None:
            self._put_in_force(state["set"])

    def renew(self, step: int) -> dict[str, float]:
        """Before a step: profile the turns again if that is due; returns metrics of it.

        Where no turn is a pivot any more, training goes on with the ones it has, and says so.
        """
        settings = self._cfg.algorithm.reprofile
        if not is_on(settings) or (why := why_due(settings, step - self._since, self._mixed)) is None:
            return {}
        self._roller.engine.forget()  # as after an interruption
        found = self._reprofiler.run(step, self._set, self._roller, why)
        text = f"{found['turns']} turns profiled again; {found['kept']} pivots, {found['entered']} of them new"
        if not found["kept"]:
            text += f". Going on with the former ones: {found['problem'].splitlines()[0]}"
        if keeps_books():
            print(f"train: step {step}: {why}: {text}", file=sys.stderr, flush=True)
        self._since, self._mixed = step, []
        if found["kept"]:
            self._position = 0
            self._put_in_force(step)
        names = ("turns", "rollouts", "kept", "entered", "left", "uninformative_share")
        return {f"reprofile_{name}": float(found[name]) for name in names} | {"seconds_reprofile": found["seconds"]}

    def sample(self, step: int) -> tuple[list[State], Groups]:
        """The pivots of a step and their groups.

        With dynamic sampling, groups of equal rewards call for further pivots, until as many as wanted are mixed or
        the submissions are used up; all that was sampled is returned.
        """
        a = self._cfg.algorithm
        drawn: list[State] = []
        groups: Groups = []
        for attempt in range(1 + a.dynamic_sampling):
            missing = a.pivots_per_step - sum(map(is_mixed, groups))
            if not missing:
                break
            more = self._sampler.take(self._position, missing)
            self._position += missing
            seeds = [seed_for(self._cfg.seed, "train", step, slot) for slot in range(len(drawn), len(drawn) + missing)]
            found, seconds = self._roller.timed_groups(more, a.group_size, seeds)
            self._log.add("refill" if attempt else "train", Cost.of((r for group in found for r in group), seconds))
            drawn += more
            groups += found
        self._mixed = [*self._mixed, sum(map(is_mixed, groups)) / len(groups)][-a.reprofile.window :]
        return drawn, groups

    def costs(self) -> dict[str, dict[str, float]]:
        """What was spent by purpose, interrupted attempts included."""
        spent = self._log.totals()
        for path in sorted(self._reprofiler.root.glob("step-*/sample/cost.jsonl")):
            again = sum(CostLog(path).totals().values(), Cost())
            spent["reprofile"] = spent.get("reprofile", Cost()) + again
        return {name: cost.to_json() for name, cost in spent.items()}

    def _put_in_force(self, step: int) -> None:
        self._set = step
        states = self._reprofiler.states_of(self._reprofiler.pivot_ids(step))
        self._sampler, self.pivots = self._new_sampler(states), len(states)

    def _new_sampler(self, states: Sequence[State]) -> EpochSampler:
        self.states = states  # that are drawn from
        seed = self._cfg.seed if self._set is None else seed_for(self._cfg.seed, "pivots", self._set)
        return EpochSampler(states, self._cfg.algorithm.pivots_per_step, seed)


def is_mixed(group: Sequence[Rollout]) -> bool:
    """Whether the rewards of the scored rollouts differ."""
    return vary([r.verdict.reward for r in group if r.verdict.reward is not None])


def keep_mixed(batch: Batch, drawn: int) -> Batch:
    """The batch without its groups of equal rewards; metrics stay those of all `drawn` groups, and tell both counts."""
    rewards: dict[int, set[float]] = {}
    for r in batch.rollouts:
        rewards.setdefault(r.group, set()).add(r.reward)
    kept = [r for r in batch.rollouts if vary(rewards[r.group])]
    groups = {"groups_drawn": float(drawn), "groups_trained": float(len({r.group for r in kept}))}
    return Batch(kept, batch.metrics | groups)
