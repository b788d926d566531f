"""Steps whose loss or gradient is no finite number: skipped, counted, written down; too many end the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from pivotrl.errors import UserError
from pivotrl.io import append_jsonl, write_jsonl
from pivotrl.profiling.shards import whole_rows

FILE = "nonfinite.jsonl"
_SHOWN = 8


class NonFiniteError(UserError):
    """As many steps as allowed had a loss or gradient that is no finite number."""


def suspects(ids: Sequence[str], streams: Sequence[Sequence[Tensor]]) -> list[str]:
    """Ids of samples with a non-finite value in any stream (`streams[k][i]` is of sample i)."""
    return [name for i, name in enumerate(ids) if any(not bool(torch.isfinite(s[i]).all()) for s in streams)]


class NonFiniteSteps:
    """The count of a run, kept in `directory`/nonfinite.jsonl, so that a resumed run goes on counting."""

    def __init__(self, directory: Path, limit: int, start_step: int = 0) -> None:
        """`start_step` drops what a killed run wrote of steps that are about to be done again."""
        self.path, self.limit = directory / FILE, limit
        rows = [row for row in whole_rows(self.path) if row["step"] < start_step]
        self.count = len(rows)
        if self.path.is_file():
            write_jsonl(self.path, rows)

    def record(self, step: int, stats: Mapping[str, float], ids: Sequence[str], suspected: Sequence[str]) -> None:
        """Count a skipped optimiser step on samples `ids`. Raises NonFiniteError when the limit is reached.

        `suspected` are the samples that have a non-finite value themselves; without any, the fault lies in the
        gradient, and all samples of the step are told.
        """
        self.count += 1
        loss, norm = stats.get("loss", float("nan")), stats.get("grad_norm", float("nan"))
        row = {"step": step, "loss": str(loss), "grad_norm": str(norm), "samples": list(ids)}
        append_jsonl(self.path, [{**row, "suspects": list(suspected)}])
        if self.count < self.limit:
            return
        named = list(suspected or ids)
        more = f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
        what = "samples with non-finite values" if suspected else "samples of the step (none is non-finite by itself)"
        raise NonFiniteError(
            f"non-finite loss or gradient at step {step} (loss {loss}, gradient norm {norm}): {self.count} steps were "
            f"skipped, which is optimizer.max_nonfinite_steps; {what}: {', '.join(named[:_SHOWN])}{more}. "
            f"All are in {self.path}. None of these steps changed the weights. Look "
            "at these samples, lower the learning rate, or raise the limit if you know why."
        )
