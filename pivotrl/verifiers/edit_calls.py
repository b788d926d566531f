"""Tool calls of software-engineering harnesses read as edits or views, by the shape of their arguments."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from pivotrl.trajectories.schema import JsonDict, ToolCall
from pivotrl.verifiers.patches import Edit, EditError, Insert, Lines, Replace, Write, parse_patch
from pivotrl.verifiers.shell_tools import normalise_path

PATH_FIELDS = (
    "path",
    "file_path",
    "filepath",
    "filePath",
    "filename",
    "file_name",
    "file",
    "dir",
    "directory",
    "target_file",
)
_OLD_NEW = (
    ("old_str", "new_str"),
    ("old_string", "new_string"),
    ("oldText", "newText"),
    ("old_text", "new_text"),
    ("oldString", "newString"),
    ("search", "replace"),
)
_NUMBERS = ("insert_line", "line", "start_line", "end_line", "offset", "limit")
_EVERY = ("replace_all", "replaceAll", "replace-all", "allow_multiple")
_CONTENT = ("file_text", "content", "contents", "text")
_PATCH = ("patch", "input", "diff", "patch_text")
_WRITERS = ("write", "create", "save")
_READERS = ("view", "read", "open_file", "cat_file")
# Spellings of one thing: a tool knows one of them, whichever the demonstration uses.
_ALIASES = (
    PATH_FIELDS,
    tuple(old for old, _ in _OLD_NEW),
    tuple(new for _, new in _OLD_NEW),
    _EVERY,
    _CONTENT,
    _PATCH,
    ("insert_line", "line"),
    ("new_str", "insert_text"),
)
_RANGES = (("view_range",), ("start_line", "end_line"), ("offset", "limit"))
OPEN_FILE = "<open file>"  # SWE-agent edits the file that is open


@dataclass(frozen=True)
class EditCall:
    edits: tuple[Edit, ...]
    rest: JsonDict  # arguments that say nothing about the file; compared as they are


@dataclass(frozen=True)
class View:
    """Lines `start`..`end` of a file or directory, from 1 (from 0 where an offset says so), inclusive; `end` None: to
    the end."""

    path: str
    start: int
    end: int | None
    rest: JsonDict


def full_path(path: str, cwd: str | None) -> str:
    """One spelling of a path: no `./`, `//` or trailing slash, and absolute where the working directory is known."""
    short = normalise_path(path).rstrip("/") or path
    return f"{cwd.rstrip('/')}/{short}" if cwd and short and not short.startswith(("/", "~", "<")) else short


def edit_call(call: ToolCall, cwd: str | None) -> EditCall | None:
    """The edits of `call`; None if it is none (or is malformed, so that it only equals itself)."""
    try:
        edits, used = _edits(call.name, call.arguments)
    except (EditError, TypeError, ValueError, OverflowError):
        return None
    if not edits:
        return None
    rest = {k: v for k, v in call.arguments.items() if k not in used and not (k == "mode" and v == "replace")}
    return EditCall(
        tuple((full_path(path, cwd), operation) for path, operation in edits), rest | _written(call.arguments)
    )


def same_spelling(expected: JsonDict, actual: JsonDict) -> bool:
    """Whether `actual` names what both give as `expected` does: `file_path` where the tool takes `path` is no argument
    of it, and neither is a second spelling beside the first."""
    for names in _ALIASES:
        wanted, given = ({name for name in names if name in arguments} for arguments in (expected, actual))
        if wanted and given and not given <= wanted:
            return False
    forms = [
        [i for i, form in enumerate(_RANGES) if any(n in arguments for n in form)] for arguments in (expected, actual)
    ]
    return not (forms[0] and forms[1]) or forms[0] == forms[1]


def _line(value: Any) -> int:
    """A line number: an integer, or its digits in a grammar whose values are texts. Raises ValueError."""
    if type(value) is int or (isinstance(value, str) and re.fullmatch(r"-?\d{1,9}", value.strip())):
        return int(value)
    raise ValueError(f"{value!r} is no line number")


def _written(arguments: JsonDict) -> JsonDict:
    """Which numbers are written as texts: "5" is not 5."""
    found = sorted(name for name in (*_NUMBERS, *_EVERY) if isinstance(arguments.get(name), str))
    return {"(numbers as texts)": found} if found else {}


def _edits(name: str, arguments: JsonDict) -> tuple[list[Edit], set[str]]:
    path_field = next((f for f in PATH_FIELDS if isinstance(arguments.get(f), str)), None)
    path = arguments[path_field] if path_field else OPEN_FILE
    used = {path_field or ""}
    verb = name.lower()
    if "command" in arguments:
        verb = arguments["command"]
        used.add("command")
        if verb not in ("str_replace", "create", "insert"):
            return [], used
    for field in _PATCH:
        text = arguments.get(field)
        if isinstance(text, str) and ("*** Begin Patch" in text or "\n@@ " in text):
            return parse_patch(text), used | {field, "mode"}
    if isinstance(arguments.get("edits"), list):
        return [(path, _replacement(edit)) for edit in arguments["edits"]], used | {"edits"}
    if "insert" in verb:
        line_field = next((f for f in ("insert_line", "line") if f in arguments), None)
        text_field = next(
            (f for f in ("new_str", "insert_text", "text", "content") if isinstance(arguments.get(f), str)), None
        )
        if text_field is None:
            return [], used
        line = None if line_field is None else _line(arguments[line_field])
        return [(path, Insert(line, arguments[text_field]))], used | {line_field or "", text_field}
    if any(old in arguments for old, _ in _OLD_NEW) and (path_field or "edit" in verb or "replace" in verb):
        replacement = _replacement(arguments)
        pair = next(pair for pair in _OLD_NEW if isinstance(arguments.get(pair[0]), str))
        return [(path, replacement)], used | {*pair} | set(_EVERY)
    text_field = next((f for f in _CONTENT if isinstance(arguments.get(f), str)), None)
    if text_field and "start_line" in arguments and "end_line" in arguments:
        lines = Lines(_line(arguments["start_line"]), _line(arguments["end_line"]), arguments[text_field])
        return [(path, lines)], used | {text_field, "start_line", "end_line"}
    if path_field and any(writer in verb for writer in _WRITERS):
        if text_field:
            return [(path, Write(arguments[text_field]))], used | {text_field}
        if verb == "create" and set(arguments) <= {path_field}:
            return [(path, Write(""))], used
    return [], used


def _replacement(arguments: Any) -> Replace:
    for old, new in _OLD_NEW if isinstance(arguments, dict) else ():
        if isinstance(arguments.get(old), str) and isinstance(arguments.get(new, ""), str):
            every = any(arguments.get(f) is True or arguments.get(f) in ("true", "True") for f in _EVERY)
            return Replace(arguments[old], arguments.get(new, ""), every)
    raise EditError("no text to replace")


def view_call(call: ToolCall, cwd: str | None) -> View | None:
    """What `call` shows of a file; None if it is no view."""
    arguments = call.arguments
    path_field = next((f for f in PATH_FIELDS if isinstance(arguments.get(f), str)), None)
    name = call.name.lower()
    is_view = arguments["command"] == "view" if "command" in arguments else any(reader in name for reader in _READERS)
    if path_field is None or not is_view:
        return None
    used = {path_field, "view_range", "offset", "limit", "start_line", "end_line"}
    used |= {"command"} if "command" in arguments else set()
    rest = {k: v for k, v in arguments.items() if k not in used}
    try:
        start, end = _range(arguments)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None
    if start < (0 if "offset" in arguments else 1) or (end is not None and end < start):  # some tools count from 0
        return None
    return View(full_path(arguments[path_field], cwd), start, end, rest | _written(arguments))


def _range(arguments: JsonDict) -> tuple[int, int | None]:
    if arguments.get("view_range") is not None:
        given = arguments["view_range"]
        start, end = json.loads(given) if isinstance(given, str) else given
        if type(start) is not int or type(end) is not int:
            raise ValueError(f"{given!r} is no range of lines")
        return start, None if end == -1 else end
    if arguments.get("start_line") is not None or arguments.get("end_line") is not None:
        start, end = arguments.get("start_line"), arguments.get("end_line")
        last = None if end is None or _line(end) == -1 else _line(end)
        return 1 if start is None else _line(start), last
    start, limit = arguments.get("offset"), arguments.get("limit")
    first = 1 if start is None else _line(start)
    return first, None if limit is None else first + _line(limit) - 1
