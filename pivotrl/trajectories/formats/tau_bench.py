"""tau-bench result files: {"task_id", "trial", "reward", "traj": [OpenAI chat messages]}; without tools."""

from __future__ import annotations

from pivotrl.trajectories.formats.base import Format, Parsed, describe
from pivotrl.trajectories.normalise import read_messages
from pivotrl.trajectories.schema import JsonDict


def _matches(row: JsonDict) -> bool:
    return "traj" in row and "task_id" in row


def _parse(row: JsonDict) -> Parsed:
    parsed = describe(row, read_messages(row["traj"]), [])
    if parsed.id is None:
        parsed.id = f"task{row['task_id']}_trial{row.get('trial', 0)}"
    return parsed


FORMAT = Format("tau_bench", _matches, _parse)
