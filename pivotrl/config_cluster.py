"""The part of the configuration that says where jobs run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Container:
    kind: str = "none"  # "none" (modules or a virtual environment) | "pyxis" (srun --container-image) | "apptainer"
    image: str | None = None  # .sqsh or registry reference (pyxis), .sif (apptainer)
    mounts: list[str] = field(default_factory=list)  # "/host" or "/host:/inside"


@dataclass
class Cluster:
    """Where jobs run. Read by `pivotrl launch`, `pivotrl preflight` and slurm/*.sh; never changes a result."""

    name: str = "local_cpu"
    nodes: int = 1
    gpus_per_node: int = 0  # one process each; 0: a CPU cluster, `processes_per_node` then counts
    processes_per_node: int = 1  # of a CPU cluster
    cpus_per_process: int | None = None  # None: the partition's default
    gpu_memory_gib: float | None = None  # of one GPU, for the estimate of `pivotrl preflight`; None: not estimated
    partition: str | None = None  # None: the site's default, likewise below
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    exclusive: bool = False
    time_limit: str = "04:00:00"  # D-HH:MM:SS, HH:MM:SS or minutes
    container: Container = field(default_factory=Container)
    modules: list[str] = field(default_factory=list)  # shell lines before anything else: "module load cuda/12.8"
    python: str | None = None  # interpreter on the nodes (in the container); None: the one that launches
    # Variables of the submitting shell that a job may see, by name: the values of secrets stay out of scripts and logs.
    environment: list[str] = field(
        default_factory=lambda: [
            *("HOME", "USER", "LANG", "PATH", "HF_HOME", "WANDB_API_KEY", "WANDB_BASE_URL"),
            *("PIVOTRL_CACHE", "PIVOTRL_PYTHON", "PIVOTRL_ROOT"),
        ]
    )
    variables: dict[str, Any] = field(default_factory=dict)  # set in the job: NCCL_*, UCX_*, ... (no secrets)
    check_seconds: int = 120  # limit of the node check that precedes the stages of a job
    # Starts of a job in a row that keep nothing (no step saved, no stage done), after which it is not queued again.
    max_fruitless_starts: int = 3
