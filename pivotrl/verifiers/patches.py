"""Unified diffs and apply_patch texts as edits: what each hunk replaces, found again by its text."""

from __future__ import annotations

import re
from dataclasses import dataclass

_HUNK_HEADER = re.compile(r"(?m)^@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@[^\n]*\n?")


class EditError(ValueError):
    """An edit that is malformed or does not apply."""


@dataclass(frozen=True)
class Replace:
    """`old` -> `new`; `old` must occur exactly once, or at least once with `every`."""

    old: str
    new: str
    every: bool = False


@dataclass(frozen=True)
class Write:
    """The whole file."""

    content: str


@dataclass(frozen=True)
class Insert:
    """`text` after line `line` (0: at the top, None: at the end)."""

    line: int | None
    text: str


@dataclass(frozen=True)
class Lines:
    """Lines `start`..`end`, from 1, inclusive -> `text`."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Hunk:
    """Whole lines `old` -> `new`; `near`: line (from 1) where a diff says that `old` begins, 0 if it does not say."""

    old: tuple[str, ...]
    new: tuple[str, ...]
    near: int = 0


@dataclass(frozen=True)
class Remove:
    """The file is deleted."""


Operation = Replace | Write | Insert | Lines | Hunk | Remove
Edit = tuple[str, Operation]


def apply(content: str | None, operation: Operation) -> str | None:
    """The file after `operation`; None is an absent file. Raises EditError where it does not apply."""
    if isinstance(operation, Write):
        return operation.content
    if content is None:
        raise EditError("no such file")
    if isinstance(operation, Remove):
        return None
    if isinstance(operation, Replace):
        return _replace(content, operation)
    lines = content.split("\n")
    if isinstance(operation, Hunk):
        return _hunk(lines, operation)
    text = operation.text.split("\n")
    if isinstance(operation, Insert):
        line = len(lines) if operation.line is None else operation.line
        if not 0 <= line <= len(lines):
            raise EditError("no such line")
        return "\n".join([*lines[:line], *text, *lines[line:]])
    if not 1 <= operation.start <= operation.end <= len(lines):
        raise EditError("no such lines")
    return "\n".join([*lines[: operation.start - 1], *text, *lines[operation.end :]])


def _replace(content: str, operation: Replace) -> str:
    if not operation.old or operation.old == operation.new:
        raise EditError("replaces nothing")
    count = content.count(operation.old)
    if count == 0 or (count > 1 and not operation.every):
        raise EditError(f"occurs {count} times")
    return content.replace(operation.old, operation.new)


def _hunk(lines: list[str], operation: Hunk) -> str:
    old, size = list(operation.old), len(operation.old)
    places = [i for i in range(len(lines) - size + 1) if lines[i : i + size] == old]
    if not old:
        places = [operation.near] if 0 < operation.near <= len(lines) else []
    elif len(places) > 1 and operation.near:
        places = sorted(places, key=lambda i: abs(i + 1 - operation.near))[:1]
    if len(places) != 1:
        raise EditError(f"hunk fits {len(places)} places")
    return "\n".join([*lines[: places[0]], *operation.new, *lines[places[0] + size :]])


def parse_patch(text: str) -> list[Edit]:
    """Edits of an apply_patch text ("*** Begin Patch") or of a unified diff. Raises EditError."""
    if "*** Begin Patch" in text:
        return _apply_patch(text)
    if re.search(r"^@@ ", text, re.MULTILINE) and re.search(r"^--- ", text, re.MULTILINE):
        return _unified(text)
    raise EditError("neither a unified diff nor an apply_patch text")


def _apply_patch(text: str) -> list[Edit]:
    body = text.split("*** Begin Patch", 1)[1]
    body, closed, _ = body.partition("*** End Patch")
    if not closed:
        raise EditError("patch is not closed")
    edits: list[Edit] = []
    for section in re.split(r"(?m)^\*\*\* (?=(?:Update|Add|Delete) File: )", body)[1:]:
        header, _, rest = section.partition("\n")
        kind, _, path = header.partition(" File: ")
        lines = rest.rstrip("\n").split("\n") if rest.strip("\n") else []
        if kind == "Delete":
            edits.append((path.strip(), Remove()))
        elif kind == "Add":
            if any(not line.startswith("+") for line in lines):
                raise EditError("an added file has only + lines")
            edits.append((path.strip(), Write("".join(line[1:] + "\n" for line in lines))))
        else:
            edits.extend(_update(path.strip(), lines))
    if not edits:
        raise EditError("patch without files")
    return edits


def _update(path: str, lines: list[str]) -> list[Edit]:
    hunks: list[list[str]] = [[]]
    for line in lines:
        if line.startswith("*** Move to"):
            raise EditError("a move is not understood")
        if line.startswith("*** End of File"):
            continue
        if line.startswith("@@"):
            hunks.append([])
        else:
            hunks[-1].append(line)
    return [(path, _lines_to_hunk(hunk, 0)) for hunk in hunks if hunk]


def _lines_to_hunk(lines: list[str], near: int) -> Hunk:
    """Lines marked " ", "-" or "+" (an empty line is an empty context line)."""
    if any(line[:1] not in ("", " ", "-", "+") for line in lines):
        raise EditError("a hunk line without mark")
    old = tuple(line[1:] for line in lines if line[:1] != "+")
    new = tuple(line[1:] for line in lines if line[:1] != "-")
    if old == new:
        raise EditError("replaces nothing")
    return Hunk(old, new, near)


def _unified(text: str) -> list[Edit]:
    edits: list[Edit] = []
    for section in re.split(r"(?m)^--- ", text)[1:]:
        match = re.match(r"(\S+)[^\n]*\n\+\+\+ (\S+)[^\n]*\n", section)
        if not match:
            raise EditError("--- without +++")
        source, target = (re.sub(r"^[ab]/", "", name) for name in match.groups())
        hunks = _HUNK_HEADER.split(section[match.end() :])[1:]
        parsed = [_sized_hunk(*hunks[i : i + 4]) for i in range(0, len(hunks), 4)]
        if not parsed:
            raise EditError("file without hunks")
        if target == "/dev/null":
            edits.append((source, Remove()))
        elif source == "/dev/null":
            edits.append((target, Write("".join(line + "\n" for hunk in parsed for line in hunk.new))))
        else:
            edits.extend((target, hunk) for hunk in parsed)
    return edits


def _sized_hunk(start: str, old_size: str | None, new_size: str | None, body: str) -> Hunk:
    """A hunk has as many lines as its header says; what follows (another file's header) is not part of it."""
    left_old, left_new = int(old_size or 1), int(new_size or 1)
    lines: list[str] = []
    for line in body.split("\n"):
        if left_old <= 0 and left_new <= 0:
            break
        if line.startswith("\\"):
            continue
        left_old -= line[:1] != "+"
        left_new -= line[:1] != "-"
        lines.append(line)
    if left_old or left_new:
        raise EditError("hunk size differs from its header")
    return _lines_to_hunk(lines, int(start))
