"""JSON as the standard writes it, and nothing more.

Python's reader takes NaN, the last of duplicate keys, lone surrogates and infinite floats in silence. Each of these
becomes something else, or a crash, in a later stage; here each is refused with a machine-readable reason.
"""

from __future__ import annotations

import json
import math
from typing import Any

MAX_DEPTH = 100  # levels of nesting; far above real data, far below where encoders and copies overflow the stack


class StrictJsonError(ValueError):
    """Refused JSON. `reason`: not_json, duplicate_key, non_finite_number, number_too_long, too_deep,
    lone_surrogate or bad_encoding."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise StrictJsonError("duplicate_key", f"key {key[:80]!a} occurs twice in one object")
            seen.add(key)
    return result


def _constant(name: str) -> Any:
    raise StrictJsonError("non_finite_number", f"{name} is not JSON")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise StrictJsonError("non_finite_number", f"{text[:40]} does not fit a double")
    return value


def _int(text: str) -> int:
    # Python refuses over 4300 digits, other readers much earlier; no identifier or amount is this long.
    if len(text) > 310:
        raise StrictJsonError("number_too_long", f"an integer of {len(text)} characters")
    return int(text)


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_constant=_constant, parse_float=_float, parse_int=_int, strict=True
)


_CONTAINERS = (dict, list)  # of a decoded value: exactly these, no subclasses


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            if node.__class__ in _CONTAINERS
            for child in (node.values() if node.__class__ is dict else node)
            if child.__class__ in _CONTAINERS
        ]
        if not level:
            return
    raise StrictJsonError("too_deep", f"nested deeper than {MAX_DEPTH} levels")


def _check_surrogates(text: str, start: int, end: int, value: Any) -> None:
    # Raw halves come from text that was decoded loosely; escaped ones need the (slower) look at the decoded value.
    escaped = text.find("\\ud", start, end) >= 0 or text.find("\\uD", start, end) >= 0
    try:
        text[start:end].encode("utf-8")
        if escaped:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise StrictJsonError("lone_surrogate", "half of a UTF-16 pair, which is no character") from error


def raw_decode(text: str, start: int = 0) -> tuple[Any, int]:
    """The JSON value that begins at `start`, and the index after it. Raises `StrictJsonError`."""
    try:
        value, end = _DECODER.raw_decode(text, start)
    except StrictJsonError:
        raise
    except RecursionError as error:
        raise StrictJsonError("too_deep", f"nested deeper than {MAX_DEPTH} levels") from error
    except json.JSONDecodeError as error:
        raise StrictJsonError("not_json", f"{error.msg} at character {error.pos}") from error
    if text.count("{", start, end) + text.count("[", start, end) > MAX_DEPTH:  # else it cannot be deeper
        _check_depth(value)
    _check_surrogates(text, start, end, value)
    return value, end


_FOREIGN = {
    b"\xff\xfe": "UTF-16: convert the file to UTF-8",
    b"\xfe\xff": "UTF-16: convert the file to UTF-8",
    b"\x1f\x8b": "gzip: name the file .gz",
    b"\x28\xb5\x2f\xfd": "Zstandard: name the file .zst",
}


def loads(data: str | bytes) -> Any:
    """Decode one JSON document. Raises `StrictJsonError`."""
    try:
        whole = data if isinstance(data, str) else data.decode("utf-8")
    except UnicodeDecodeError as error:
        kind = next((f" ({hint})" for mark, hint in _FOREIGN.items() if error.object.startswith(mark)), "")
        raise StrictJsonError("bad_encoding", f"not UTF-8: byte {error.start} of the row{kind}") from error
    text = whole.strip(" \t\r\n")
    value, end = raw_decode(text)
    if end != len(text):
        raise StrictJsonError("not_json", f"text after the value, from character {end}")
    return value
