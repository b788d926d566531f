"""The arms of the study: what each one trains, from the same trajectories, warm-up and profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pivotrl.errors import UserError
from pivotrl.strict import suggestion


@dataclass(frozen=True)
class Arm:
    """`stages` run in the arm's folder, with `overrides`; then its policy is evaluated."""

    name: str
    title: str
    policy: str  # of evaluate.policies
    stages: tuple[str, ...] = ()  # before evaluate
    overrides: tuple[str, ...] = ()
    profiled: bool = False  # whether its pivots need the profile: its rollouts are then part of the budget
    own_profile: bool = False  # profiles for itself instead of using the shared one
    matches: str | None = None  # the arm at whose KL to pi_0 this one stops
    color: str = "#7b8494"


def _pivot(name: str, title: str, *overrides: str, profiled: bool = True, color: str = "#7b8494") -> Arm:
    return Arm(name, title, "pivotrl", ("select", "train"), overrides, profiled, color=color)


_ARMS = (
    Arm("base", "Base (pi_0)", "base"),
    Arm("sft", "SFT", "sft", ("sft",), color="#c77d1e"),
    Arm("sft_kl", "SFT, stopped at PivotRL's KL", "sft", ("sft",), matches="adv", color="#e0b070"),
    _pivot("naive", "random turns, strict", "select.set=cand", "algorithm.reward=strict", profiled=False),
    _pivot("cand", "random turns, functional", "select.set=cand", profiled=False, color="#3b6fd4"),
    _pivot("mixed", "mixed turns, functional", "select.set=mixed", color="#5fb3a8"),
    _pivot("adv", "PivotRL (adv, functional)", "select.set=adv", color="#0f8a7e"),
    _pivot(
        "adv_best",
        "PivotRL, best watched step",
        "select.set=adv",
        "watch.export_best=true",
        color="#12b5a5",
    ),
    _pivot("adv_floor", "PivotRL, scarce actions kept", "select.set=adv", "select.action_floor=0.5", color="#4f8f3a"),
    _pivot("adv_strict", "adv, strict", "select.set=adv", "algorithm.reward=strict", color="#b04a6a"),
    _pivot(
        "adv_reprofiled",
        "PivotRL, profiled again every 10 steps",
        "select.set=adv",
        "algorithm.reprofile.every_steps=10",
        "algorithm.reprofile.turns=80",
        color="#2f5d50",
    ),
    Arm(
        "adv_long",
        "PivotRL, pivots of 480 turns, 90 steps",
        "pivotrl",
        ("profile", "select", "train"),
        ("select.set=adv", "profile.max_turns=480", "algorithm.steps=90"),
        profiled=True,
        own_profile=True,
        color="#7fa32b",
    ),
    _pivot("dapo", "DAPO filtering, equal rollouts", "select.set=cand", "algorithm=dapo", profiled=False),
    Arm("e2e", "end-to-end RL", "e2e", ("e2e",), color="#8a4fbf"),
)
# One setting of adv changed at a time. Choices among them are made on validation tasks (--split validation).
_SWEEPS = (
    _pivot("adv_lambda_03", "lambda 0.3", "select.set=adv", "select.lambda_diff=0.3"),
    _pivot("adv_lambda_09", "lambda 0.9", "select.set=adv", "select.lambda_diff=0.9"),
    _pivot("adv_beta_001", "beta 0.01", "select.set=adv", "algorithm.kl_beta=0.01"),
    _pivot("adv_beta_01", "beta 0.1", "select.set=adv", "algorithm.kl_beta=0.1"),
    _pivot("adv_decay", "rate to zero", "select.set=adv", "algorithm.optimizer.schedule=linear"),
    _pivot("adv_group_4", "G 4", "select.set=adv", "algorithm.group_size=4", "algorithm.pivots_per_step=16"),
    _pivot("adv_group_16", "G 16", "select.set=adv", "algorithm.group_size=16", "algorithm.pivots_per_step=4"),
    Arm(
        "adv_k_4",
        "K 4",
        "pivotrl",
        ("profile", "select", "train"),
        ("select.set=adv", "profile.rollouts_per_turn=4"),
        profiled=True,
        own_profile=True,
    ),
)
ARMS: dict[str, Arm] = {arm.name: arm for arm in (*_ARMS, *_SWEEPS)}
MAIN = tuple(arm.name for arm in _ARMS)
SWEEPS = tuple(arm.name for arm in _SWEEPS)


def chosen(names: Sequence[str]) -> list[Arm]:
    """The arms of `names` ("main" and "sweeps" name those groups), an arm that another one needs before it.

    Raises UserError for an unknown name.
    """
    wanted: list[str] = []
    for name in names:
        wanted += MAIN if name == "main" else SWEEPS if name == "sweeps" else [name]
    for name in wanted:
        if name not in ARMS:
            known = [*ARMS, "main", "sweeps"]
            raise UserError(f"no arm {name!r}.{suggestion(name, known)} There are: {', '.join(known)}")
    result: dict[str, Arm] = {}
    for name in wanted:
        if (needed := ARMS[name].matches) is not None:
            result[needed] = ARMS[needed]
        result[name] = ARMS[name]
    return sorted(result.values(), key=lambda arm: arm.matches is not None)
