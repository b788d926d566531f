"""What a stage's folder remembers: with which configuration, inputs and upstream results it was made.

`<run_dir>/<stage>/stage.json` is written before the stage starts, `summary.json` last. A folder with both is done; one
with only the first was killed and can be continued; one whose record differs from now is stale.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pivotrl import __version__
from pivotrl.config import Config
from pivotrl.configuration import differences, save_resolved, subset, upgraded
from pivotrl.errors import UserError
from pivotrl.io import write_json
from pivotrl.profiling.shards import Shard, parse_shard
from pivotrl.stages import STAGES, optimizer_section
from pivotrl.state_folder import StateFolder
from pivotrl.validation import get

RECORD = "stage.json"
SUMMARY = "summary.json"
_BOOKS = (RECORD, "config.yaml", "shards")  # shards of a profile have records of their own
_STEPS = {
    "train": ("algorithm.steps",),
    "e2e": ("end_to_end.steps",),
    "warmup": ("warmup.steps",),
    "sft": ("sft.steps", "algorithm.steps"),
}
# How the work is laid out, not what it is: results agree up to rounding.
_LAYOUT = ("parallel.", "generation.tensor_parallel", "generation.expert_parallel", "generation.enforce_eager")
_VOLATILE = ("seconds", "elapsed", "started", "finished")  # of a summary: the same result may take another time


def place_of(cfg: Config, stage: str) -> str:
    """The stage's folder, relative to the run's. Shards of a profile, and benchmarks, have one each."""
    if stage == "evaluate" and cfg.benchmark.name is not None:
        return benchmark_place(cfg)
    shard = parse_shard(cfg.profile.shard) if stage == "profile" else None
    return f"profile/{shard.folder}" if isinstance(shard, Shard) else STAGES[stage].folder


def benchmark_place(cfg: Config) -> str:
    """Where a benchmark's run lies, beside the run's own evaluation."""
    return f"benchmarks/{cfg.benchmark.name}-{cfg.benchmark.policy}"


def record_of(cfg: Config, stage: str, run_dir: Path) -> dict[str, Any]:
    """The record of `stage` as it would start now."""
    spec = STAGES[stage]
    record: dict[str, Any] = {
        "stage": stage,
        "config": {"pivotrl": __version__, **subset(cfg, stage)},
        "inputs": {key: _fingerprint(get(cfg, key)) for key in spec.inputs},
        "upstream": {up: _result_hash(run_dir / STAGES[up].folder) for up in spec.upstream},
    }
    return {**record, "key": hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()}


def read_record(directory: Path) -> dict[str, Any] | None:
    """The record of a stage folder, or None."""
    try:
        record = json.loads((directory / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def is_done(directory: Path) -> bool:
    return (directory / SUMMARY).is_file()


def up_to_date(cfg: Config, stage: str) -> bool:
    """Whether the stage's folder is finished and still that of this configuration."""
    run_dir = Path(cfg.run_dir)
    directory = run_dir / place_of(cfg, stage)
    return is_done(directory) and not why_stale(cfg, directory, record_of(cfg, stage, run_dir))


def why_stale(cfg: Config, directory: Path, record: dict[str, Any]) -> list[str]:
    """`changes`, of which those that an upgrade of PivotRL brings count as `run.accept_upgrade` says.

    Raises UserError where there are only such and the key is not set: neither to make hours of work again nor to mix
    two versions in one result is decided for the user.
    """
    why = changes(directory, record, accept_upgrade=bool(cfg.run.accept_upgrade))
    if why and cfg.run.accept_upgrade is None and not changes(directory, record, accept_upgrade=True):
        listed = "\n".join(f"  {line}" for line in why)
        raise UserError(
            f"{directory} was made by another version of PivotRL; nothing else differs:\n{listed}\n"
            "run.accept_upgrade=true keeps it and goes on with it; run.accept_upgrade=false makes it again, as after "
            "any other change."
        )
    return why


def changes(directory: Path, record: dict[str, Any], accept_upgrade: bool = False) -> list[str]:
    """Why the content of `directory` is not that of `record`; empty when it is (or when there is no content)."""
    if not directory.is_dir() or all(p.name in _BOOKS for p in directory.iterdir()):
        return []  # an attempt that failed before it made anything binds nobody
    old = read_record(directory)
    if old is None:
        return ["it does not say with which configuration it was made (no stage.json)"]
    if old.get("key") == record["key"]:
        return []
    stage, done, config = record["stage"], StateFolder(directory).committed(), old.get("config", {})
    if accept_upgrade:
        config = upgraded(config, record["config"])
    if stage in _STEPS and done and not is_done(directory):
        lines = hindrances(config, record["config"], stage, done[-1])
        if not lines and all(old.get(part) == record[part] for part in ("inputs", "upstream")):
            return []
    else:
        lines = differences(config, record["config"])
    lines += [f"the files of {k} changed" for k, v in record["inputs"].items() if old.get("inputs", {}).get(k) != v]
    ups = record["upstream"].items()
    lines += [f"the result of {k} changed" for k, v in ups if old.get("upstream", {}).get(k) != v]
    return lines or ([] if accept_upgrade else ["its record differs"])


def hindrances(old: Mapping[str, Any], new: Mapping[str, Any], stage: str, done: int) -> list[str]:
    """Differences "key: old -> new" with which training that has `done` steps behind it cannot go on.

    The layout over processes and micro-batches may change (checkpoints know none; results agree up to rounding), and
    so may the number of steps that are ahead, where the learning rate of those behind does not depend on it.
    """
    keys, section = _STEPS[stage], optimizer_section(stage)
    planned = next((new[k] for k in keys if new.get(k) is not None), None)
    free: tuple[str, ...] = (*_LAYOUT, f"{section}.optimizer.tokens_per_microbatch")
    if new.get(f"{section}.optimizer.schedule") == "constant" and planned is not None and planned >= done:
        free += keys
    lines = differences(
        {k: v for k, v in old.items() if not k.startswith(free)},
        {k: v for k, v in new.items() if not k.startswith(free)},
    )
    if planned is not None and planned < done:
        lines = [f"{line} ({done} steps are done)" if line.startswith(keys) else line for line in lines]
    return lines


def begin(cfg: Config, directory: Path, record: dict[str, Any]) -> None:
    """Note, before a stage starts, what it starts with. A finished stage becomes unfinished."""
    (directory / SUMMARY).unlink(missing_ok=True)
    save_resolved(cfg, directory)
    write_json(directory / RECORD, record)


def set_aside(run_dir: Path, place: str) -> Path:
    """Move a stale folder (`place_of`) to `<run_dir>/superseded/`, where nothing reads it; returns its new place."""
    folder = run_dir / "superseded"
    folder.mkdir(parents=True, exist_ok=True)
    number = 1
    while (target := folder / f"{place.replace('/', '-')}-{number}").exists():
        number += 1
    (run_dir / place).rename(target)
    return target


def _result_hash(directory: Path) -> str | None:
    """What a stage made, and from what: two checkpoints of different learning rates can have the same summary."""
    try:
        summary = json.loads((directory / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    made = [(read_record(directory) or {}).get("key"), _lasting(summary)]
    return hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()


def _lasting(value: Any) -> Any:
    """`value` without what differs between two runs of the same thing."""
    if isinstance(value, dict):
        return {k: _lasting(v) for k, v in value.items() if k not in _VOLATILE}
    return [_lasting(v) for v in value] if isinstance(value, list) else value


def _fingerprint(path: str | None) -> list[list[Any]] | None:
    """Name, size and time of change of every file that `path` (file, folder, glob) means; None for no path on disk."""
    if path is None or path.startswith("builtin:"):
        return None
    files: list[str] = []
    for match in sorted(glob.glob(path)):
        if os.path.isdir(match):
            files += sorted(str(p) for p in Path(match).rglob("*") if p.is_file())
        else:
            files.append(match)
    return [[f, os.stat(f).st_size, os.stat(f).st_mtime_ns] for f in files]
