"""What a result is called, says, and where and when it stands, by the names that servers give to such fields."""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

from anabranch.sources.mcp.results.dates import moment

MAX_TEXT = 20_000
MAX_TITLE = 300
MAX_FIRST_LINE = 80
MAX_ADDRESS = 2_000
MAX_IDENTITY = 300
MAX_KEY = 64
# How far one result is looked into: keys of an object, parts of a list, levels of both.
MAX_KEYS = 300
MAX_PARTS = 500
MAX_ABOUT = 3
DEPTH = 4


def ranked(names: str) -> dict[str, int]:
    return {name: rank for rank, name in enumerate(names.split())}


TITLES = ranked(
    "title name headline heading subject displayname fullname pagetitle documenttitle doctitle entityname filename"
    " label path key"
)
# Whoever has one of these is a result, and no wrapping around results.
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
ADDRESSES = ranked(
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
IDENTITIES = ranked("documentid docid id uuid identifier guid pageid fileid nodeid entityid chunkid")
SCORES = ranked("score relevancescore relevance similarity similarityscore certainty confidence")
# What stands around a result, or beside it and speaks of it.
WRAPPERS = ranked(
    "source node fields metadata meta attributes properties document doc item payload entity resource record page data"
    " frontmatter result response"
)
# Where an object stands for one value.
INNER = ("rendered", "plain_text", "title", "text", "value", "content", "raw", "name", "start", "$date", "seconds")
# Whoever shows it will make a link of it: nothing that runs.
ADDRESS = re.compile(
    r"(?!(?:javascript|data|vbscript|blob):)(?:[a-z][a-z0-9+.-]{1,30}://|urn:|doi:)[^\s\x00-\x1f<>\"]+", re.IGNORECASE
)


# Ends of lines of every kind are one.
ODD = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
UNSHOWN: dict[int, str | None] = {
    **dict.fromkeys((*range(32), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))),
    **{ord(sign): sign for sign in "\t\n"},
    **dict.fromkeys((0x0B, 0x0C, 0x85, 0x2028, 0x2029), "\n"),
}


class ResultFields(NamedTuple):
    title: str
    text: str
    url: str | None = None
    date: float | None = None
    document_id: str | None = None
    score: float = 0.0


def plain(name: object) -> str:
    """pageContent, page_content and page-content are one name."""
    return _plain(name) if isinstance(name, str) and len(name) <= MAX_KEY else ""


@lru_cache(maxsize=4_096)
def _plain(name: str) -> str:
    """Results have the same names again and again."""
    return "".join(filter(str.isalnum, name.lower()))


def whole(text: str) -> str:
    """Without halves of characters, and without signs that are for machines or turn what follows around: neither a
    terminal nor a database should get them from a stranger."""
    text = text.encode(errors="replace").decode()
    return (text.translate(UNSHOWN) if ODD.search(text) else text).strip()


def line(text: str, limit: int) -> str:
    shown = " ".join(whole(text[: 8 * limit]).split())
    return shown if len(shown) <= limit else shown[: limit - 1].rstrip() + "…"


def address(text: str) -> str | None:
    text = whole(text[: MAX_ADDRESS + 1])
    return text if len(text) <= MAX_ADDRESS and ADDRESS.fullmatch(text) else None


def of_text(given: str, title: str = "") -> ResultFields | None:
    """None where nothing is said. Without a title it is the text's first line."""
    text = whole(given)
    if not text:
        return None
    if len(text) > MAX_TEXT:
        cut = max(text.rfind(" ", MAX_TEXT - 200, MAX_TEXT), text.rfind("\n", MAX_TEXT - 200, MAX_TEXT))
        text = text[: cut if cut > 0 else MAX_TEXT].rstrip()
    first = text.split("\n", 1)[0]
    return ResultFields(line(title, MAX_TITLE) or line(first.lstrip("# "), MAX_FIRST_LINE), text)


def of_object(given: Mapping[str, Any]) -> ResultFields | None:
    given = _found_elsewhere(given)
    named = _gathered(given)
    title = next((words for value in _best(named, TITLES) if (words := line(_words(value), MAX_TITLE))), "")
    found = of_text(_text(named) or _lines(given, title) or title, title)
    if found is None:
        return None
    return found._replace(
        url=next((url for value in _best(named, ADDRESSES) if (url := address(_first(value)))), None),
        date=next((when for value in _best(named, DATES) if (when := _moment(value)) is not None), None),
        document_id=next((name for value in _best(named, IDENTITIES) if (name := _identity(value))), None),
        score=next((score for value in _best(named, SCORES) if (score := _score(value)) is not None), 0.0),
    )


def _found_elsewhere(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """What another aggregator has ranked is what its server found; when it was fetched is no date of its own."""
    result = given.get("server_result")
    content = result.get("content") if isinstance(result, dict) else None
    if isinstance(content, str):
        content = {"text": content}
    return {"score": given.get("relevance_score"), **content} if isinstance(content, dict) and content else given


def telling(given: Mapping[str, Any], names: Mapping[str, int] = TEXTS) -> bool:
    """Has it, itself, words under one of these names?"""
    return any(plain(name) in names and _said(value).strip() for name, value in _some(given))


def _some(given: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    return islice(given.items(), MAX_KEYS)


def _gathered(given: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
    """Its fields and those of what it wraps, by their plain names; the outer ones win."""
    named: dict[str, Any] = {}
    wrapped = []
    for name, value in _some(given):
        key = plain(name)
        if isinstance(value, dict) and key in WRAPPERS:
            wrapped.append(value)
        elif value is not None and value not in ("", [], {}):
            named.setdefault(key, value)
    if depth < DEPTH:
        for inner in wrapped:
            for key, value in _gathered(inner, depth + 1).items():
                named.setdefault(key, value)
    return named


def _best(named: Mapping[str, Any], ranks: Mapping[str, int]) -> list[Any]:
    return [named[name] for name in sorted(named.keys() & ranks.keys(), key=ranks.__getitem__)]


def _said(value: object) -> str:
    """A number says nothing by itself."""
    return "" if isinstance(value, int | float) else _words(value)


def _words(value: object, depth: int = 0) -> str:
    """A string, what an object says instead of one, or the parts of a list, one to a line."""
    if isinstance(value, str):
        return value
    if depth > DEPTH or value is None or isinstance(value, bool):
        return ""
    if isinstance(value, int | float):
        return _figure(value)
    if isinstance(value, dict):
        inner = next((value[name] for name in INNER if value.get(name)), None)
        # Highlights come as lists by the field that they were found in.
        parts = [inner] if inner is not None else [part for _, part in _some(value) if isinstance(part, list | str)]
    elif isinstance(value, list):
        parts = value[:MAX_PARTS]
    else:
        return ""
    said, room = [], MAX_TEXT
    for part in parts:
        if room > 0 and (words := _words(part, depth + 1)).strip():
            said.append(words)
            room -= len(words)
    return "\n".join(said)


def _figure(value: float) -> str:
    # Python refuses to write out an integer of thousands of digits.
    return str(value) if abs(value) < 10**30 else ""


def _text(named: Mapping[str, Any]) -> str:
    """Its body; where it has none, what is said about it. A thing's kind is found by, so it is to be seen."""
    body = next((words for value in _best(named, BODIES) if (words := _said(value)).strip()), "")
    about = (_said(value) for value in _best(named, TEXTS)) if not body else ()
    said = body or "\n".join(dict.fromkeys(islice((words for words in about if words.strip()), MAX_ABOUT)))
    kind = named.get("entitytype")
    return f"Type: {line(kind, MAX_KEY)}\n{said}" if said and isinstance(kind, str) else said


def _lines(given: Mapping[str, Any], title: str) -> str:
    """Readable lines of its fields, where it has more of them than its title."""
    lines = list(_listed(given))
    return "\n".join(lines) if len(lines) > 1 or not title else ""


def _listed(given: Mapping[str, Any], depth: int = 0) -> Iterator[str]:
    for name, value in _some(given):
        if isinstance(value, dict) and plain(name) in WRAPPERS and depth < DEPTH:
            yield from _listed(value, depth + 1)
            continue
        if isinstance(value, bool):
            said = "yes" if value else "no"
        elif isinstance(value, list):
            said = ", ".join(filter(None, (_words(part, DEPTH) for part in value[:20])))
        else:
            said = _words(value, DEPTH - 1)
        if said.strip() and isinstance(name, str):
            yield f"{line(name, MAX_KEY)}: {line(said, 1_000)}"


def _first(value: object) -> str:
    if isinstance(value, dict):
        value = next((value[name] for name in ("html", "href", "url", "web", "self") if value.get(name)), "")
    while isinstance(value, list) and value:
        value = value[0]
    return value if isinstance(value, str) else ""


def _moment(value: object) -> float | None:
    if isinstance(value, dict):
        value = next((value[name] for name in INNER if value.get(name)), None)
    return moment(value)


def _identity(value: object) -> str | None:
    if not isinstance(value, str | int) or isinstance(value, bool):
        return None
    name = whole(value) if isinstance(value, str) else _figure(value)
    return name if 0 < len(name) <= MAX_IDENTITY else None


def _score(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if 0 <= value <= 1 else None
