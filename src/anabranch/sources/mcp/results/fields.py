"""Fields of a result in an MCP reply: title, text, URL, date."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from itertools import islice
from typing import Any, NamedTuple

from anabranch.sources.mcp.text import MAX_KEY, normalized, one_line, printable, ranked

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
    found = None
    with suppress(ValueError, TypeError, IndexError, OverflowError):
        if isinstance(value, str):
            found = _from_string(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found = _from_number(value)
    return found if found is not None and EARLIEST < found < LATEST else None


def _from_number(number: float) -> float | None:
    if number == 0 or not abs(number) < 10**20:
        return None
    whole = int(number)
    if number == whole and 1_000 <= whole <= 9_999:
        return _midnight(whole)
    if number == whole and 10**7 <= whole < 10**8:
        with suppress(ValueError):
            return _midnight(whole // 10_000, whole // 100 % 100, whole % 100)
    for size, per_second in ((10**11, 1), (10**14, 10**3), (10**17, 10**6)):
        if abs(number) < size:
            return number / per_second
    return number / 10**9


def _from_string(raw: str) -> float | None:
    if len(raw) > MAX_LENGTH:
        return None
    text = " ".join(raw.split())
    if NUMBER.fullmatch(text):
        return _from_number(float(text) if "." in text else int(text))
    if digits := DIGITS.fullmatch(text):
        year, month = digits.groups()
        return _midnight(int(year), int(month or 1))
    if EMAIL.fullmatch(text):
        return _timestamp(parsedate_to_datetime(text))
    return _from_iso(text) if text[:1].isdigit() and text[3:4].isdigit() else _from_words(text)


def _from_iso(text: str) -> float | None:
    text = text.upper().replace("/", "-")
    text = re.sub(r" ?(?:UTC|GMT)$", "Z", text)
    text = re.sub(r" (?=[+-][0-9]{2})", "", text)
    try:
        return _timestamp(datetime.fromisoformat(text))
    except ValueError:
        unpadded = UNPADDED.match(text)
        return _midnight(*map(int, unpadded.groups())) if unpadded else None


def _from_words(text: str) -> float | None:
    found = IN_WORDS.fullmatch(text)
    if found is None:
        return None
    month = MONTHS.index((found["month"] or found["month2"])[:3].lower()) + 1
    return _midnight(int(found["year"] or found["year2"]), month, int(found["day"] or found["day2"] or 1))


def _midnight(year: int, month: int = 1, day: int = 1) -> float:
    return datetime(year, month, day, tzinfo=UTC).timestamp()


def _timestamp(found: datetime) -> float:
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


MAX_TEXT = 20_000
MAX_TITLE = 300
MAX_FIRST_LINE = 80
MAX_URL = 2_000
MAX_ID = 300
# How much of one result is read: keys of an object, items of a list, levels of nesting.
MAX_KEYS = 300
MAX_PARTS = 500
MAX_DESCRIPTIONS = 3
DEPTH = 4


TITLES = ranked(
    "title name headline heading subject displayname fullname pagetitle documenttitle doctitle entityname filename"
    " label path key"
)
# An object with one of these is a result, not a wrapper around results.
BODIES = ranked(
    "text pagecontent chunktext chunkcontent content body markdown fulltext plaintext chunk passage snippet excerpt"
    " extract observations bodytext selftext"
)
TEXTS = BODIES | {
    name: len(BODIES) + rank
    for name, rank in ranked(
        "description summary abstract highlights highlight rawcontent contents message answer memory fact document"
        " documentation definition quote comment transcript caption html details response output result value"
    ).items()
}
URLS = ranked(
    "htmlurl weburl webviewlink permalink canonicalurl url link href uri pageurl sourceurl sourceuri documenturl"
    " articleurl fileurl website source"
)
DATES = ranked(
    "lastmodified lastmodifieddate lastmodifieddatetime lastmodifiedtime updatedat modifiedat modified updated"
    " lastupdated lastupdatedate lastupdatedat dateupdated datemodified modifiedtime modifieddate updatedtime"
    " updateddate lastedited lasteditedtime editedat mtime publishedat published publisheddate publishedtime"
    " datepublished pubdate publicationdate publishdate releasedate date datetime createdat created createdtime"
    " datecreated creationdate createddate createddatetime timestamp ts time year"
)
IDS = ranked("documentid docid id uuid identifier guid pageid fileid nodeid entityid chunkid")
SCORES = ranked("score relevancescore relevance similarity similarityscore certainty confidence")
# Wrappers of a result, and metadata objects beside it.
WRAPPERS = ranked(
    "source node fields metadata meta attributes properties document doc item payload entity resource record page data"
    " frontmatter result response"
)
# The keys of the value, in an object that represents one value.
INNER = ("rendered", "plain_text", "title", "text", "value", "content", "raw", "name", "start", "$date", "seconds")
# Clients show it as a link, so script URLs are excluded.
URL = re.compile(
    r"(?!(?:javascript|data|vbscript|blob):)(?:[a-z][a-z0-9+.-]{1,30}://|urn:|doi:)[^\s\x00-\x1f<>\"]+", re.IGNORECASE
)


class ResultFields(NamedTuple):
    title: str
    text: str
    url: str | None = None
    date: float | None = None
    document_id: str | None = None
    score: float = 0.0


def url_or_none(text: str) -> str | None:
    text = printable(text[: MAX_URL + 1])
    return text if len(text) <= MAX_URL and URL.fullmatch(text) else None


def from_text(raw: str, title: str = "") -> ResultFields | None:
    """None if the text is empty. The default title is the text's first line."""
    text = printable(raw)
    if not text:
        return None
    if len(text) > MAX_TEXT:
        cut = max(text.rfind(" ", MAX_TEXT - 200, MAX_TEXT), text.rfind("\n", MAX_TEXT - 200, MAX_TEXT))
        text = text[: cut if cut > 0 else MAX_TEXT].rstrip()
    first = text.split("\n", 1)[0]
    return ResultFields(one_line(title, MAX_TITLE) or one_line(first.lstrip("# "), MAX_FIRST_LINE), text)


def from_object(result: Mapping[str, Any]) -> ResultFields | None:
    result = _unwrap_aggregated(result)
    named = _flatten(result)
    title = next((words for value in _values(named, TITLES) if (words := one_line(_words(value), MAX_TITLE))), "")
    found = from_text(_text(named) or _lines(result, title) or title, title)
    if found is None:
        return None
    return found._replace(
        url=next((url for value in _values(named, URLS) if (url := url_or_none(_link(value)))), None),
        date=next((when for value in _values(named, DATES) if (when := _date(value)) is not None), None),
        document_id=next((name for value in _values(named, IDS) if (name := _id(value))), None),
        score=next((score for value in _values(named, SCORES) if (score := _score(value)) is not None), 0.0),
    )


def _unwrap_aggregated(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """The original result in a result of another aggregator, whose fetch time is not the document's date."""
    inner = result.get("server_result")
    content = inner.get("content") if isinstance(inner, dict) else None
    if isinstance(content, str):
        content = {"text": content}
    return {"score": result.get("relevance_score"), **content} if isinstance(content, dict) and content else result


def has_text(result: Mapping[str, Any], names: Mapping[str, int] = TEXTS) -> bool:
    """Whether it has, on its top level, text under one of these names."""
    return any(normalized(name) in names and _words_of(value).strip() for name, value in _items(result))


def _items(result: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    return islice(result.items(), MAX_KEYS)


def _flatten(result: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
    """Its fields and those of its wrappers, by normalized name; the outer ones win."""
    named: dict[str, Any] = {}
    wrapped = []
    for name, value in _items(result):
        key = normalized(name)
        if isinstance(value, dict) and key in WRAPPERS:
            wrapped.append(value)
        elif value is not None and value not in ("", [], {}):
            named.setdefault(key, value)
    for inner in wrapped if depth < DEPTH else ():
        named = _flatten(inner, depth + 1) | named
    return named


def _values(named: Mapping[str, Any], ranks: Mapping[str, int]) -> list[Any]:
    return [named[name] for name in sorted(named.keys() & ranks.keys(), key=ranks.__getitem__)]


def _words_of(value: object) -> str:
    """The text of a value; empty for a number."""
    return "" if isinstance(value, int | float) else _words(value)


def _words(value: object, depth: int = 0) -> str:
    """A string, the string inside an object, or the items of a list, one per line."""
    if isinstance(value, str):
        return value
    if depth > DEPTH or value is None or isinstance(value, bool):
        return ""
    if isinstance(value, int | float):
        return _number(value)
    if isinstance(value, dict):
        inner = next((value[name] for name in INNER if value.get(name)), None)
        # Highlights are lists by field.
        parts = [inner] if inner is not None else [part for _, part in _items(value) if isinstance(part, list | str)]
    elif isinstance(value, list):
        parts = value[:MAX_PARTS]
    else:
        return ""
    texts, left = [], MAX_TEXT
    for part in parts:
        if left > 0 and (words := _words(part, depth + 1)).strip():
            texts.append(words)
            left -= len(words)
    return "\n".join(texts)


def _number(value: float) -> str:
    # Python raises an error for an integer of thousands of digits.
    return str(value) if abs(value) < 10**30 else ""


def _text(named: Mapping[str, Any]) -> str:
    """Its body, or its descriptions if it has none. The type of an entity is included, because servers search by it."""
    body = next((words for value in _values(named, BODIES) if (words := _words_of(value)).strip()), "")
    descriptions = (_words_of(value) for value in _values(named, TEXTS)) if not body else ()
    text = body or "\n".join(
        dict.fromkeys(islice((words for words in descriptions if words.strip()), MAX_DESCRIPTIONS))
    )
    kind = named.get("entitytype")
    return f"Type: {one_line(kind, MAX_KEY)}\n{text}" if text and isinstance(kind, str) else text


def _lines(result: Mapping[str, Any], title: str) -> str:
    """Its fields as `name: value` lines, if it has more than its title."""
    lines = list(_field_lines(result))
    return "\n".join(lines) if len(lines) > 1 or not title else ""


def _field_lines(result: Mapping[str, Any], depth: int = 0) -> Iterator[str]:
    for name, value in _items(result):
        if isinstance(value, dict) and normalized(name) in WRAPPERS and depth < DEPTH:
            yield from _field_lines(value, depth + 1)
            continue
        if isinstance(value, bool):
            text = "yes" if value else "no"
        elif isinstance(value, list):
            text = ", ".join(filter(None, (_words(part, DEPTH) for part in value[:20])))
        else:
            text = _words(value, DEPTH - 1)
        if text.strip() and isinstance(name, str):
            yield f"{one_line(name, MAX_KEY)}: {one_line(text, 1_000)}"


def _link(value: object) -> str:
    if isinstance(value, dict):
        value = next((value[name] for name in ("html", "href", "url", "web", "self") if value.get(name)), "")
    while isinstance(value, list) and value:
        value = value[0]
    return value if isinstance(value, str) else ""


def _date(value: object) -> float | None:
    if isinstance(value, dict):
        value = next((value[name] for name in INNER if value.get(name)), None)
    return parse_date(value)


def _id(value: object) -> str | None:
    if not isinstance(value, str | int) or isinstance(value, bool):
        return None
    name = printable(value) if isinstance(value, str) else _number(value)
    return name if 0 < len(name) <= MAX_ID else None


def _score(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if 0 <= value <= 1 else None
