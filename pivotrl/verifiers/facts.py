"""Salient values of a message: what a customer would have to be told right (ids, money, numbers, dates, e-mails)."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

MONTHS = {
    name: number
    for number, names in enumerate(
        ("jan january", "feb february", "mar march", "apr april", "may", "jun june", "jul july", "aug august")
        + ("sep sept september", "oct october", "nov november", "dec december"),
        start=1,
    )
    for name in names.split()
}
_MONTH = "|".join(sorted(MONTHS, key=len, reverse=True))
_NUMBER = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?"
# Look-behinds let a long run of characters be tried once, not from each of its characters (quadratic time).
EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
ISO_DATE = re.compile(r"\b(\d{4})-(\d{1,2})-(\d{1,2})(?!\d)T?")
SLASH_DATE = re.compile(r"\b(\d{1,2})/(\d{1,2})/(\d{4})\b")
NAMED_DATE = re.compile(rf"\b({_MONTH})\.?\s+(\d{{1,2}})(?:st|nd|rd|th)?\b(?:,?\s+(\d{{4}})\b)?", re.IGNORECASE)
DATE_NAMED = re.compile(
    rf"\b(\d{{1,2}})(?:st|nd|rd|th)?\s+(?:of\s+)?({_MONTH})\b\.?(?:,?\s+(\d{{4}})\b)?", re.IGNORECASE
)
TIME = re.compile(
    r"\b(\d{1,2}):(\d{2})(?::\d{2})?(?!\d)\s?([ap]\.?m\b)?|\b(\d{1,2})\s?([ap]\.?m)\b",
    re.IGNORECASE,
)
MONEY = re.compile(
    rf"(?P<before>[$€£¥])\s?(?P<a>{_NUMBER})|(?<!\d)(?<!\d[,.])(?P<b>{_NUMBER})\s?(?P<after>€|£|(?:usd|eur|gbp|dollars?|euros?|pounds?)\b)",
    re.IGNORECASE,
)
CURRENCIES = {"$": "usd", "dollar": "usd", "€": "eur", "euro": "eur", "£": "gbp", "pound": "gbp", "¥": "jpy"}
QUOTED = re.compile(r"""(?<!\w)(["'`“‘])([A-Za-z0-9#][\w#-]{1,39})(["'`”’])(?!\w)""")
# A word with a letter and a digit (EUJUY6, ORD-1042, user_4047), or numbered with "#"; not "15th" or "24-hour".
ID = re.compile(r"#[A-Za-z0-9][\w-]*|(?<![\w-])(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[A-Za-z0-9]+(?:[_-][A-Za-z0-9]+)*\b")
PLAIN_WORD = re.compile(r"\d+(?:st|nd|rd|th|h|hrs?|mins?|kg|lbs?|k|x)|\d+(?:-[a-z]+)+", re.IGNORECASE)
NUMBER = re.compile(rf"(?<![\w.])[-+]?(?:{_NUMBER})(?![\w]|\.\d)|(?:{_NUMBER})")
LIST_MARK = re.compile(r"^\s*(?:[-*]\s+)?\d{1,2}[.)]\s+", re.MULTILINE)
QUESTION = re.compile(r"\?(?=[\s\"')*\]]|$)")


@dataclass(frozen=True)
class Facts:
    """Values by kind ("id", "email", "money", "date", "time", "number"), in one written form each."""

    values: frozenset[tuple[str, str]]
    asks: bool

    def kinds(self) -> set[str]:
        return {kind for kind, _ in self.values}


def facts_of(text: str) -> Facts:
    """Extract the salient values of `text`; each stretch of text counts for one kind only, in the order below."""
    text = unicodedata.normalize("NFC", text)
    asks = QUESTION.search(text) is not None
    text = LIST_MARK.sub(" ", text)
    found: set[tuple[str, str]] = set()

    def take(pattern: re.Pattern[str], read: object) -> None:
        nonlocal text

        def replace(match: re.Match[str]) -> str:
            value = read(match)  # type: ignore[operator]
            if value is None:
                return match[0]
            found.add(value)
            return " "

        text = pattern.sub(replace, text)

    take(EMAIL, lambda m: ("email", m[0].casefold().rstrip(".")))
    take(ISO_DATE, lambda m: _date(m[1], m[2], m[3]))
    take(SLASH_DATE, lambda m: _date(m[3], m[1], m[2]) or _date(m[3], m[2], m[1]))
    take(NAMED_DATE, lambda m: _date(m[3], MONTHS[m[1].lower()], m[2]))
    take(DATE_NAMED, lambda m: _date(m[3], MONTHS[m[2].lower()], m[1]))
    take(TIME, _time)
    take(MONEY, _money)
    take(QUOTED, lambda m: ("id", m[2].lstrip("#").upper()) if re.search(r"[A-Z0-9#_-]", m[2]) else None)
    take(ID, lambda m: None if PLAIN_WORD.fullmatch(m[0]) else ("id", m[0].lstrip("#").upper()))
    take(NUMBER, lambda m: ("number", _decimal(m[0])))
    return Facts(frozenset(found), asks)


def _date(year: str | None, month: str | int, day: str) -> tuple[str, str] | None:
    m, d = int(month), int(day)
    return ("date", f"{year or '????'}-{m:02d}-{d:02d}") if 1 <= m <= 12 and 1 <= d <= 31 else None


def _time(match: re.Match[str]) -> tuple[str, str] | None:
    hour, minute, half = int(match[1] or match[4]), int(match[2] or 0), (match[3] or match[5] or "").lower()[:1]
    if hour > (12 if half else 24) or minute > 59:
        return None
    return "time", f"{hour % 12 + 12 * (half == 'p') if half else hour:02d}:{minute:02d}"


def _money(match: re.Match[str]) -> tuple[str, str]:
    unit = (match["before"] or match["after"]).lower()
    unit = CURRENCIES.get(unit.rstrip("s"), unit)
    return "money", f"{_decimal(match['a'] or match['b'])} {unit}"


def _decimal(text: str) -> str:
    try:
        return f"{Decimal(text.replace(',', '')).normalize():f}"
    except InvalidOperation:  # more digits than the context holds
        return text


def compare(expected: Facts, actual: Facts) -> str | None:
    """None if the messages tell the same; else "fact_missing", "fact_added" or "question_differs".

    Every expected value must be told, and no other value of the same kinds. A date without a year equals one with it.
    """
    if any(not _told(value, actual) for value in expected.values):
        return "fact_missing"
    kinds = expected.kinds()
    if any(value[0] in kinds and not _told(value, expected) for value in actual.values):
        return "fact_added"
    return None if expected.asks == actual.asks else "question_differs"


def _told(value: tuple[str, str], facts: Facts) -> bool:
    kind, text = value
    if kind != "date":
        return value in facts.values
    return any(
        k == kind and other[4:] == text[4:] and (other[:4] == text[:4] or "????" in (other[:4], text[:4]))
        for k, other in facts.values
    )
