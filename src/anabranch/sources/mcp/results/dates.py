"""Parses dates in the formats that servers use."""

import re
from datetime import UTC, date, datetime, time
from email.utils import parsedate_to_datetime

MAX_LENGTH = 100
EARLIEST = datetime.min.replace(tzinfo=UTC).timestamp()
LATEST = datetime.max.replace(tzinfo=UTC).timestamp()

MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
NUMBER = re.compile(r"-?[0-9]{9,20}(?:\.[0-9]{1,9})?")
DIGITS = re.compile(r"([0-9]{4})(?:[-/.]?([0-9]{2}))?")
UNPADDED = re.compile(r"([0-9]{4})[-/.]([0-9]{1,2})[-/.]([0-9]{1,2})\b")
EMAIL = re.compile(r"(?:[a-z]{3},\s*)?[0-9]{1,2}\s[a-z]{3}\s[0-9]{4}\s[0-9]{1,2}:[0-9]{2}.*", re.IGNORECASE)
IN_WORDS = re.compile(
    r"(?:[a-z]{3,9},?\s)?"
    r"(?:(?P<day>[0-9]{1,2})(?:st|nd|rd|th)?\s(?:of\s)?(?P<month>[a-z]{3,9})[.,]{0,2}\s(?P<year>[0-9]{4})"
    r"|(?P<month2>[a-z]{3,9})\.?\s(?:(?P<day2>[0-9]{1,2})(?:st|nd|rd|th)?,?\s)?(?P<year2>[0-9]{4}))"
    r"(?:,?\s(?:at\s)?[0-9]{1,2}:[0-9]{2}.*)?",
    re.IGNORECASE,
)


def parse_date(value: object) -> float | None:
    """Seconds since 1970, or None if it cannot be parsed. A date without a time means midnight, a time without a zone
    means UTC, and a number is a time since 1970 in the unit that its size suggests. Zero means unknown."""
    if isinstance(value, str):
        found = _from_string(value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        found = _from_number(value)
    else:
        return None
    return found if found is not None and EARLIEST < found < LATEST else None


def _from_number(number: float) -> float | None:
    if number == 0 or not abs(number) < 10**20:
        return None
    whole = int(number)
    if number == whole and 1_000 <= whole <= 9_999:
        return _midnight(whole)
    if number == whole and 10**7 <= whole < 10**8:
        compact = _midnight(whole // 10_000, whole // 100 % 100, whole % 100)
        if compact is not None:
            return compact
    for size, per_second in ((10**11, 1), (10**14, 10**3), (10**17, 10**6)):
        if abs(number) < size:
            return number / per_second
    return number / 10**9


def _from_string(given: str) -> float | None:
    if len(given) > MAX_LENGTH:
        return None
    text = " ".join(given.split())
    if NUMBER.fullmatch(text):
        return _from_number(float(text) if "." in text else int(text))
    if digits := DIGITS.fullmatch(text):
        year, month = digits.groups()
        return _midnight(int(year), int(month or 1))
    if EMAIL.fullmatch(text):
        return _from_email(text)
    return _from_iso(text) if text[:1].isdigit() and text[3:4].isdigit() else _from_words(text)


def _from_iso(text: str) -> float | None:
    text = text.upper().replace("/", "-")
    text = re.sub(r" ?(?:UTC|GMT)$", "Z", text)
    text = re.sub(r" (?=[+-][0-9]{2})", "", text)
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        unpadded = UNPADDED.match(text)
        return _midnight(*map(int, unpadded.groups())) if unpadded else None
    return _timestamp(found)


def _from_email(text: str) -> float | None:
    try:
        found = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return _timestamp(found)


def _from_words(text: str) -> float | None:
    found = IN_WORDS.fullmatch(text)
    if found is None:
        return None
    month = (found["month"] or found["month2"])[:3].lower()
    if month not in MONTHS:
        return None
    return _midnight(
        int(found["year"] or found["year2"]), MONTHS.index(month) + 1, int(found["day"] or found["day2"] or 1)
    )


def _midnight(year: int, month: int = 1, day: int = 1) -> float | None:
    try:
        return datetime.combine(date(year, month, day), time(), UTC).timestamp()
    except ValueError:
        return None


def _timestamp(found: datetime) -> float:
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
