"""One text for all writings of the same action: what baselines compare, judges are shown and audits deduplicate by."""

from __future__ import annotations

import json
from typing import Any

from pivotrl.trajectories.schema import Action


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no optional white space. 1, 1.0, true and "1" stay four different texts."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def canonical_action(action: Action) -> str:
    """The action without its thinking: text (outer white space dropped), then one line a call, in order."""
    lines = [action.text.strip()] if action.text.strip() else []
    lines += [f"{call.name} {canonical_json(call.arguments)}" for call in action.tool_calls]
    return "\n".join(lines)
