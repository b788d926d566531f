"""`pivotrl launch JOB` and `pivotrl preflight [JOB]`."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from launch import follow, preflight, render, report
from launch.jobs import PIPELINE, Job, jobs_for, stages_of, world_size
from pivotrl.config import Config
from pivotrl.configuration import load_config, search_folder
from pivotrl.errors import UserError
from pivotrl.stages import STAGES

HELP = {
    "launch": """Writes  <run_dir>/slurm/JOB.sbatch (the script, rendered from the configuration), <run_dir>/slurm/*.log

JOB is profile, train, sft or evaluate (with the stages that come before and are not done), a single stage, or
pipeline: all four, each started when those before it have ended well.
`pivotrl preflight` runs first, and nothing is submitted while it has something to say.

Options: --dry-run         print the scripts instead of submitting them
         --follow          print the states and logs of the jobs until they have ended; Ctrl-C leaves the jobs alone
         --after ID[:ID]   start when these SLURM jobs have ended well
         --skip-preflight  submit in spite of it

Key overrides: cluster=h100|h200|b200|local_cpu, cluster.nodes, cluster.partition, cluster.account, cluster.time_limit
Example:       pivotrl launch pipeline experiment=tau2 cluster=h100 model.path=/models/Qwen3-30B-A3B""",
    "preflight": """Reads   the configuration, the model's folder, <run_dir>; needs no GPU and submits nothing
Prints  the layout and the estimate of memory (as show-layout)
Ends    0 when all is well, 2 with every problem and its remedy

JOB is that of `pivotrl launch`; without one: pipeline.

Example:       pivotrl preflight train experiment=tau2 cluster=h100 model.path=/models/Qwen3-30B-A3B""",
}
_FLAGS = ("dry-run", "follow", "skip-preflight")
_VALUES = ("after", "config-dir")


def main(command: str, arguments: Sequence[str]) -> int:
    """Run one of the two commands; returns the exit code. Raises UserError for bad input and for problems found."""
    options, words, overrides = _parse(command, arguments)
    if len(words) > 1 or (command == "launch" and not words):
        raise UserError(f"name one job: pivotrl {command} JOB [key=value ...] (see `pivotrl {command} --help`)")
    jobs = jobs_for(words[0] if words else PIPELINE)
    cfg = load_config(overrides)
    jobs = _of_this_run(cfg, jobs)
    if command == "preflight":
        return _preflight(cfg, jobs, overrides)
    return _launch(cfg, jobs, overrides, options)


def _parse(command: str, arguments: Sequence[str]) -> tuple[dict[str, str], list[str], list[str]]:
    """Options, words without "=", and Hydra overrides, in any order."""
    known = (*_FLAGS, *_VALUES) if command == "launch" else ("config-dir",)
    options: dict[str, str] = {}
    words: list[str] = []
    overrides: list[str] = []
    items = iter(arguments)
    for item in items:
        if not item.startswith("--"):
            (overrides if "=" in item or item.startswith("~") else words).append(item)
            continue
        name, given, value = item[2:].partition("=")
        if name not in known:
            raise UserError(f"no option --{name} (see `pivotrl {command} --help`)")
        options[name] = "yes" if name in _FLAGS else value if given else next(items, "")
        if not options[name]:
            raise UserError(f"--{name} needs a value")
    if folder := options.get("config-dir"):
        overrides.append(search_folder(folder))
    return options, words, overrides


def _of_this_run(cfg: Config, jobs: list[Job]) -> list[Job]:
    """A pipeline without the jobs whose own stage `run.stages` leaves out."""
    if len(jobs) == 1:
        return jobs
    kept = [job for job in jobs if job.name in cfg.run.stages]
    if not kept:
        raise UserError(f"run.stages={cfg.run.stages} has none of {', '.join(j.name for j in jobs)}; nothing to submit")
    return kept


def _preflight(cfg: Config, jobs: list[Job], overrides: list[str]) -> int:
    refuse(preflight.problems(cfg, jobs, overrides))
    if any(STAGES[s].policy for s in stages_of(jobs)) and find_spec("torch") is not None:
        print(f"{report.layout(cfg)}\n{report.estimate(cfg)}")
    print(f"preflight: all is well for {', '.join(stages_of(jobs))} on {world_size(cfg)} processes")
    return 0


def refuse(found: Sequence[str]) -> None:
    """Raise UserError with every problem of `found`; nothing where there is none."""
    if found:
        count = f"{len(found)} problems" if len(found) > 1 else "one problem"
        raise UserError(f"{count} before anything is queued:\n" + "\n".join(f"  - {text}" for text in found))


def _launch(cfg: Config, jobs: list[Job], overrides: list[str], options: dict[str, str]) -> int:
    refuse(render.conflicts(cfg))  # a script with these would be wrong even to look at
    folder = Path(cfg.run_dir) / "slurm"
    scripts = {job.name: render.script(cfg, job, overrides, folder) for job in jobs}
    if "dry-run" in options:
        print("\n".join(scripts.values()), end="")
        return 0
    if shutil.which("sbatch") is None:
        raise UserError("no sbatch on this machine: go to a login node, print with --dry-run, or use launch/local.sh")
    if "skip-preflight" not in options:
        refuse(preflight.problems(cfg, jobs, overrides))
    ids: dict[str, str] = {}
    for job in jobs:
        before = [ids[name] for name in job.after if name in ids] or [i for i in [options.get("after", "")] if i]
        path = folder / f"{job.name}.sbatch"
        ids[job.name] = submit(path, scripts[job.name], before)
        waits = f" after {', '.join(before)}" if before else ""
        print(f"{job.name}: job {ids[job.name]}{waits}, {path}", flush=True)
    if "follow" not in options:
        print(f"Follow with: tail -F {folder}/pivotrl-*.log")
        return 0
    return _follow(ids, folder)


def _follow(ids: dict[str, str], folder: Path) -> int:
    logs = {name: folder / f"pivotrl-{name}-{job_id}.log" for name, job_id in ids.items()}
    try:
        ends = follow.follow(ids, logs)
    except KeyboardInterrupt:
        print(
            f"\nThe jobs go on: squeue -j {','.join(ids.values())}; scancel ends them; tail -F {folder}/pivotrl-*.log"
        )
        return 0
    print("\n".join(["", *(state.told(name) for name, state in ends.items())]), flush=True)
    return follow.outcome(ends)


def submit(path: Path, script: str, after: Sequence[str]) -> str:
    """Write a job's script to `path` and submit it, to start when the jobs `after` have ended well.

    Returns the job's id. Raises UserError with what sbatch says.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script, encoding="utf-8")
    chain = [f"--dependency=afterok:{':'.join(after)}", "--kill-on-invalid-dep=yes"] if after else []
    done = subprocess.run(["sbatch", "--parsable", *chain, str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"sbatch refused {path}: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]
