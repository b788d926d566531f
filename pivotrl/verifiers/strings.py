"""String rules: when two strings count as the same, chosen for each field by `domain.verifier.options.strings`.

exact         equal after Unicode NFC; white space and case count (code, ids and passwords need them)
case          equal but for the case of letters
spaces        equal but for white space that keeps no two words apart ("a + b" and "a+b")
normalized    equal after NFC, case folding, and dropping punctuation and repeated white space; punctuation inside a
              number ("1.5", "10:30") and a sign before one stay, and strings of punctuation alone are compared exactly
date          one date or time in equal notations (see `moments`), else exact
similarity:x  word overlap of the normalised strings of at least x, and the same words that hold digits
any           any string, but an empty one only where an empty one is expected
ignored       any string at all: the tool does nothing with it
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

from pivotrl.errors import UserError
from pivotrl.verifiers.moments import same_moment

StringRule = Callable[[str, str], bool]  # (expected, actual) -> same


def exact(expected: str, actual: str) -> bool:
    return unicodedata.normalize("NFC", expected) == unicodedata.normalize("NFC", actual)


def caseless(expected: str, actual: str) -> bool:
    return exact(unicodedata.normalize("NFC", expected).casefold(), unicodedata.normalize("NFC", actual).casefold())


def spaceless(expected: str, actual: str) -> bool:
    return exact(*(" ".join(_LOOSE_SPACE.sub("", text.strip()).split()) for text in (expected, actual)))


def dated(expected: str, actual: str) -> bool:
    return exact(expected, actual) or same_moment(expected, actual)


_LOOSE_SPACE = re.compile(r"(?<=[^\w\s])\s+|\s+(?=[^\w\s])")
NUMBER_MARK = re.compile(r"(?<=\d)[.,:/'-](?=\d)|(?<!\S)[-+](?=\d)")


def normalise(text: str) -> str:
    """The form that `normalized` compares."""
    text = unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).casefold())
    kept = {match.start() for match in NUMBER_MARK.finditer(text)}
    characters = (
        " " if i not in kept and unicodedata.category(char)[0] in "PZC" else char for i, char in enumerate(text)
    )
    return " ".join("".join(characters).split())


def normalized(expected: str, actual: str) -> bool:
    left, right = normalise(expected), normalise(actual)
    return left == right if left or right else exact(expected, actual)


def overlap(expected: str, actual: str) -> float:
    """Dice overlap of the multisets of words and word pairs of two normalised strings, in [0, 1].

    Pairs make word order count ("cancel A and keep B"), and the cost is linear in the length. 0 if either has no word.
    """
    left, right = _grams(normalise(expected)), _grams(normalise(actual))
    if not left or not right:
        return 0.0
    return 2 * (left & right).total() / (left.total() + right.total())


def _grams(text: str) -> Counter[str]:
    words = text.split()
    return Counter(words) + Counter(f"{a} {b}" for a, b in pairwise(words))


def _with_digits(text: str) -> Counter[str]:
    return Counter(word for word in normalise(text).split() if any(char.isdigit() for char in word))


def similar(expected: str, actual: str, threshold: float) -> bool:
    """Equal, or overlapping by at least `threshold` with the same numbers and ids."""
    if exact(expected, actual):
        return True
    return overlap(expected, actual) >= threshold and _with_digits(expected) == _with_digits(actual)


def _any(expected: str, actual: str) -> bool:
    return bool(actual.strip()) or not expected.strip()


def string_rule(name: object, where: str) -> StringRule:
    """The rule called `name` (see the module; "similarity:0.8"). Raises `UserError` naming `where`."""
    simple: dict[object, StringRule] = {
        "exact": exact,
        "case": caseless,
        "date": dated,
        "spaces": spaceless,
        "normalized": normalized,
        "any": _any,
        "ignored": lambda expected, actual: True,
    }
    if isinstance(name, str) and name in simple:
        return simple[name]
    threshold = similarity_threshold(name, where)
    return lambda expected, actual: similar(expected, actual, threshold)


def similarity_threshold(name: object, where: str) -> float:
    """x of "similarity:x"."""
    match = re.fullmatch(r"similarity:(\d*\.?\d+)", name) if isinstance(name, str) else None
    if match is None or not 0 < float(match[1]) <= 1:
        raise UserError(
            f"{where}={name!r}: use exact, case, date, spaces, normalized, any, ignored, or similarity:x, 0 < x <= 1."
        )
    return float(match[1])
