"""Which actions the pivots demonstrate, against those of all turns. What training does not see, it may unlearn: on one
seed of the study 1 pivot of 43 was a closing message, and the policy no longer ended its episodes (docs/study.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COMMON = 20  # an action is missed from one in so many scored turns on
SCARCE = 10  # where its share of the pivots is less than one in so many of its share of the turns


def tool_of(row: Mapping[str, Any]) -> str:
    """The demonstrated action of a profiled turn, or of a group of rollouts."""
    named = row.get("demonstration") or ["(not told)"]
    return str(named[0]) if len(named) == 1 else f"{named[0]} and {len(named) - 1} more"


def scarce(turns: Mapping[str, int], kept: Mapping[str, int]) -> list[str]:
    """Actions that are common among the turns and scarce among the pivots, the commonest first.

    `turns`, `kept`: scored turns and pivots by demonstrated action.
    """
    all_turns, all_kept = sum(turns.values()), sum(kept.values())
    found = [
        action
        for action, count in turns.items()
        if COMMON * count >= all_turns and SCARCE * kept.get(action, 0) * all_turns < count * all_kept
    ]
    return sorted(found, key=lambda action: (-turns[action], action))


def warning(turns: Mapping[str, int], kept: Mapping[str, int]) -> str | None:
    """What to tell the user of the scarce ones; None where there is none."""
    if not (found := scarce(turns, kept)):
        return None
    all_turns, all_kept = sum(turns.values()), sum(kept.values())
    told = ", ".join(f"{kept.get(a, 0)} of {a} ({turns[a] / all_turns:.0%} of the turns)" for a in found)
    return (
        f"of {all_kept} pivots, {told}: what training hardly sees it may unlearn. Watch held-out tasks (watch.*), "
        "profile again (algorithm.reprofile.every_steps), or keep some of them (select.action_floor=0.5)."
    )
