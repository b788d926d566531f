"""Preflight of training on a profile that is there already: whether it belongs to this policy and these settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from launch.model_files import ModelFiles
from pivotrl import stage_state
from pivotrl.config import Config
from pivotrl.errors import UserError
from pivotrl.io import read_json

_REMEDY = "profile again, or set algorithm.allow_foreign_profile=true"


def profile_belongs(cfg: Config, run_dir: Path, stages: Sequence[str], model: ModelFiles) -> Iterator[str]:
    """Training without profiling first: pivots must be there, and the parts of the fingerprint that are cheap to know.

    Weights and turns are hashed by the training itself; here their files' sizes and times give a note at most.
    """
    if "train" not in stages or "profile" in stages:
        return
    summary, pivots = run_dir / "profile" / "summary.json", run_dir / "select" / "pivots.jsonl"
    if not summary.is_file():
        yield f"{summary} does not exist: run the job `profile` first (or stage profile)"
        return
    if not pivots.is_file() or pivots.stat().st_size == 0:
        yield f"{pivots} has no pivots: run `pivotrl select`, with a higher select.lambda_diff or another select.set"
    try:
        record = read_json(summary)["fingerprint"]
        sampling, verifier = dict(record["sampling"]), dict(record["verifier"])
    except (ValueError, KeyError, TypeError):
        yield f"{summary} holds no fingerprint: profile again"
        return
    if cfg.algorithm.allow_foreign_profile:
        return
    s = cfg.sampling
    now = {"temperature": s.temperature, "top_p": s.top_p, "top_k": s.top_k, "max_new_tokens": s.max_new_tokens}
    for key, value in now.items():
        if sampling.get(key) != value:
            yield f"sampling.{key}={value}, but the profile was made with {sampling.get(key)}: {_REMEDY}"
    yield from _verifier(cfg, verifier)
    if model.renderer is not None and record.get("template") not in (None, model.renderer.fingerprint()):
        yield f"the chat template, tokenizer or domain.action_format is not that of the profile: {_REMEDY}"
    if changed := _changed_files(cfg, run_dir):
        print(f"note: since the profile, {changed} changed; training compares the contents before its first step")


def _verifier(cfg: Config, known: dict[str, Any]) -> Iterator[str]:
    from pivotrl.verifiers.registry import get_verifier

    name = cfg.domain.verifier.name
    if known.get("name") != name:
        yield f"domain.verifier.name={name}, but the profile was scored by {known.get('name')}: {_REMEDY}"
        return
    try:
        now = get_verifier(cfg.domain.verifier)
    except UserError:
        return  # `checks.verifier` tells it
    for key, value in (("version", now.version), ("config", now.config())):
        if known.get(key) != value:
            yield f"the {key} of the verifier {name} is {value}, that of the profile {known.get(key)}: {_REMEDY}"


def _changed_files(cfg: Config, run_dir: Path) -> str:
    old = stage_state.read_record(run_dir / "profile")
    if old is None:
        return ""
    new = stage_state.record_of(cfg, "profile", run_dir)
    found = [f"the files of {k}" for k, v in new["inputs"].items() if old.get("inputs", {}).get(k) != v]
    found += [f"the result of {k}" for k, v in new["upstream"].items() if old.get("upstream", {}).get(k) != v]
    return " and ".join(found)
