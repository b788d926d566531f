"""Some rollouts of a step as a table for W&B."""

from __future__ import annotations

import json
from collections.abc import Sequence

from pivotrl.config import Tracking
from pivotrl.rollouts import Rollout
from pivotrl.tracking.metrics import Table

COLUMNS = ("step", "turn", "sample", "action", "reward", "reason", "tokens", "finish")
_SHOWN = 4000  # characters of an action


def rollout_tables(groups: Sequence[Sequence[Rollout]], step: int, tracking: Tracking) -> dict[str, Table]:
    """The first rollouts of step 0, n, 2n, ...: whole groups, so that what was rewarded can be compared."""
    if not tracking.rollouts_every or step % tracking.rollouts_every:
        return {}
    rollouts = [r for group in groups for r in group][: tracking.rollouts_shown]
    rows = [
        (
            step,
            r.turn_id,
            r.index,
            json.dumps(r.action.to_json(), ensure_ascii=False)[:_SHOWN],
            r.verdict.reward,
            r.verdict.reason,
            len(r.completion.token_ids),
            r.completion.finish_reason,
        )
        for r in rollouts
    ]
    return {"rollouts": Table(COLUMNS, rows)}
