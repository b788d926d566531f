"""Words of bash: literal text joined from its quoted and unquoted parts."""

from __future__ import annotations

import re
from typing import Any

Word = str | tuple[Any, ...]

_ANSI_C = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "f": "\f", "v": "\v"}


class NotUnderstood(Exception):
    """The text is not bash, or has a shape that this module does not know to be lossless."""


def merge(parts: list[tuple[Any, ...]]) -> Word:
    """Join literal neighbours. An empty quoted part counts only beside an expansion that may vanish or be split."""
    if all(part[0] == "s" for part in parts):
        return "".join(part[1] for part in parts)
    splitting = any(part[0] in ("v", "x", "c") and not part[2] for part in parts)
    merged: list[tuple[Any, ...]] = []
    for part in parts:
        if part == ("s", "") and not splitting:
            continue
        if part[0] == "s" and merged and merged[-1][0] == "s":
            merged[-1] = ("s", merged[-1][1] + part[1])
        else:
            merged.append(part)
    return tuple(merged)


def decode_ansi_c(text: str) -> str:
    """The text of $'...': octal, hexadecimal, Unicode and letter escapes."""
    pattern = r"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{1,4})|U([0-9a-fA-F]{1,8})|c(.)|(.))"

    def value(match: re.Match[str]) -> str:
        octal, hexadecimal, short, long, control, letter = match.groups()
        if control is not None:
            raise NotUnderstood("control escape")
        if octal or hexadecimal:
            code = int(octal, 8) if octal else int(hexadecimal, 16)
            if not 0 < code < 128:
                raise NotUnderstood("a byte, not a character")
            return chr(code)
        if short or long:
            if not (code := int(short or long, 16)):
                raise NotUnderstood("the word ends at a zero")
            return chr(code)
        if letter in "\\'\"?":
            return letter
        return _ANSI_C.get(letter) or "\\" + letter

    return re.sub(pattern, value, text, flags=re.DOTALL)
