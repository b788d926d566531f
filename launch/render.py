"""The sbatch script of a job, from the typed configuration. slurm/*.sh run the same body (launch/job.sh). Pure."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.jobs import Job, processes_per_node
from pivotrl.config import Config

BODY = Path(__file__).with_name("job.sh")
ROOT = Path(__file__).resolve().parent.parent  # a checkout, or site-packages
_TIME = re.compile(r"(\d+-)?\d+(:\d{1,2}){0,2}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$")
_WORDS = ("partition", "account", "qos", "constraint", "reservation")


def conflicts(cfg: Config) -> list[str]:
    """What is wrong with `cluster` itself, so that no script with it can work (or would show a secret)."""
    c, found = cfg.cluster, []
    found += [
        f"cluster.{word}={value!r} has white space or quotes; SLURM names have none"
        for word in _WORDS
        if (value := getattr(c, word)) is not None and not re.fullmatch(r"[^\s'\"`$\\]+", value)
    ]
    if not _TIME.fullmatch(c.time_limit):
        found.append(f"cluster.time_limit={c.time_limit!r}: write D-HH:MM:SS, HH:MM:SS or minutes")
    if c.container.kind != "none" and not c.container.image:
        found.append(f"cluster.container.kind={c.container.kind} needs cluster.container.image")
    if c.container.kind == "none" and c.container.image:
        found.append("cluster.container.image is given, but cluster.container.kind=none (use pyxis or apptainer)")
    if c.container.kind == "none" and c.container.mounts:
        found.append("cluster.container.mounts are given, but cluster.container.kind=none")
    found += [
        f"cluster.container.mounts: {mount!r} is no absolute path, nor two joined by ':'"
        for mount in c.container.mounts
        if not all(part.startswith("/") for part in mount.split(":", 1)) or "," in mount
    ]
    found += [f"cluster.environment: {n!r} is no variable name" for n in c.environment if not _NAME.fullmatch(n)]
    for name in c.variables:
        if not _NAME.fullmatch(str(name)):
            found.append(f"cluster.variables: {name!r} is no variable name")
        elif _SECRET.search(str(name).upper()):
            found.append(
                f"cluster.variables.{name} looks like a secret, which would be written into a script: "
                f"export it in your shell and name it in cluster.environment"
            )
    return found


def header(cfg: Config, job: Job, log_dir: Path) -> list[str]:
    """The `#SBATCH` lines of a job."""
    c = cfg.cluster
    flags = [
        f"--job-name=pivotrl-{job.name}",
        f"--nodes={c.nodes}",
        f"--ntasks-per-node={processes_per_node(cfg)}",
        *([f"--gpus-per-node={c.gpus_per_node}"] if c.gpus_per_node else []),
        *([f"--cpus-per-task={c.cpus_per_process}"] if c.cpus_per_process else []),
        f"--time={c.time_limit}",
        *(f"--{word}={value}" for word in _WORDS if (value := getattr(c, word))),
        *(["--exclusive", "--mem=0"] if c.exclusive else []),
        f'--output="{log_dir}/%x-%j.log"',
        "--open-mode=append",
        "--requeue",
        f"--export={','.join(c.environment) or 'NIL'}",
    ]
    return [f"#SBATCH {flag}" for flag in flags]


def settings(cfg: Config) -> str:
    """Shell text that launch/job.sh needs: interpreter, modules, container, variables. Evaluated or written in."""
    c = cfg.cluster
    inside = c.container.kind != "none"
    python = c.python or ("python3" if inside else sys.executable)
    names = [str(n) for n in c.variables]
    srun: list[str] = []
    command: list[str] = []
    here = str(Path.cwd())  # relative paths in overrides mean this folder
    mounts = list(dict.fromkeys([*c.container.mounts, *_needed_mounts(cfg), here]))
    if c.container.kind == "pyxis":
        pairs = ",".join(m if ":" in m else f"{m}:{m}" for m in mounts)
        srun = [f"--container-image={c.container.image}", f"--container-mounts={pairs}", f"--container-workdir={here}"]
        srun += [f"--container-env={','.join(names)}"] if names else []  # else the image's own values win
    elif c.container.kind == "apptainer":
        command = ["apptainer", "exec", "--pwd", here, *(["--nv"] if c.gpus_per_node else [])]
        command += [word for m in mounts for word in ("--bind", m)]
        command += [str(c.container.image)]
    lines = [
        f"python={shlex.quote(python)}",
        f"run_dir={shlex.quote(cfg.run_dir)}",
        f"gpus_per_node={c.gpus_per_node}",
        f"check_seconds={c.check_seconds}",
        f"max_fruitless_starts={c.max_fruitless_starts}",
        f"srun_flags=({shlex.join(srun)})",
        f"container=({shlex.join(command)})",
        *c.modules,
        *(f"export {name}={shlex.quote(str(value))}" for name, value in c.variables.items()),
    ]
    if not inside and (ROOT / "pyproject.toml").is_file():  # a checkout, which `python` may not have installed
        lines.append(f"export PYTHONPATH={shlex.quote(str(ROOT))}")
    return "\n".join(lines)


def _needed_mounts(cfg: Config) -> list[str]:
    """Folders that a job reads and writes: a container sees only what is mounted."""
    paths = [cfg.run_dir]
    paths += [cfg.model.path] if not cfg.model.path.startswith("builtin:") else []
    for given in (cfg.trajectories.path, cfg.evaluate.ood_path):
        if given:
            paths.append(str(Path(re.split(r"[*?\[]", given)[0] + "x").parent))
    return paths


def script(cfg: Config, job: Job, overrides: Sequence[str], log_dir: Path) -> str:
    """The whole sbatch script: header, settings, and the body of launch/job.sh."""
    body = BODY.read_text(encoding="utf-8")
    return "\n".join(
        [
            "#!/bin/bash -l",
            "# Rendered by launch/render.py from the configuration; `pivotrl launch JOB --dry-run ...` prints another.",
            *header(cfg, job, log_dir),
            f"stages=({' '.join(job.stages)})",
            f"set -- {shlex.join(overrides)}",
            settings(cfg),
            body,
        ]
    )
