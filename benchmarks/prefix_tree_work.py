"""The workload of benchmarks.prefix_tree and the protocol of its processes. Standard library only: TRL's environment
need not have this package installed."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MARK = "@@ "  # answers to the parent start so; libraries may print too


@dataclass(frozen=True)
class Shape:
    """One trajectory of `trunk` tokens with `pivots` states evenly along it, each with `group` actions of `action`."""

    trunk: int = 2048
    pivots: int = 4
    group: int = 8
    action: int = 64

    def depths(self) -> list[int]:
        """Length of each state; the last is the whole trajectory."""
        return [self.trunk * (k + 1) // self.pivots for k in range(self.pivots)]

    @property
    def tokens(self) -> int:
        return sum(self.group * (depth + self.action) for depth in self.depths())

    @property
    def unique(self) -> int:
        """Nodes of the prefix tree, where no two actions and no action and the trajectory begin alike."""
        return self.trunk + self.pivots * self.group * self.action


@dataclass(frozen=True)
class Setting:
    """What all sides share beside the shape."""

    model: str  # Hugging Face folder
    vocabulary: int
    tokens_per_microbatch: int
    dtype: str  # "bf16": float32 main weights, products in bfloat16 | "fp32"
    recompute: bool


def draw(shape: Shape, vocabulary: int) -> tuple[list[int], list[list[list[int]]]]:
    """(trajectory, [pivot][action] -> token ids): random, the same in every process."""
    source = random.Random(0)
    trunk = [source.randrange(vocabulary) for _ in range(shape.trunk)]
    actions = [
        [[source.randrange(vocabulary) for _ in range(shape.action)] for _ in range(shape.group)]
        for _ in range(shape.pivots)
    ]
    return trunk, actions


def reward(action: int) -> float:
    """Every other action succeeds."""
    return float(action % 2)


def advantages(group: int) -> list[float]:
    """As TRL makes them of `reward`: sample standard deviation, epsilon 1e-4."""
    rewards = [reward(i) for i in range(group)]
    mean = sum(rewards) / group
    deviation = (sum((r - mean) ** 2 for r in rewards) / (group - 1)) ** 0.5
    return [(r - mean) / (deviation + 1e-4) for r in rewards]


def micro_batch(setting: Setting, shape: Shape) -> int:
    """Sequences of a micro-batch of TRL: it pads all to the longest, and their number must be a multiple."""
    most = max(1, setting.tokens_per_microbatch // (shape.trunk + shape.action))
    return max(n for n in range(1, most + 1) if shape.pivots * shape.group % n == 0)


def memory_megabytes() -> float:
    """Peak resident memory of this process so far."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6


def answer(**row: Any) -> None:
    print(MARK + json.dumps(row), flush=True)


def requests() -> Any:
    """Shapes that the parent asks a step of, until it closes the pipe."""
    for line in sys.stdin:
        yield Shape(**json.loads(line))


def timed(step: Callable[[], dict[str, float]]) -> None:
    """Run a step and answer with its seconds, this process's CPU seconds, peak memory and what it returns."""
    start, cpu = time.perf_counter(), time.process_time()
    row = step()
    answer(
        seconds=time.perf_counter() - start, cpu=time.process_time() - cpu, peak_mb=round(memory_megabytes(), 1), **row
    )


def command(side: str, setting: Setting, shape: Shape) -> list[str]:
    """Arguments of a side's process; `shape` is that of the steps that are timed."""
    return [side, json.dumps(asdict(setting)), json.dumps(asdict(shape))]
