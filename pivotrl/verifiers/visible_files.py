"""What a state shows of files: contents read or written earlier in the trajectory, while they can be trusted."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from pivotrl.trajectories.schema import JsonDict, ToolCall, Turn
from pivotrl.verifiers.edit_calls import EditCall, View, edit_call, view_call
from pivotrl.verifiers.patches import EditError, Replace, Write, apply

_NUMBERED = re.compile(r"\s*(\d+)(?:\t|\||:|→)(.*)", re.DOTALL)
_FAILED = re.compile(
    r"\b(?:error|failed|failure|not found|no match|did not appear|no replacement|multiple occurrences|cannot|not unique"
    r"|rejected)\b",
    re.IGNORECASE,
)
_CUT = re.compile(r"truncat|showing lines|more lines|clipped|\(\d+ lines? (?:above|below)", re.IGNORECASE)
_CHANGES = re.compile(
    r">|sed\s+-\w*i|\b(?:rm|mv|cp|tee|patch|git|dd|install|truncate|black|ruff|isort|autopep8|perl)\b"
)
_HEADER_LINES = 6  # lines of a numbered view that are not of the file


@dataclass
class Known:
    """`whole`: the full content, or None. `newline`: whether its last newline is known. `parts`: contiguous pieces."""

    whole: str | None = None
    newline: bool = True
    parts: list[str] = field(default_factory=list)


def visible_files(turn: Turn, cwd: str | None) -> dict[str, Known]:
    """Known contents by path, from the calls and results of the state."""
    files: dict[str, Known] = {}
    for call, result in _calls_with_results(turn.messages):
        if edits := edit_call(call, cwd):
            _edited(files, edits, result)
        elif view := view_call(call, cwd):
            if result is not None:
                _viewed(files, view, result)
        else:
            _ran(files, call)
    return files


def _calls_with_results(messages: list[JsonDict]) -> list[tuple[ToolCall, str | None]]:
    """Calls in order, each with its result: by id where the id is unique, else the next result after it."""
    found: list[tuple[ToolCall, str | None]] = []
    for i, message in enumerate(messages):
        calls = message.get("tool_calls") or () if message.get("role") == "assistant" else ()
        results: list[JsonDict] = []
        for later in messages[i + 1 :] if calls else ():
            if later.get("role") == "assistant":
                break
            results.append(later)
        for n, call in enumerate(calls):
            if not isinstance(call.get("arguments"), dict) or "name" not in call:
                continue
            text: Any = next(
                (r.get("content") for r in results if call.get("id") and r.get("tool_call_id") == call["id"]), None
            )
            if text is None and len(calls) <= len(results):
                text = results[n].get("content")
            found.append((ToolCall(call["name"], call["arguments"]), text if isinstance(text, str) else None))
    return found


def _edited(files: dict[str, Known], call: EditCall, result: str | None) -> None:
    failed = result is not None and bool(_FAILED.search(result[:400]))
    for path, operation in call.edits:
        known = files.get(path, Known())
        if result is None or (failed and '"success": true' not in result):
            files.pop(path, None)  # whether it happened is not known
            continue
        if isinstance(operation, Write):
            files[path] = Known(whole=operation.content)
            continue
        try:
            whole = None if known.whole is None else apply(known.whole, operation)
        except EditError:
            whole = None
        parts = [p for part in known.parts if (p := _part_after(part, operation)) is not None]
        files[path] = Known(whole, known.newline, parts)


def _part_after(part: str, operation: Any) -> str | None:
    if not isinstance(operation, Replace):
        return None
    return part.replace(operation.old, operation.new) if operation.old in part else part


def _viewed(files: dict[str, Known], view: View, result: str) -> None:
    text, cut = _unwrap(result)
    lines = text.split("\n")
    looks_numbered = any(_NUMBERED.match(line) for line in lines[: _HEADER_LINES + 1])
    numbered = [m for line in lines if (m := _NUMBERED.fullmatch(line.rstrip("\r")))] if looks_numbered else []
    numbers = [int(m[1]) for m in numbered]
    cut = cut or bool(_CUT.search(text[-300:]) or _CUT.search(text[:200]))
    known = files.setdefault(view.path, Known())
    whole = view.start <= 1 and view.end is None and not cut
    consecutive = bool(numbers) and numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    if consecutive and len(lines) - len(numbered) <= _HEADER_LINES:
        body = "\n".join(m[2] for m in numbered)
        if whole and numbers[0] == 1:
            files[view.path] = Known(whole=body, newline=False)
        else:
            known.parts.append(body)
    elif not _FAILED.search(text[:100]):
        if whole:
            files[view.path] = Known(whole=text)
        else:
            known.parts.append(text)


def _unwrap(result: str) -> tuple[str, bool]:
    """The text of a result that some harnesses wrap in JSON ({"content": ...}), and whether it says that it was cut."""
    if result.lstrip().startswith("{"):
        try:
            row = json.loads(result)
        except (ValueError, RecursionError):
            return result, False
        if isinstance(row, dict) and isinstance(row.get("content"), str) and not row.get("error"):
            return row["content"], bool(row.get("truncated"))
    return result, False


def _ran(files: dict[str, Known], call: ToolCall) -> None:
    """A command that may write makes what it names, or a whole checkout, unknown."""
    text = " ".join(str(v) for v in call.arguments.values() if isinstance(v, (str, list)))
    if not _CHANGES.search(text):
        return
    for path in [*files]:
        if path.rpartition("/")[2] in text or "git " in text or "patch" in text or "*" in text:
            files.pop(path)
