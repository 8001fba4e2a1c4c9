"""JSON and JSONL: one block per record, its text first and the other fields as "path: value" lines."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from anabranch.knowledge.model import Parsed, Unprocessable
from anabranch.knowledge.parse.builder import ParseLimits, TextBuilder, check_text, clean, day, line, unique
from anabranch.knowledge.parse.builder import tags as keywords

# Numbers keep their notation.
Json: TypeAlias = "dict[str, Json] | list[Json] | str | bool | None"

_TITLES = ("title", "headline", "subject", "name")
_TEXTS = ("text", "content", "body", "description", "abstract", "summary", "message", "page_content")
_AUTHORS = ("author", "creator", "byline")
_DATES = ("date", "created_date", "created_at", "created", "published_at", "published", "datePublished")
_TAGS = ("tags", "keywords", "categories")
_PARAGRAPHS = re.compile(r"\n\s*\n")
_TOO_DEEP = "The JSON is nested too deeply. Flatten it, or ingest its parts."


def looks_like_json(text: str) -> bool:
    text = text.strip()
    return text[:1] + text[-1:] in ("{}", "[]")


def read_json(text: str, limits: ParseLimits) -> Parsed:
    check_text(len(text), limits)
    try:
        value = _loads(text)
    except json.JSONDecodeError as error:
        first = text[: error.pos]
        if error.msg == "Extra data" and "\n" in first and "\n" not in first.strip():
            return read_jsonl(text, limits)  # a .json file with one record per line
        raise _damaged(f"in line {error.lineno:,}, column {error.colno:,}", error) from None
    draft = TextBuilder(limits)
    if not isinstance(value, dict):
        for element in value if isinstance(value, list) else [value]:
            _add(draft, element, ())
        return draft.parsed()
    if _first(value, _TEXTS)[1]:
        _add(draft, value, (), whole=True)
    else:
        _add_wrapper(draft, value)
    return draft.parsed(
        title=line(_first(value, _TITLES)[1]),
        author=line(_first(value, _AUTHORS)[1]),
        created_date=day(_first(value, _DATES)[1]),
        tags=_tags(value),
    )


def read_jsonl(text: str, limits: ParseLimits) -> Parsed:
    check_text(len(text), limits)
    draft = TextBuilder(limits)
    for number, entry in enumerate(text.split("\n"), 1):
        try:
            if entry.strip():
                _add(draft, _loads(entry), ())
        except json.JSONDecodeError as error:
            raise _damaged(f"in line {number:,}", error) from None
    return draft.parsed()


def _loads(text: str) -> Json:
    try:
        value: Json = json.loads(text, parse_int=str, parse_float=str, parse_constant=str)
    except RecursionError:
        raise Unprocessable(_TOO_DEEP) from None
    return value


def _damaged(where: str, error: json.JSONDecodeError) -> Unprocessable:
    return Unprocessable(f"The JSON is damaged {where}: {error.msg}. Write it again.")


def _add_wrapper(draft: TextBuilder, value: dict[str, Json]) -> None:
    """An object that is not a record itself: the records in its lists are added one by one, under the list's name."""
    plain: dict[str, Json] = {key: each for key, each in value.items() if not isinstance(each, list | dict)}
    draft.add("\n".join(_lines(plain)))
    for key, each in value.items():
        headers = tuple(filter(None, (line(key),)))
        if isinstance(each, list) and each and all(isinstance(item, dict) for item in each):
            for item in each:
                _add(draft, item, headers)
        elif isinstance(each, list | dict):
            draft.add("\n".join(_lines({key: each})), headers=headers)


def _add(draft: TextBuilder, value: Json, headers: tuple[str, ...], *, whole: bool = False) -> None:
    if not isinstance(value, dict):
        draft.add("\n".join(_lines(value)), headers=headers)
        return
    title_key, title = _first(value, _TITLES)
    text_key, text = _first(value, _TEXTS)
    if not text:
        title_key, title = None, ""
    rest = {key: each for key, each in value.items() if key not in (title_key, text_key)}
    together = "\n\n".join(part for part in (title, clean(text), "\n".join(_lines(rest))) if part.strip())
    for part in _PARAGRAPHS.split(together) if whole else [together]:
        draft.add(part, headers=(*headers, *filter(None, (line(title),))))


def _first(record: dict[str, Json], keys: Sequence[str]) -> tuple[str | None, str]:
    for key in keys:
        value = record.get(key)
        if isinstance(value, str) and value.strip():
            return key, value
    return None, ""


def _tags(record: dict[str, Json]) -> tuple[str, ...]:
    for key in _TAGS:
        value = record.get(key)
        if isinstance(value, list):
            return unique([word for word in value if isinstance(word, str)])
        if isinstance(value, str):
            return keywords(value)
    return ()


def _lines(value: Json) -> Iterator[str]:
    """`path: value` for every leaf; a list of plain values is one line."""
    pending: list[tuple[str, Json]] = [("", value)]
    while pending:
        path, each = pending.pop()
        if isinstance(each, dict):
            pending += [(f"{path}.{key}" if path else key, inner) for key, inner in reversed(each.items())]
        elif isinstance(each, list) and any(isinstance(item, dict | list) for item in each):
            pending += [(f"{path}[{place}]", inner) for place, inner in reversed(list(enumerate(each)))]
        elif words := ", ".join(map(_scalar, each)) if isinstance(each, list) else _scalar(each):
            yield f"{path}: {words}" if path else words


def _scalar(value: Json) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value.strip() if isinstance(value, str) else ""
