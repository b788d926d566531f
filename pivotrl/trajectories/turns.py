"""Trajectory -> turns: every assistant turn at a model-call boundary is a candidate (method.md 1.1, eq. 3)."""

from __future__ import annotations

from collections.abc import Iterator

from pivotrl.trajectories.flags import turn_flags
from pivotrl.trajectories.normalise import action_of
from pivotrl.trajectories.reader import Skip
from pivotrl.trajectories.schema import JsonDict, Trajectory, Turn


def merge_pieces(messages: list[JsonDict]) -> list[JsonDict]:
    """Join assistant messages that are pieces of one model call.

    Rule for consecutive assistant messages: a message without calls and the assistant message right after it are one
    completion that was recorded in pieces (text, then calls); texts and thinking are joined by a blank line. What
    follows a message with calls directly is left as it is: the model was not called before a result came, so
    `split_turns` makes no turn of it.
    """
    return [message for message, _ in _merged(messages)]


def _merged(messages: list[JsonDict]) -> list[tuple[JsonDict, list[int]]]:
    """(message, indices of its pieces)."""
    result: list[tuple[JsonDict, list[int]]] = []
    for i, message in enumerate(messages):
        last, pieces = result[-1] if result else ({}, [])
        if message["role"] == "assistant" == last.get("role") and "tool_calls" not in last:
            joined: JsonDict = {"role": "assistant"}
            for key in ("content", "thinking"):
                if text := "\n\n".join(m[key] for m in (last, message) if m.get(key)):
                    joined[key] = text
            if "tool_calls" in message:
                joined["tool_calls"] = message["tool_calls"]
            result[-1] = (joined, [*pieces, i])
        else:
            result.append((message, [i]))
    return result


def split_turns(trajectory: Trajectory, split: str) -> Iterator[Turn | Skip]:
    """A `Turn` for each assistant turn (state: all messages before it, thinking kept: the template drops it), or a
    `Skip`: `empty_action`, `unclosed_thinking`, `not_a_boundary` (see `merge_pieces`), `empty_state`, or what a reader
    found (`meta.unusable_messages`: index of a message -> "reason" or "reason: detail"), and one for each turn from the
    trajectory's defect on.
    """
    merged = _merged(trajectory.messages)
    messages = [message for message, _ in merged]
    marked = trajectory.meta.get("unusable_messages")
    unusable = marked if isinstance(marked, dict) else {}
    places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    name, _, number = trajectory.source.rpartition(":")
    line = int(number) if number.isdigit() else 0
    seen: set[str] = set()
    for depth, place in enumerate(places):
        last = place == places[-1] and not (trajectory.defect and trajectory.defect.turns)
        flags = turn_flags(messages, place, last, seen, trajectory.meta.get("reward"))
        if trajectory.meta.get("text_syntax") is True:
            flags.append("text_syntax")
        if trajectory.meta.get("only_last_turn") and place != places[-1]:
            continue
        identity = f"{trajectory.id}#{depth}"
        why = next((str(unusable[str(i)]) for i in merged[place][1] if str(i) in unusable), None)
        problem = _problem(messages, place) if why is None else _split_reason(why)
        if problem is not None:
            yield Skip(name, line, identity, *problem)
            continue
        yield Turn(
            id=identity,
            trajectory_id=trajectory.id,
            task_id=trajectory.task_id,
            depth=depth,
            domain=trajectory.domain,
            split=split,
            messages=messages[:place],
            tools=trajectory.tools,
            demonstration=action_of(messages[place]),
            source=trajectory.source,
            flags=flags,
        )
    if defect := trajectory.defect:
        for depth in range(len(places), len(places) + defect.turns):
            yield Skip(name, line, f"{trajectory.id}#{depth}", defect.reason, defect.detail)


def _split_reason(why: str) -> tuple[str, str]:
    reason, _, detail = why.partition(": ")
    return reason, detail or "found by its reader"


def _problem(messages: list[JsonDict], place: int) -> tuple[str, str] | None:
    message = messages[place]
    if not message.get("content", "").strip() and not message.get("tool_calls"):
        return "empty_action", "neither text nor a call"
    if message.get("content", "").lstrip().startswith("<think>"):
        return "unclosed_thinking", "<think> without </think>"
    if all(earlier["role"] == "system" for earlier in messages[:place]):
        return "empty_state", "no user or tool message before it"
    if messages[place - 1]["role"] == "assistant":
        return "not_a_boundary", "the message before it is the assistant's own, with calls that have no result"
    return None
