"""Preflight of the run directory: write access, room and quota for the checkpoints, a place that every node sees."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch import memory
from launch.model_files import raw_config
from pivotrl.config import Config
from pivotrl.errors import UserError
from pivotrl.stages import STAGES

FEW_FILES = 10_000  # of a run: rollouts, logs and checkpoints of some hundred ranks
_LOCAL_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/run")
_FREE_MARGIN_GIB = 1.0
_QUOTA_SECONDS = 5
# "FILESYSTEM used soft hard grace files soft hard grace", of `quota -w -p` and `lfs quota -q` alike; KiB
_QUOTA = re.compile(r"^\s*\S+\s+(\d+)\*?\s+(\d+)\s+(\d+)\s+\S+\s+(\d+)\*?\s+(\d+)\s+(\d+)\s+\S+\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Room:
    """What is left to this user; None: no limit is known."""

    gib: float | None
    files: int | None


def storage(cfg: Config, run_dir: Path, stages: Sequence[str]) -> Iterator[str]:
    """Write access, room for the checkpoints, and a place that every node sees."""
    parent = next(p for p in (run_dir, *run_dir.parents) if p.exists())
    if not parent.is_dir():
        yield f"run_dir={run_dir}: {parent} is a file; choose another run_dir"
        return
    try:
        with tempfile.NamedTemporaryFile(dir=parent, prefix=".pivotrl-preflight-"):
            pass
    except OSError as error:
        yield f"run_dir={run_dir}: cannot write in {parent} ({error.strerror}); choose another run_dir or mend it"
        return
    if what := _needs(cfg, run_dir, stages):
        gib, text = what
        for room, whose in ((_disk(parent), "free"), (quota(parent), "left of your quota")):
            if room.gib is not None and gib > room.gib:
                remedy = "free space, or choose another run_dir"
                yield f"run_dir={run_dir}: {room.gib:.1f} GiB {whose}, {gib:.1f} needed ({text}): {remedy}"
            if room.files is not None and room.files < FEW_FILES:
                yield (
                    f"run_dir={run_dir}: {room.files} files {whose}, a run needs up to {FEW_FILES}: delete files, "
                    "or choose another run_dir"
                )
    if cfg.cluster.nodes > 1 and str(run_dir).startswith("/dev/shm"):
        yield f"run_dir={run_dir} is in one node's memory; {cfg.cluster.nodes} nodes need a shared file system"
    elif cfg.cluster.nodes > 1 and any(str(run_dir).startswith(f + "/") for f in _LOCAL_FOLDERS):
        print(f"note: run_dir={run_dir} is local to a node on most clusters; the node check of the job tells")


def _needs(cfg: Config, run_dir: Path, stages: Sequence[str]) -> tuple[float, str] | None:
    """GiB that the checkpoints of `stages` take, and what they are; None where the model's size is not known."""
    raw = raw_config(cfg)
    if raw is None:
        return None
    try:
        each = memory.checkpoint_gib(memory.read_model(raw.get("text_config", raw)), cfg)
    except UserError:
        return None
    count = sum(STAGES[s].policy and not (run_dir / s / "checkpoint").exists() for s in stages)
    if not count:
        return _FREE_MARGIN_GIB, "logs and rollouts"
    # a checkpoint is written whole beside the one that it replaces
    needed = (count + 1) * each + _FREE_MARGIN_GIB
    return needed, f"{count} checkpoints of {each:.1f} GiB, one more while it is written"


def _disk(folder: Path) -> Room:
    inodes = os.statvfs(folder)
    files = inodes.f_favail if inodes.f_files else None  # btrfs and many network file systems count none
    return Room(shutil.disk_usage(folder).free / memory.GIB, files)


def quota(folder: Path) -> Room:
    """What this user's quota leaves where `folder` is, by the file system's own tool; nothing where it has none."""
    mount, kind = mount_of(folder, Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace"))
    user = str(os.getuid())
    command = ["lfs", "quota", "-q", "-u", user, mount] if kind == "lustre" else ["quota", "-w", "-p", "-f", mount]
    if shutil.which(command[0]) is None:
        return Room(None, None)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_QUOTA_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return Room(None, None)
    return parse_quota(done.stdout)


def mount_of(folder: Path, mounts: str) -> tuple[str, str]:
    """Mount point and type of the file system of `folder`, from the text of /proc/self/mounts."""
    best, real = ("/", ""), os.path.realpath(folder)
    for line in mounts.splitlines():
        words = line.split()
        if len(words) < 3:
            continue
        point = words[1].replace("\\040", " ")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best[0]):
            best = (point, words[2])
    return best


def parse_quota(text: str) -> Room:
    """What is left of the tightest limit in what `quota -w -p` or `lfs quota -q` print (0 means: no limit)."""
    gib: list[float] = []
    files: list[int] = []
    for row in _QUOTA.findall(text):
        used, soft, hard, count, files_soft, files_hard = map(int, row)
        gib += [max(limit - used, 0) / 2**20 for limit in (soft, hard) if limit]
        files += [max(limit - count, 0) for limit in (files_soft, files_hard) if limit]
    return Room(min(gib, default=None), min(files, default=None))
