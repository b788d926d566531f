"""The table of stages: what each one is, reads, writes and depends on. Imports no stage."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pivotrl.config import Config

StageFunction = Callable[[Config, Path], Mapping[str, Any]]

ROLLOUT_STAGES = ("train", "e2e")  # train with an engine beside them, with the loss and optimizer of `algorithm`
# Memory and overlap of a training step; a run that has died of one of them goes on with another value.
_HOW_TO_STEP = ("recompute", "cpu_offload", "overlap_grad_reduce", "overlap_param_gather", "max_nonfinite_steps")
# Keys that never change what a stage computes, so that a resumed run may change them. (`watch`: see `subset`.)
BENIGN_KEYS = (
    *(f"{section}.optimizer.{key}" for section in ("algorithm", "warmup", "sft") for key in _HOW_TO_STEP),
    "run_dir",
    "run",
    "tracking",
    "checkpoint",
    "cluster",
    "generation.server",  # it draws the same samples, and is at another address in every job
    "generation.weight_transfer",
    "generation.max_sequences",
    "generation.kv_cache_gib",
    "generation.gpu_memory_utilization",
    "generation.verify_refit",
    "generation.verify_every",
    "generation.max_mismatch",
    "profile.shard",
    "domain.verifier.workers",
    "domain.verifier.timeout_seconds",
)


@dataclass(frozen=True)
class Stage:
    """One step of the pipeline. It writes `<run_dir>/<folder>/`, its `summary.json` last."""

    name: str
    module: str
    function: str
    summary: str
    reads: str
    writes: str
    overrides: tuple[str, ...]  # for the help: the keys that matter most
    example: str
    config: tuple[str, ...]  # dotted keys whose values change the result
    upstream: tuple[str, ...] = ()  # stages whose result it reads
    inputs: tuple[str, ...] = ()  # keys that name files whose content matters
    policy: bool = False  # runs the megatron-core policy, so the parallel layout must fit
    place: str = ""  # the folder, where it is not the name

    @property
    def folder(self) -> str:
        """The stage's folder, relative to the run's."""
        return self.place or self.name

    @property
    def parallel(self) -> bool:
        """Whether the stage has work for every process: the trainer's and the engine's have."""
        return self.policy or "generation" in self.config

    def load(self) -> StageFunction:
        """Import the stage's function (this is where torch and the engines come in)."""
        function: StageFunction = getattr(importlib.import_module(self.module), self.function)
        return function


_ENGINE = ("seed", "model", "domain", "sampling", "generation", "precision")
_POLICY = ("seed", "model", "domain", "parallel", "precision", "experts")

_STAGES = (
    Stage(
        "turns",
        "pivotrl.turns_stage",
        "run_turns",
        "Read trajectories, split them by task and cut them into turns (D_cand).",
        "trajectories.path (file, folder or glob); without one, the expert of environment.name makes them",
        "turns/turns.jsonl, turns/messages.jsonl (their states), turns/skipped.jsonl (what was left out, and why), "
        "turns/summary.json",
        ("trajectories.path", "trajectories.format", "trajectories.warmup_fraction", "domain=..."),
        "pivotrl turns trajectories.path=data/airline.jsonl run_dir=runs/airline",
        ("seed", "trajectories", "environment", "domain", "model"),
        inputs=("trajectories.path",),
    ),
    Stage(
        "audit-verifier",
        "pivotrl.audit_stage",
        "run_audit",
        "Measure the verifier on the turns before any GPU: what it wrongly rejects or accepts, which exploits pay.",
        "turns/turns.jsonl; trajectories.path (or environment.name) where the run has no turns yet",
        "audit/summary.json (rates, counts by mutation), audit/examples.jsonl (wrong verdicts)",
        ("domain=...", "domain.verifier.name", "domain.verifier.options", "audit.truth", "audit.max_turns"),
        "pivotrl audit-verifier domain=tau2 trajectories.path=data/airline.jsonl run_dir=runs/airline",
        ("seed", "domain", "environment.name", "audit"),
        ("turns",),
        place="audit",
    ),
    Stage(
        "warmup",
        "pivotrl.training.sft",
        "run_warmup",
        "A short SFT on the warm-up split, so that pi_0 knows the action format.",
        "turns/turns.jsonl (split warmup), model.path",
        "warmup/checkpoint, warmup/metrics.jsonl, warmup/summary.json",
        ("warmup.steps", "warmup.optimizer.learning_rate", "model=..."),
        "pivotrl warmup warmup.steps=30 run_dir=runs/airline",
        (*_POLICY, "warmup"),
        ("turns",),
        ("model.path",),
        policy=True,
    ),
    Stage(
        "profile",
        "pivotrl.profiling.stage",
        "run_profile",
        "Sample K actions of pi_0 for every turn and score them: mean and variance of the reward.",
        "turns/turns.jsonl (split train), the warm-up checkpoint or model.path",
        "profile/rollouts.jsonl (resumable), profile/turns.jsonl, profile/summary.json",
        (
            "profile.rollouts_per_turn",
            "profile.max_turns",
            "profile.adaptive.enabled",
            "profile.from_rows",
            "profile.shard",
            "sampling.temperature",
        ),
        "pivotrl profile profile.rollouts_per_turn=16 run_dir=runs/airline",
        (*_ENGINE, "profile"),
        ("turns", "warmup"),
        ("model.path",),
    ),
    Stage(
        "select",
        "pivotrl.profiling.select",
        "run_select",
        "Keep the pivots: turns of mixed outcome whose mean reward is low (D_adv).",
        "profile/turns.jsonl",
        "select/pivots.jsonl, select/summary.json",
        (
            "select.set",
            "select.lambda_diff",
            "select.action_floor",
            "select.domains",
            "select.tags",
            "select.max_per_trajectory",
            "select.mixture",
            "select.max_pivots",
        ),
        "pivotrl select select.lambda_diff=0.7 run_dir=runs/airline",
        ("seed", "select"),
        ("turns", "profile"),
    ),
    Stage(
        "train",
        "pivotrl.training.grpo",
        "run_train",
        "PivotRL: GRPO on the pivots, one generated turn a rollout.",
        "select/pivots.jsonl, turns/turns.jsonl, the warm-up checkpoint or model.path",
        "train/checkpoint, train/{rollouts,groups,metrics}.jsonl, train/reprofile/ (where on), train/summary.json",
        (
            "algorithm=...",
            "algorithm.steps",
            "algorithm.pivots_per_step",
            "algorithm.group_size",
            "algorithm.reprofile.every_steps",
            "algorithm.dynamic_sampling",
            "parallel=...",
        ),
        "pivotrl train algorithm.steps=100 algorithm.group_size=16 run_dir=runs/airline",
        (*_ENGINE, "parallel", "algorithm", "profile", "watch"),
        ("turns", "warmup", "profile", "select"),
        ("model.path",),
        policy=True,
    ),
    Stage(
        "sft",
        "pivotrl.training.sft",
        "run_sft",
        "The baseline: supervised fine-tuning on the same trajectories.",
        "turns/turns.jsonl (split train), the warm-up checkpoint or model.path",
        "sft/checkpoint, sft/metrics.jsonl, sft/summary.json",
        ("sft.steps", "sft.trajectories_per_step", "sft.optimizer.learning_rate"),
        "pivotrl sft sft.steps=100 run_dir=runs/airline",
        (*_POLICY, "sft", "algorithm.steps"),
        ("turns", "warmup"),
        ("model.path",),
        policy=True,
    ),
    Stage(
        "e2e",
        "pivotrl.training.end_to_end",
        "run_end_to_end",
        "The baseline: GRPO on whole episodes in the environment, rewarded by their success.",
        "turns/turns.jsonl (its train tasks), environment.name, the warm-up checkpoint or model.path",
        "e2e/checkpoint, e2e/episodes.jsonl, e2e/metrics.jsonl, e2e/summary.json",
        ("end_to_end.steps", "end_to_end.tasks_per_step", "end_to_end.group_size", "algorithm=..."),
        "pivotrl e2e end_to_end.steps=100 domain=outfitters run_dir=runs/demo",
        (*_ENGINE, "parallel", "environment", "algorithm", "end_to_end", "watch"),
        ("turns", "warmup"),
        ("model.path",),
        policy=True,
    ),
    Stage(
        "evaluate",
        "pivotrl.evaluation.stage",
        "run_evaluate",
        "Success in the domain and retention outside it, for each policy, with confidence intervals.",
        "the checkpoints of warmup, train, sft and e2e; environment tasks or held-out turns; evaluate.ood_path",
        "evaluate/summary.json",
        (
            "evaluate.tasks",
            "evaluate.split",
            "evaluate.trials",
            "evaluate.ood_path",
            "evaluate.policies",
            "benchmark=...",
        ),
        "pivotrl evaluate evaluate.tasks=100 evaluate.ood_path=hellaswag.jsonl run_dir=runs/airline",
        (*_ENGINE, "environment", "evaluate", "benchmark"),
        ("turns", "warmup", "train", "sft", "e2e"),
        ("model.path", "evaluate.ood_path"),
    ),
    Stage(
        "report",
        "pivotrl.tracking.report",
        "run_report",
        "One HTML file with the pivots, the curves, the results and what they cost.",
        "whatever the other stages have written",
        "report/report.html, report/summary.json",
        ("run_dir",),
        "pivotrl report run_dir=runs/airline",
        (),
        ("turns", "audit-verifier", "warmup", "profile", "select", "train", "sft", "e2e", "evaluate"),
    ),
)

STAGES: dict[str, Stage] = {stage.name: stage for stage in _STAGES}


def optimizer_section(stage: str) -> str:
    """The section of the configuration that holds the optimizer of a stage that trains."""
    return "algorithm" if stage in ROLLOUT_STAGES else stage
