"""Verifying rows without a run: the row function of `pivotrl verify`. One row out for each row in, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from typing import Any

from pivotrl import config
from pivotrl.rendering.parsing import action_from_message, parse_action
from pivotrl.trajectories.normalise import RowError, action_of, assistant_message, messages_of, tools_of
from pivotrl.trajectories.schema import Action, JsonDict, Turn
from pivotrl.verifiers.base import Verdict, Verifier
from pivotrl.verifiers.runner import Pair, open_verifier, score_pairs

_CHUNK = 256  # rows that are scored together


@dataclass(frozen=True)
class BadLine:
    """A line that holds no row: why, and the id that it gives, which is said again."""

    error: str
    id: Any = None


_Judged = tuple[config.Domain, Verifier]


def verify_rows(
    rows: Iterable[Any],
    settings: config.VerifierConfig | None = None,
    action_format: str = "hermes",
    of_domain: Callable[[str], config.Domain | None] | None = None,
) -> Iterator[JsonDict]:
    """Rows {"id"?, "domain"?, "tools"?, "expected": assistant message, "completion": text or assistant message,
    "state": [messages]?} -> {"id"?, "reward": 0..1 or None, "reason", "details"?}.

    `of_domain(row["domain"])` says by which verifier and in which action format a row is judged; None: by `settings`
    and in `action_format`. A row that cannot be used gives reward None, reason "bad_row". Raises `UserError` only for
    bad settings.
    """
    stream = iter(rows)
    usual = config.Domain(verifier=settings or config.VerifierConfig(), action_format=action_format)
    with ExitStack() as stack:
        judges: dict[str | None, _Judged] = {None: (usual, open_verifier(usual.verifier, stack))}
        while chunk := list(islice(stream, _CHUNK)):
            keys = [_domain_of(row, judges, of_domain, stack) for row in chunk]
            verdicts = _verdicts([(key, row) for key, row in zip(keys, chunk, strict=True)], judges)
            for row, verdict in zip(chunk, verdicts, strict=True):
                result: JsonDict = {"id": row["id"]} if isinstance(row, dict) and "id" in row else {}
                if isinstance(row, BadLine) and row.id is not None:
                    result["id"] = row.id
                result |= {"reward": verdict.reward, "reason": verdict.reason}
                yield {**result, "details": verdict.details} if verdict.details else result


def _domain_of(
    row: Any,
    judges: dict[str | None, _Judged],
    of_domain: Callable[[str], config.Domain | None] | None,
    stack: ExitStack,
) -> str | None:
    """The key in `judges` of who judges `row`; adds a domain's verifier when its first row comes."""
    name = row.get("domain") if isinstance(row, dict) else None
    if of_domain is None or not isinstance(name, str):
        return None
    if name not in judges:
        if (domain := of_domain(name)) is None:
            return None
        judges[name] = (domain, open_verifier(domain.verifier, stack))
    return name


def _verdicts(rows: list[tuple[str | None, Any]], judges: dict[str | None, _Judged]) -> list[Verdict]:
    """One verdict for each (key in `judges`, row), in order; the rows of one verifier are scored together."""
    read = [_read(row, judges[key][0].action_format) for key, row in rows]
    found = {i: item for i, item in enumerate(read) if isinstance(item, Verdict)}
    for key, (_, verifier) in judges.items():
        mine = [(i, item) for i, item in enumerate(read) if rows[i][0] == key and not isinstance(item, Verdict)]
        scores = score_pairs(verifier, [pair for _, pair in mine])
        found.update({i: verdict for (i, _), verdict in zip(mine, scores, strict=True)})
    return [found[i] for i in range(len(rows))]


def _read(row: Any, action_format: str) -> Pair | Verdict:
    """What is to be scored, or the verdict of a row that cannot be used."""
    if isinstance(row, BadLine):
        return Verdict(None, "bad_row", {"error": row.error})
    try:
        turn = _turn(row)
        return turn, _completion(row, action_format, turn.tools)
    except RowError as error:
        return Verdict(None, "bad_row", {"error": f"{error.reason}: {error.detail}"})
    except RecursionError as error:  # nested past the limit
        return Verdict(None, "bad_row", {"error": f"nested_too_deep: {error}"})


def _turn(row: Any) -> Turn:
    if not isinstance(row, dict):
        raise RowError("not_an_object", f"the row is a {type(row).__name__}")
    expected = row.get("expected")
    if not isinstance(expected, dict):
        raise RowError("missing_key", "expected: give the demonstrated assistant message")
    if (role := expected.get("role", "assistant")) != "assistant":
        raise RowError("unknown_role", f"expected: {str(role)[:80]!r} is not the assistant")
    demonstration = action_of(assistant_message(expected, "expected"))
    if not demonstration.text.strip() and not demonstration.tool_calls:
        raise RowError("empty_action", "expected has neither text nor a call")
    state = [] if row.get("state") is None else row["state"]
    if not isinstance(state, list):
        raise RowError("bad_messages", f"state is a {type(state).__name__}, not a list of messages")
    messages = messages_of([*state, {**expected, "role": "assistant"}])[:-1]
    identity, domain = str(row.get("id", "row")), str(row.get("domain", ""))
    return Turn(identity, identity, identity, 0, domain, "train", messages, tools_of(row.get("tools")), demonstration)


def _completion(row: JsonDict, action_format: str, tools: list[JsonDict]) -> Action:
    completion = row.get("completion")
    if isinstance(completion, str):
        return parse_action(completion, action_format, tools)
    if isinstance(completion, dict):
        return action_from_message(completion)
    raise RowError("missing_key", "completion: give the text or the assistant message to judge")
