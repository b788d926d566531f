"""`pivotrl preflight`: everything that can be known before queueing, in one list. Seconds, no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launch import checks, render
from launch.jobs import Job, stages_of, world_size
from launch.model_files import ModelFiles
from launch.profiles import profile_belongs
from launch.storage import storage
from pivotrl.config import Config
from pivotrl.validation import conflicts


def problems(cfg: Config, jobs: Sequence[Job], overrides: Sequence[str] = ()) -> list[str]:
    """Every problem of submitting `jobs` with this configuration, each with what to do; empty: all is well."""
    stages, run_dir, world = stages_of(jobs), Path(cfg.run_dir), world_size(cfg)
    found = list(render.conflicts(cfg))
    broken_cluster = bool(found)
    for stage in stages:
        found += conflicts(cfg, stage, world, cuda=cfg.cluster.gpus_per_node > 0)
    found += checks.unsupported(cfg, stages)
    model = ModelFiles(cfg, run_dir)
    found += model.problems()
    found += checks.verifier(cfg)
    found += checks.fits_memory(cfg, stages)
    found += model.turns_fit()
    found += profile_belongs(cfg, run_dir, stages, model)
    found += checks.results_continue(cfg, run_dir, stages)
    found += checks.policies_exist(cfg, run_dir, stages)
    found += storage(cfg, run_dir, stages)
    found += checks.environment(cfg)
    if not broken_cluster:
        found += checks.scheduler(cfg, jobs, overrides)
    return list(dict.fromkeys(found))
