"""Verifying rows without a run: the row function of `pivotrl verify`. One row out for each row in, in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from typing import Any

from pivotrl import config
from pivotrl.rendering.parsing import action_from_message, parse_action
from pivotrl.trajectories.normalise import RowError, action_of, assistant_message, messages_of, tools_of
from pivotrl.trajectories.schema import Action, JsonDict, Turn
from pivotrl.verifiers.base import Verdict
from pivotrl.verifiers.runner import Pair, open_verifier, score_pairs

_CHUNK = 256  # rows that are scored together


def verify_rows(
    rows: Iterable[Any], settings: config.VerifierConfig | None = None, action_format: str = "hermes"
) -> Iterator[JsonDict]:
    """Rows {"id"?, "domain"?, "tools"?, "expected": assistant message, "completion": text or assistant message,
    "state": [messages]?} -> {"id"?, "reward": 0..1 or None, "reason", "details"?}.

    A row that cannot be used gives reward None, reason "bad_row". Raises `UserError` only for bad `settings`.
    """
    stream = iter(rows)
    with ExitStack() as stack:
        verifier = open_verifier(settings or config.VerifierConfig(), stack)
        while chunk := list(islice(stream, _CHUNK)):
            read = [_read(row, action_format) for row in chunk]
            verdicts = iter(score_pairs(verifier, [pair for pair in read if not isinstance(pair, Verdict)]))
            for row, pair in zip(chunk, read, strict=True):
                verdict = pair if isinstance(pair, Verdict) else next(verdicts)
                result: JsonDict = {"id": row["id"]} if isinstance(row, dict) and "id" in row else {}
                result |= {"reward": verdict.reward, "reason": verdict.reason}
                yield {**result, "details": verdict.details} if verdict.details else result


def _read(row: Any, action_format: str) -> Pair | Verdict:
    """What is to be scored, or the verdict of a row that cannot be used."""
    try:
        turn = _turn(row)
        return turn, _completion(row, action_format, turn.tools)
    except RowError as error:
        return Verdict(None, "bad_row", {"error": f"{error.reason}: {error.detail}"})


def _turn(row: Any) -> Turn:
    if not isinstance(row, dict):
        raise RowError("not_an_object", f"the row is a {type(row).__name__}")
    expected = row.get("expected")
    if not isinstance(expected, dict):
        raise RowError("missing_key", "expected: give the demonstrated assistant message")
    demonstration = action_of(assistant_message(expected, "expected"))
    if not demonstration.text.strip() and not demonstration.tool_calls:
        raise RowError("empty_action", "expected has neither text nor a call")
    state = row.get("state")
    messages = messages_of([*state, expected])[:-1] if isinstance(state, list) else []
    identity, domain = str(row.get("id", "row")), str(row.get("domain", ""))
    return Turn(identity, identity, identity, 0, domain, "train", messages, tools_of(row.get("tools")), demonstration)


def _completion(row: JsonDict, action_format: str, tools: list[JsonDict]) -> Action:
    completion = row.get("completion")
    if isinstance(completion, str):
        return parse_action(completion, action_format, tools)
    if isinstance(completion, dict):
        return action_from_message(completion)
    raise RowError("missing_key", "completion: give the text or the assistant message to judge")
