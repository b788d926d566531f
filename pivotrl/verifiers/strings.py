"""String rules: when two strings count as the same, chosen for each field by `domain.verifier.options.strings`.

exact         equal after Unicode NFC; white space and case count (code, ids and passwords need them)
case          equal in lower case, as programs that ignore case compare ("ß" is not "ss")
spaces        equal but for white space that keeps no two words or operators apart ("a + b" is "a+b", "* *" not "**")
normalized    equal after NFC, case folding, and dropping punctuation and repeated white space; punctuation inside a
              number ("1.5", "10:30"), a sign before one and % # & @ stay, and strings of punctuation alone are compared
              exactly
date          one date or time in equal notations (see `moments`), else exact
similarity:x  word overlap of the normalised strings of at least x, the same words with digits, and as many negations
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
    return exact(exact_form(expected).lower(), exact_form(actual).lower())


def exact_form(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def spaceless(expected: str, actual: str) -> bool:
    return exact(*(_SPACE.sub(_needed_space, text.strip()) for text in (expected, actual)))


def _needed_space(match: re.Match[str]) -> str:
    """A space where it keeps two things apart: two words, two operators, a number and its decimal point."""
    text, start, end = match.string, match.start(), match.end()
    before, after = text[start - 1 : start], text[end : end + 1]
    words = all(char.isalnum() or char in "_." for char in (before, after))
    return " " if words or (before in _OPERATORS and after in _OPERATORS) else ""


def dated(expected: str, actual: str) -> bool:
    return exact(expected, actual) or same_moment(expected, actual)


_SPACE = re.compile(r"\s+")
_OPERATORS = "*/<>=!&|:"  # two of them in a row may be one
_MEANT = frozenset("%#&@")  # punctuation that is no decoration: 5% is not 5, C# is not C
_NEGATION = re.compile(
    r"\b(?:not|no|never|nor|none|nothing|neither|without|cannot|unable|dont|cant|wont|isnt|wasnt|didnt)\b|n't\b"
)
NUMBER_MARK = re.compile(r"(?<=\d)[.,:/'-](?=\d)|(?<!\S)[-+](?=\d)")


def normalise(text: str) -> str:
    """The form that `normalized` compares."""
    text = unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).casefold())
    kept = {match.start() for match in NUMBER_MARK.finditer(text)}
    characters = (
        " " if i not in kept and char not in _MEANT and unicodedata.category(char)[0] in "PZC" else char
        for i, char in enumerate(text)
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


def negations(text: str) -> int:
    """How many words deny something; "isn't" is one."""
    return len(_NEGATION.findall(unicodedata.normalize("NFKC", text).casefold().replace("\u2019", "'")))


def similar(expected: str, actual: str, threshold: float) -> bool:
    """Equal, or overlapping by at least `threshold` with the same numbers, ids and negations."""
    if exact(expected, actual):
        return True
    if overlap(expected, actual) < threshold or _with_digits(expected) != _with_digits(actual):
        return False
    return negations(expected) == negations(actual)


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
