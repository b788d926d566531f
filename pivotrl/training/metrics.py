"""Reduction of what optimiser steps report into the metrics of one training step. Pure Python."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean

_ADDED = ("target_tokens", "tokens_total", "tokens_unique")
_AVERAGED = ("loss", "grad_norm", "aux_loss", "expert_load")


class StepSums:
    """Sums over the optimiser steps of a training step; ratios are taken once, at the end.

    Of a report: `x_sum` (over target tokens) becomes the token-weighted mean `x`, `x_max` the maximum; loss, grad_norm
    and what tells about experts are means over optimiser steps, the learning rate is the last.
    """

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.maxima: dict[str, float] = {}
        self.lists: dict[str, list[float]] = {}
        self.last: dict[str, float] = {}
        self.tried = 0
        self.taken = 0

    def add(self, stats: Mapping[str, float]) -> None:
        """The report of one optimiser step, taken or not."""
        self.tried += 1
        self.taken += not stats["skipped"]
        for name, value in stats.items():
            if name.endswith("_sum") or name in _ADDED:
                self.sums[name] = self.sums.get(name, 0.0) + value
            elif name.endswith("_max"):
                self.maxima[name] = value if math.isnan(value) else max(self.maxima.get(name, value), value)
            elif name in _AVERAGED:
                self.note(name, value)
            elif name != "skipped":
                self.last[name] = value

    def note(self, name: str, value: float) -> None:
        """A value whose mean over the optimiser steps is wanted."""
        self.lists.setdefault(name, []).append(value)

    def finish(self) -> dict[str, float]:
        """Metrics of the training step. Names of what nothing was reported of are absent."""
        result = {"optimizer_steps": float(self.taken), "nonfinite": float(self.tried - self.taken)}
        result["skipped"] = float(self.taken == 0)
        if not self.tried:
            return result
        result |= {name: fmean(values) for name, values in self.lists.items()} | self.maxima | self.last
        result |= {name: value for name, value in self.sums.items() if name in _ADDED}
        result["tokens_saved"] = result["tokens_total"] - result["tokens_unique"]
        tokens = self.sums["target_tokens"]
        for name, value in self.sums.items():
            if name.endswith("_sum"):
                result[name.removesuffix("_sum")] = value / tokens
        squares = result.pop("importance_square", None)
        if squares:
            # Kish: the share of tokens that would say as much with equal weights; 1 where trainer and engine agree
            result["importance_ess"] = result["importance"] ** 2 / squares
        return result
