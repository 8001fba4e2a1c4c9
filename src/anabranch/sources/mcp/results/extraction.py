"""Finds the results in the reply of an MCP tool and makes passages of them."""

import asyncio
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any
from urllib.parse import unquote

from mcp_types import (
    Annotations,
    AudioContent,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)
from pydantic import ValidationError

from anabranch.domain.errors import AnabranchError, FailureKind, UpstreamError
from anabranch.domain.mcp import McpServer
from anabranch.domain.model import Passage
from anabranch.sources.mcp.results.fields import (
    BODIES,
    DATES,
    MAX_TITLE,
    TEXTS,
    TITLES,
    URLS,
    ResultFields,
    from_object,
    from_text,
    has_text,
    parse_date,
    url_or_none,
)
from anabranch.sources.mcp.text import normalized, one_line, ranked

MAX_ENTITIES = 1_000
MAX_RELATIONS = 5_000
MAX_EACH = 100
MAX_NAME = 300

SUBJECTS = ("from", "source")
OBJECTS = ("to", "target")
PREDICATES = ("relationtype", "relation", "type", "predicate", "label")


def graph_entities(given: Mapping[str, Any]) -> list[Any] | None:
    """The entities of a knowledge graph, `{"entities": […], "relations": […]}`, each with its relations as sentences
    among its observations. Only the sentences if there are no entities; None if the reply is not a graph."""
    named = {normalized(name): value for name, value in islice(given.items(), MAX_EACH)}
    entities, relations = named.get("entities"), named.get("relations")
    if not isinstance(entities, list) or not isinstance(relations, list):
        return None
    relations_of: dict[str, dict[str, None]] = {}
    sentences: dict[str, None] = {}
    for relation in relations[:MAX_RELATIONS]:
        if isinstance(relation, dict) and (parts := _relation(relation)) is not None:
            subject, predicate, target = parts
            sentence = f"{subject} {predicate} {target}"
            sentences[sentence] = None
            for name in (subject, target):
                if len(known := relations_of.setdefault(name, {})) < MAX_EACH:
                    known[sentence] = None
    return (
        [_with_relations(entity, relations_of) for entity in entities[:MAX_ENTITIES]] if entities else list(sentences)
    )


def _relation(relation: Mapping[str, Any]) -> tuple[str, str, str] | None:
    named = {normalized(name): value for name, value in islice(relation.items(), MAX_EACH)}
    parts = [
        next((one_line(said, MAX_NAME) for name in names if isinstance(said := named.get(name), str)), "")
        for names in (SUBJECTS, PREDICATES, OBJECTS)
    ]
    subject, predicate, target = parts
    return (subject, predicate.replace("_", " "), target) if all(parts) else None


def _with_relations(entity: Any, relations_of: Mapping[str, Mapping[str, None]]) -> Any:
    name = entity.get("name") if isinstance(entity, dict) else None
    known = relations_of.get(one_line(name, MAX_NAME)) if isinstance(name, str) else None
    if known is None:
        return entity
    observed = entity.get("observations")
    before = observed if isinstance(observed, list) else [observed]
    return {**entity, "observations": [*before, *known]}


# A result before its fields are read: an object or a text.
Result = Mapping[str, Any] | str

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
# Names that always mean a list of results, whatever other fields there are.
CERTAIN = LISTS[: LISTS.index("rows")]
# Beside one of these fields, a list whose items have no text is not a list of results.
ANSWERS = ranked("answer")
LABELS = frozenset([*TEXTS, *URLS, *DATES])
SEGMENT = re.compile(r"""\.?([^.\[\]]{1,200})|\[(-?[0-9]{1,9}|\*|'[^']{1,200}'|"[^"]{1,200}")\]""")
LABELLED = re.compile(
    r"[ \t]*(?:[-*•][ \t]+|[0-9]{1,4}[.)][ \t]+)?(?:\*\*)?([A-Za-z][A-Za-z _-]{1,30})(?:\*\*)?:(?:\*\*)?(.*)"
)
NO_RESULTS = re.compile(
    r"(?:sorry,? )?(?:no|0|zero) (?:\w+ ){0,2}?(?:results?|match(?:es)?|documents?|entries|items?|files?|pages?|nodes?"
    r"|hits?|records?|memories|articles?|issues?|repositories)"
    r"(?: (?:was|were))?(?: (?:found|available|returned))?(?: (?:for|matching|in|with|on) .{0,200})?[.!]?",
    re.IGNORECASE,
)


class Unreadable(AnabranchError):
    code = "unreadable_reply"


def parse_json(text: str) -> Any:
    """The list or object in a JSON text: plain, as JSON lines, or in one code fence; None if there is none."""
    text = text.strip().removeprefix("\ufeff")
    if text.startswith(("{", "[")):
        found = _load(text)
        return _load_lines(text) if found is None else found
    start, end = text.find("```", 0, MAX_PROSE), text.rfind("```")
    if 0 <= start < end and start + len(text) - end <= MAX_PROSE:
        name, _, fenced = text[start + 3 : end].partition("\n")
        return _load(fenced) if normalized(name.strip()) in ("", "json") else None
    return None


def _load(text: str) -> Any:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list | dict) else None


def _load_lines(text: str) -> list[Any] | None:
    found: list[Any] = []
    for row in text.split("\n"):
        if row.strip() and len(found) < MAX_RESULTS:
            value = _load(row)
            if not isinstance(value, dict):
                return None
            found.append(value)
    return found if len(found) > 1 else None


def results_in_text(text: str) -> list[Result]:
    value = parse_json(text)
    if value is not None:
        return results_in(value)
    if NO_RESULTS.fullmatch(text.strip()):
        return []
    return _labelled(text) or ([text] if text.strip() else [])


def results_in(value: Any) -> list[Result]:
    """The results in a list or an object. An object that contains no list of results is one result."""
    for _ in range(DEPTH):
        if not isinstance(value, dict) or len(value) != 1 or normalized(next(iter(value))) in TITLES:
            break
        inner = next(iter(value.values()))
        if not isinstance(inner, dict | list | str):
            break
        value = inner
    if isinstance(value, str):
        return results_in_text(value)
    if isinstance(value, list):
        return _results(value)
    if not isinstance(value, dict) or not value:
        return []
    items = graph_entities(value)
    if items is None:
        items = _list_in(value)
    return [value] if items is None else _results(items)


def _results(values: list[Any], depth: int = 0) -> list[Result]:
    found: list[Result] = []
    for value in values:
        if len(found) >= MAX_RESULTS:
            break
        if isinstance(value, dict) and value:
            found.append(value)
        elif isinstance(value, str) and value.strip():
            inner = parse_json(value)
            found.append(inner if isinstance(inner, dict) and inner else value)
        elif isinstance(value, list) and depth < DEPTH:
            found.extend(_results(value, depth + 1))
    return found[:MAX_RESULTS]


def _list_in(outer: Mapping[str, Any]) -> list[Any] | None:
    """The list of results in an object: the shallowest with a known name, else the longest. Empty if all lists with
    known names are empty; None if the object is a result itself."""
    empty: list[Any] | None = None
    others: list[list[Any]] = []
    level, visited = [outer], 0
    for _ in range(DEPTH):
        deeper: list[Mapping[str, Any]] = []
        for holder in level:
            is_result = _is_result(holder)
            is_answer = has_text(holder, ANSWERS)
            named = {normalized(name): _parsed_value(value) for name, value in islice(holder.items(), MAX_VISITED)}
            for name in CERTAIN if is_result else LISTS:
                if isinstance(value := named.get(name), list):
                    if is_answer and name not in CERTAIN and not _any_has_text(value):
                        continue
                    if _has_values(value):
                        return value
                    empty = value
            if not is_result:
                deeper += (value for value in named.values() if isinstance(value, dict))
                if not has_text(holder) and not has_text(holder, TITLES):
                    others += (value for value in named.values() if isinstance(value, list) and _has_values(value))
            visited += len(named)
            if visited > MAX_VISITED:
                break
        level = deeper[:MAX_VISITED]
    return max(others, key=len, default=None) if empty is None else empty


def _is_result(given: Mapping[str, Any]) -> bool:
    is_body = any(
        normalized(name) in BODIES and (isinstance(value, str) or normalized(name) == "observations") and value
        for name, value in islice(given.items(), MAX_VISITED)
    )
    return is_body or (has_text(given, TITLES) and has_text(given))


def _parsed_value(value: Any) -> Any:
    return parse_json(value) if isinstance(value, str) else value


def _any_has_text(values: list[Any]) -> bool:
    return any(isinstance(value, dict) and has_text(value) for value in values[:MAX_RESULTS])


def _has_values(values: list[Any]) -> bool:
    return any(isinstance(value, dict | list | str) and value for value in values[:MAX_RESULTS])


def at_path(path: str, value: Any) -> Any:
    """The value at a path such as `data.items`, `results[0].hits` or `$.x`. A name after a list applies to each of its
    objects. Raises LookupError if there is no such value."""
    segments = _segments(path)
    for name, index in segments:
        if isinstance(value, str):
            value = parse_json(value)
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


def _labelled(text: str) -> list[Result]:
    """Results in text for people: "Title: …", "URL: …", "Text: …", repeatedly. A text that has any other form is not
    split."""
    found: list[dict[str, list[str]]] = []
    before, last = 0, ""
    for row in text.split("\n"):
        label = LABELLED.fullmatch(row)
        name = normalized(label[1]) if label else ""
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


LARGE = 100_000
# Threads of their own: searching, embedding and token counting use the default ones.
READERS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="mcp")
MAX_BLOCKS = 5_000
BLOCKS: Mapping[str, type[ContentBlock]] = {
    "text": TextContent,
    "image": ImageContent,
    "audio": AudioContent,
    "resource_link": ResourceLink,
    "resource": EmbeddedResource,
}


def tool_result(reply: Mapping[str, Any]) -> CallToolResult:
    """A tool's reply, decoded block by block: malformed blocks are skipped."""
    if reply.get("resultType") == "input_required":
        raise UpstreamError("The server asks for more input, which a search cannot provide.", FailureKind.REQUEST)
    if reply.keys().isdisjoint(("content", "structuredContent", "isError")):
        raise UpstreamError("The server's reply does not follow the MCP specification.", FailureKind.UNUSABLE)
    content = reply.get("content")
    blocks = content[:MAX_BLOCKS] if isinstance(content, list) else ()
    return CallToolResult(
        content=[block for one in blocks if (block := _content_block(one)) is not None],
        structured_content=reply.get("structuredContent"),
        is_error=reply.get("isError") is True,
    )


def _content_block(given: Any) -> ContentBlock | None:
    if not isinstance(given, dict):
        return None
    kind = given.get("type")
    model = BLOCKS.get(kind) if isinstance(kind, str) else None
    if model is None:
        return None
    plain = {name: value for name, value in given.items() if name not in ("annotations", "_meta")}
    for fields in (given, plain):
        try:
            return model.model_validate(fields, by_name=False)
        except ValidationError:
            continue
    return None


def passages(result: CallToolResult, server: McpServer) -> tuple[Passage, ...]:
    """At most MAX_RESULTS, in the server's order. If there is structured content, the text repeats it and is
    ignored. Images, audio and blobs are ignored."""
    found = (fields for fields in _read(result, server.result_path) if fields is not None)
    return tuple(_passage(fields, server.name) for fields in islice(found, MAX_RESULTS))


def is_large(result: CallToolResult) -> bool:
    """Whether it may take long to read, by the length of its text and the number of its structured values."""
    texts = sum(len(block.text) for block in result.content if isinstance(block, TextContent))
    return texts > LARGE or not _is_small(result.structured_content, LARGE // 100)


def _is_small(value: object, most: int) -> bool:
    """Whether it has at most so many values, on all levels together."""
    left, seen = [value], 0
    while left:
        one = left.pop()
        if isinstance(one, dict | list):
            seen += len(one)
            if seen > most:
                return False
            left.extend(one.values() if isinstance(one, dict) else one)
        elif isinstance(one, str):
            seen += len(one) // 100
    return seen <= most


def _passage(fields: ResultFields, server: str) -> Passage:
    return Passage(
        source=server,
        title=fields.title or server,
        text=fields.text,
        score=fields.score,
        document_id=fields.document_id,
        url=fields.url,
        date=fields.date,
    )


def _read(result: CallToolResult, path: str | None) -> Iterator[ResultFields | None]:
    if path is not None:
        yield from map(_fields, _at(path, result))
        return
    structured = _structured(result)
    yield from map(_fields, structured or ())
    for block in result.content:
        if structured is None or not isinstance(block, TextContent):
            yield from _block(block)


def _structured(result: CallToolResult) -> list[Result] | None:
    """None if there is none, or only metadata about the text, such as its length. An empty list means no results: the
    text is then not searched."""
    value = result.structured_content
    if not value:
        return None
    found = results_in(value)
    is_metadata = len(found) == 1 and found[0] is value and isinstance(value, dict) and not has_text(value)
    texts = [block.text for block in result.content if isinstance(block, TextContent) and block.text.strip()]
    return None if is_metadata and any(parse_json(text) is None for text in texts) else found


def _at(path: str, result: CallToolResult) -> list[Result]:
    texts = [block.text for block in result.content if isinstance(block, TextContent)]
    structured = [] if result.structured_content is None else [result.structured_content]
    for values in (structured, [value for text in texts if (value := parse_json(text)) is not None]):
        found: list[Any] = []
        for value in values:
            try:
                found.append(at_path(path, value))
            except LookupError:
                continue
        if found:
            return [result for value in found for result in results_in(value)]
    raise Unreadable(
        f"The reply has nothing at resultPath {one_line(path, 100)!r}: set it to the path of the results, or"
        " remove it to have them located automatically."
    )


def _fields(found: Result) -> ResultFields | None:
    return from_text(found) if isinstance(found, str) else from_object(found)


def _block(block: ContentBlock) -> Iterator[ResultFields | None]:
    date = _last_modified(block.annotations)
    match block:
        case TextContent():
            for found in results_in_text(block.text):
                fields = _fields(found)
                yield fields._replace(date=date) if fields and fields.date is None else fields
        case ResourceLink():
            fields = from_text(block.description or "") or from_text(block.title or block.name) or from_text(block.uri)
            if fields:
                title = one_line(block.title or block.name, MAX_TITLE) or fields.title
                yield fields._replace(title=title, url=url_or_none(block.uri), date=date)
        case EmbeddedResource(resource=TextResourceContents() as resource):
            name = unquote(resource.uri[-300:].rstrip("/").rpartition("/")[2])
            fields = from_text(resource.text, name if any(map(str.isalpha, name)) else "")
            yield fields._replace(url=url_or_none(resource.uri), date=date) if fields else None
        case _:
            pass


def _last_modified(annotations: Annotations | None) -> float | None:
    return parse_date(annotations.last_modified) if annotations else None


async def extract(answer: CallToolResult, server: McpServer, within_s: float) -> tuple[Passage, ...]:
    if not is_large(answer):
        return passages(answer, server)
    async with asyncio.timeout(max(0.0, within_s)):
        return await asyncio.get_running_loop().run_in_executor(READERS, passages, answer, server)
