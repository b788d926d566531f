"""What an agent's text tells that is not so: values nobody has given, a status that is another, a hand-over not made.

A customer that reads texts by their key words would take any of it; a person would not. Texts that say nothing
checkable are true.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from pivotrl.environments.outfitters.user import ORDER_ID, SKU, numbers_of
from pivotrl.trajectories.schema import JsonDict, ToolCall

_ADVERB = "still|already|only|currently|now|just"
# "is still pending", "has been shipped"; not "is not delivered", "is no longer pending", "will be delivered".
_STATUS = re.compile(
    rf"\b(?:is|was|(?<!not )(?<!n't )(?<!never )been|{_ADVERB}) (?:(?:{_ADVERB}) )*"
    r"(pending|shipped|delivered|cancell?ed)\b"
)
_WHO = r"(?:human|colleague|specialist|supervisor|person|team|someone)"
_HANDED_OVER = re.compile(
    rf"\b(?:passed|handed|transferred|forwarded|referred) (?:you|this|it)(?: on| over)? to (?:\w+ )?{_WHO}\b"
    rf"|\b{_WHO} (?:will|would) (?:contact|call|take over|get back|help|reach|look)\b"
)


def untruth(
    text: str, before: Sequence[JsonDict], orders: JsonDict, order: str | None, writes: Iterable[ToolCall]
) -> str | None:
    """The first thing in `text` that is not so, as a machine name; None where there is none.

    `before`: the messages so far. `orders`: the shop's, as they are now. `order`: the one that the customer is
    about. `writes`: those that were carried out.
    """
    lower = " ".join(text.lower().split())
    given = " ".join(str(m.get("content", "")) for m in before if m["role"] != "assistant")
    if not _values(text) <= _values(given):
        return "unseen_value"
    named = set(ORDER_ID.findall(text)) or {order}
    said = {status.replace("canceled", "cancelled") for status in _STATUS.findall(lower)}
    about = [orders[one]["status"] for one in named if one in orders]
    if len(about) == 1 and said - {about[0]}:
        return "wrong_status"
    if _HANDED_OVER.search(lower) and all(write.name != "transfer_to_human" for write in writes):
        return "not_handed_over"
    return None


def _values(text: str) -> set[str]:
    """Order ids, variants, and numbers on their own of two digits or more (fewer may have been counted)."""
    return {*ORDER_ID.findall(text), *SKU.findall(text), *(n for n in numbers_of(text) if len(n) > 1)}
