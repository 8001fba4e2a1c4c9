"""The reply of an MCP tool as passages."""

import asyncio
from collections.abc import Iterator, Mapping
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

from anabranch.domain.errors import Trouble, UpstreamError
from anabranch.domain.mcp import McpServer
from anabranch.domain.model import Passage
from anabranch.sources.mcp.results.dates import parse_date
from anabranch.sources.mcp.results.fields import MAX_TITLE, ResultFields, from_object, from_text, has_text, url_or_none
from anabranch.sources.mcp.results.locator import (
    MAX_RESULTS,
    Result,
    Unreadable,
    at_path,
    parse_json,
    results_in,
    results_in_text,
)
from anabranch.sources.mcp.text import one_line

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
        raise UpstreamError("The server asks for more input, which a search cannot provide.", Trouble.REQUEST)
    if reply.keys().isdisjoint(("content", "structuredContent", "isError")):
        raise UpstreamError("The server's reply does not follow the MCP specification.", Trouble.UNUSABLE)
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
