"""Dates and times in equal notations: "2024-05-01T10:00Z" is "2024-05-01 12:00:00+02:00", "10 AM" is "10:00:00"."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, time

from pivotrl.verifiers.facts import DATE_NAMED, ISO_DATE, MONTHS, NAMED_DATE, TIME

Moment = tuple[str, str]  # (kind, ISO form): kinds never mix
_ISO_TIME = re.compile(r"T?\d{2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:Z|[+-]\d{2}(?::?\d{2})?)?")
_HAS_TIME = re.compile(r"\d[T ]\d")


def moment(text: str) -> Moment | None:
    """What a text that is nothing but a date, a time or both means; None for any other text.

    Slash dates are none: 5/6/2024 is two days. A time with a zone is that instant; one without is never equal to it.
    """
    text = text.strip()
    if len(text) > 64 or not text.isascii():
        return None
    try:
        if _HAS_TIME.search(text):
            return _instant(datetime.fromisoformat(text))
        if _ISO_TIME.fullmatch(text):
            return _clock(time.fromisoformat(text))
        if found := ISO_DATE.fullmatch(text):
            return "date", date(int(found[1]), int(found[2]), int(found[3])).isoformat()
        if (found := NAMED_DATE.fullmatch(text)) and found[3]:
            return "date", date(int(found[3]), MONTHS[found[1].lower()], int(found[2])).isoformat()
        if (found := DATE_NAMED.fullmatch(text)) and found[3]:
            return "date", date(int(found[3]), MONTHS[found[2].lower()], int(found[1])).isoformat()
        if found := TIME.fullmatch(text):
            return _twelve_hours(found)
    except ValueError:  # the 31st of June, 25:00
        return None
    return None


def _instant(value: datetime) -> Moment:
    if value.tzinfo is None:
        return "local date and time", value.isoformat()
    return "instant", value.astimezone(UTC).isoformat()


def _clock(value: time) -> Moment:
    return "time" if value.tzinfo is None else "time in a zone", value.isoformat()


def _twelve_hours(found: re.Match[str]) -> Moment | None:
    hour, minute, half = int(found[1] or found[4]), int(found[2] or 0), (found[3] or found[5] or "").lower()[:1]
    if half:
        if not 1 <= hour <= 12 or ":" in found[0].partition(":")[2]:
            return None
        hour = hour % 12 + 12 * (half == "p")
    return _clock(time(hour, minute))


def same_moment(expected: str, actual: str) -> bool:
    """Whether both are one date, time or instant."""
    left = moment(expected)
    return left is not None and left == moment(actual)
