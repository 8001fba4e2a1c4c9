"""Replies that are a piece of a knowledge graph: what ties a thing to others is said of the thing itself."""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from anabranch.domain.errors import AnabranchError
from anabranch.sources.mcp.results.fields import ADDRESSES, BODIES, DATES, TEXTS, TITLES, line, plain, ranked, telling

MAX_THINGS = 1_000
MAX_TIES = 5_000
MAX_EACH = 100
MAX_NAME = 300

FROM = ("from", "source")
TO = ("to", "target")
HOW = ("relationtype", "relation", "type", "predicate", "label")


def tied(given: Mapping[str, Any]) -> list[Any] | None:
    """The things in `{"entities": […], "relations": […]}`, each with its relations as sentences among what is known of
    it; only the sentences where no things are there. None where it is no such reply."""
    named = {plain(name): value for name, value in islice(given.items(), MAX_EACH)}
    things, relations = named.get("entities"), named.get("relations")
    if not isinstance(things, list) or not isinstance(relations, list):
        return None
    ties: dict[str, dict[str, None]] = {}
    sentences: dict[str, None] = {}
    for relation in relations[:MAX_TIES]:
        if isinstance(relation, dict) and (read := _read(relation)) is not None:
            begin, how, end = read
            sentence = f"{begin} {how} {end}"
            sentences[sentence] = None
            for name in (begin, end):
                if len(of_name := ties.setdefault(name, {})) < MAX_EACH:
                    of_name[sentence] = None
    return [_with(thing, ties) for thing in things[:MAX_THINGS]] if things else list(sentences)


def _read(relation: Mapping[str, Any]) -> tuple[str, str, str] | None:
    named = {plain(name): value for name, value in islice(relation.items(), MAX_EACH)}
    parts = [
        next((line(said, MAX_NAME) for name in names if isinstance(said := named.get(name), str)), "")
        for names in (FROM, HOW, TO)
    ]
    begin, how, end = parts
    return (begin, how.replace("_", " "), end) if all(parts) else None


def _with(thing: Any, ties: Mapping[str, Mapping[str, None]]) -> Any:
    name = thing.get("name") if isinstance(thing, dict) else None
    known = ties.get(line(name, MAX_NAME)) if isinstance(name, str) else None
    if known is None:
        return thing
    observed = thing.get("observations")
    before = observed if isinstance(observed, list) else [observed]
    return {**thing, "observations": [*before, *known]}


# A result, before it is read: an object, or a text.
Found = Mapping[str, Any] | str

MAX_RESULTS = 1_000
MAX_VISITED = 2_000
DEPTH = 5
MAX_SEGMENTS = 20
MAX_PROSE = 100

LISTS = tuple(
    ranked(
        "results hits matches items documents docs entities edges nodes records rows result data entries search"
        " articles memories pages chunks passages snippets issues messages files repositories posts papers pullrequests"
        " threads tickets tasks notes products events answers sources references webresults organicresults organic"
        " value content contents relations"
    )
)
# These say that results are in them, whatever else stands beside them.
CERTAIN = LISTS[: LISTS.index("rows")]
# Beside one of these, a list whose parts say nothing only tells who was asked.
ANSWERS = ranked("answer")
LABELS = frozenset([*TEXTS, *ADDRESSES, *DATES])
SEGMENT = re.compile(r"""\.?([^.\[\]]{1,200})|\[(-?[0-9]{1,9}|\*|'[^']{1,200}'|"[^"]{1,200}")\]""")
LABELLED = re.compile(
    r"[ \t]*(?:[-*•][ \t]+|[0-9]{1,4}[.)][ \t]+)?(?:\*\*)?([A-Za-z][A-Za-z _-]{1,30})(?:\*\*)?:(?:\*\*)?(.*)"
)
NOTHING = re.compile(
    r"(?:sorry,? )?(?:no|0|zero) (?:\w+ ){0,2}?(?:results?|match(?:es)?|documents?|entries|items?|files?|pages?|nodes?"
    r"|hits?|records?|memories|articles?|issues?|repositories)"
    r"(?: (?:was|were))?(?: (?:found|available|returned))?(?: (?:for|matching|in|with|on) .{0,200})?[.!]?",
    re.IGNORECASE,
)


class Unreadable(AnabranchError):
    code = "unreadable_reply"


def parsed(text: str) -> Any:
    """The list or object that a text is in JSON: plain, a line to each, or in one fence; None where it is none."""
    text = text.strip().removeprefix("\ufeff")
    if text.startswith(("{", "[")):
        found = _loaded(text)
        return _lines(text) if found is None else found
    start, end = text.find("```", 0, MAX_PROSE), text.rfind("```")
    if 0 <= start < end and start + len(text) - end <= MAX_PROSE:
        name, _, fenced = text[start + 3 : end].partition("\n")
        return _loaded(fenced) if plain(name.strip()) in ("", "json") else None
    return None


def _loaded(text: str) -> Any:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list | dict) else None


def _lines(text: str) -> list[Any] | None:
    found: list[Any] = []
    for row in text.split("\n"):
        if row.strip() and len(found) < MAX_RESULTS:
            value = _loaded(row)
            if not isinstance(value, dict):
                return None
            found.append(value)
    return found if len(found) > 1 else None


def in_text(text: str) -> list[Found]:
    value = parsed(text)
    if value is not None:
        return in_json(value)
    if NOTHING.fullmatch(text.strip()):
        return []
    return _labelled(text) or ([text] if text.strip() else [])


def in_json(value: Any) -> list[Found]:
    """The results in a list or an object; an object around no list is one itself."""
    for _ in range(DEPTH):
        if not isinstance(value, dict) or len(value) != 1 or plain(next(iter(value))) in TITLES:
            break
        inner = next(iter(value.values()))
        if not isinstance(inner, dict | list | str):
            break
        value = inner
    if isinstance(value, str):
        return in_text(value)
    if isinstance(value, list):
        return _each(value)
    if not isinstance(value, dict) or not value:
        return []
    inside = tied(value)
    if inside is None:
        inside = _inside(value)
    return [value] if inside is None else _each(inside)


def _each(values: list[Any], depth: int = 0) -> list[Found]:
    found: list[Found] = []
    for value in values:
        if len(found) >= MAX_RESULTS:
            break
        if isinstance(value, dict) and value:
            found.append(value)
        elif isinstance(value, str) and value.strip():
            inner = parsed(value)
            found.append(inner if isinstance(inner, dict) and inner else value)
        elif isinstance(value, list) and depth < DEPTH:
            found.extend(_each(value, depth + 1))
    return found[:MAX_RESULTS]


def _inside(outer: Mapping[str, Any]) -> list[Any] | None:
    """The list of results in an object: the shallowest of a known name, else the longest. An empty one where only empty
    ones have such names; None where the object is a result itself."""
    empty: list[Any] | None = None
    others: list[list[Any]] = []
    level, visited = [outer], 0
    for _ in range(DEPTH):
        deeper: list[Mapping[str, Any]] = []
        for holder in level:
            is_result = _is_result(holder)
            is_answer = telling(holder, ANSWERS)
            named = {plain(name): _opened(value) for name, value in islice(holder.items(), MAX_VISITED)}
            for name in CERTAIN if is_result else LISTS:
                if isinstance(value := named.get(name), list):
                    if is_answer and name not in CERTAIN and not _tells(value):
                        continue
                    if _usable(value):
                        return value
                    empty = value
            if not is_result:
                deeper += (value for value in named.values() if isinstance(value, dict))
                if not telling(holder) and not telling(holder, TITLES):
                    others += (value for value in named.values() if isinstance(value, list) and _usable(value))
            visited += len(named)
            if visited > MAX_VISITED:
                break
        level = deeper[:MAX_VISITED]
    return max(others, key=len, default=None) if empty is None else empty


def _is_result(given: Mapping[str, Any]) -> bool:
    is_body = any(
        plain(name) in BODIES and (isinstance(value, str) or plain(name) == "observations") and value
        for name, value in islice(given.items(), MAX_VISITED)
    )
    return is_body or (telling(given, TITLES) and telling(given))


def _opened(value: Any) -> Any:
    return parsed(value) if isinstance(value, str) else value


def _tells(values: list[Any]) -> bool:
    return any(isinstance(value, dict) and telling(value) for value in values[:MAX_RESULTS])


def _usable(values: list[Any]) -> bool:
    return any(isinstance(value, dict | list | str) and value for value in values[:MAX_RESULTS])


def at(path: str, value: Any) -> Any:
    """What stands at a path such as `data.items`, `results[0].hits` or `$.x`; a name after a list is taken of each of
    its objects. Raises LookupError where the path leads nowhere."""
    segments = _segments(path)
    for name, index in segments:
        if isinstance(value, str):
            value = parsed(value)
        if isinstance(value, list) and name is not None:
            value = [part[name] for part in value if isinstance(part, dict) and name in part]
            if not value:
                raise LookupError(name)
        elif name is not None:
            if not isinstance(value, dict):
                raise LookupError(name)
            value = value[name]
        elif not isinstance(value, list):
            raise LookupError(index)
        elif index is not None:
            value = value[index]
    return value


def _segments(path: str) -> Sequence[tuple[str | None, int | None]]:
    rest = path.strip().removeprefix("$")
    segments: list[tuple[str | None, int | None]] = []
    while rest:
        found = SEGMENT.match(rest)
        if found is None or len(segments) >= MAX_SEGMENTS:
            raise LookupError(path)
        name, bracket = found.groups()
        if bracket is None or bracket[0] in "'\"":
            segments.append((name or bracket[1:-1], None))
        else:
            segments.append((None, None if bracket == "*" else int(bracket)))
        rest = rest[found.end() :]
    return segments


def _labelled(text: str) -> list[Found]:
    """Results that a server writes out for people: "Title: …", "URL: …", "Text: …", again and again. Only a text that
    is all of that form is taken apart."""
    found: list[dict[str, list[str]]] = []
    before, last = 0, ""
    for row in text.split("\n"):
        label = LABELLED.fullmatch(row)
        name = plain(label[1]) if label else ""
        begins = name in ("title", "name") and (not found or len(found[-1]) > 1)
        if begins and len(found) >= MAX_RESULTS:
            break
        if begins:
            found.append({})
        if not found:
            before += len(row)
        elif label and (begins or (name in LABELS and name not in found[-1])):
            found[-1][name], last = [label[2]], name
        else:
            found[-1][last].append(row)
    if before > MAX_PROSE or any(len(result) == 1 for result in found):
        return []
    return [{name: "\n".join(rows).strip("\n -=_*#") for name, rows in one.items()} for one in found]
