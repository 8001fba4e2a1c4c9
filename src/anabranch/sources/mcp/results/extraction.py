"""What an MCP tool replied, as passages."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import unquote

from mcp_types import (
    Annotations,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from anabranch.domain.mcp import McpServer
from anabranch.domain.model import Passage
from anabranch.sources.mcp.results.dates import moment
from anabranch.sources.mcp.results.fields import MAX_TITLE, ResultFields, address, line, of_object, of_text, telling
from anabranch.sources.mcp.results.locator import MAX_RESULTS, Found, Unreadable, at, in_json, in_text, parsed

__all__ = ["Unreadable", "is_large", "passages"]

LARGE = 100_000


def passages(result: CallToolResult, server: McpServer) -> tuple[Passage, ...]:
    """At most MAX_RESULTS, in the server's order. Structured content is what counts; the text beside it says the same
    again. Images, sound and blobs are passed over."""
    found: list[Passage] = []
    for fields in _read(result, server.result_path):
        if len(found) >= MAX_RESULTS:
            break
        if fields is not None:
            found.append(_passage(fields, server.name))
    return tuple(found)


def is_large(result: CallToolResult) -> bool:
    """Whether it may take long to read. Structured content has no length: of a few results it has only a few parts, as
    long as those are flat."""
    texts = sum(len(block.text) for block in result.content if isinstance(block, TextContent))
    return texts > LARGE or not _is_small(result.structured_content, LARGE // 100)


def _is_small(value: object, most: int) -> bool:
    """Whether it has at most so many parts, all in all."""
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


def _structured(result: CallToolResult) -> list[Found] | None:
    """None where there is nothing, or only something about the text beside it, such as how much that is. An empty list
    is an answer: what the text says about it is no result."""
    value = result.structured_content
    if not value:
        return None
    found = in_json(value)
    is_aside = len(found) == 1 and found[0] is value and isinstance(value, dict) and not telling(value)
    texts = [block.text for block in result.content if isinstance(block, TextContent) and block.text.strip()]
    return None if is_aside and any(parsed(text) is None for text in texts) else found


def _at(path: str, result: CallToolResult) -> list[Found]:
    texts = [block.text for block in result.content if isinstance(block, TextContent)]
    structured = [] if result.structured_content is None else [result.structured_content]
    for values in (structured, [value for text in texts if (value := parsed(text)) is not None]):
        found: list[Any] = []
        for value in values:
            try:
                found.append(at(path, value))
            except LookupError:
                continue
        if found:
            return [result for value in found for result in in_json(value)]
    raise Unreadable(
        f"The reply has nothing at resultPath {line(path, 100)!r}: set it to where the results stand in the reply, or"
        " leave it out to have them found."
    )


def _fields(found: Found) -> ResultFields | None:
    return of_text(found) if isinstance(found, str) else of_object(found)


def _block(block: ContentBlock) -> Iterator[ResultFields | None]:
    date = _changed(block.annotations)
    match block:
        case TextContent():
            for found in in_text(block.text):
                fields = _fields(found)
                yield fields._replace(date=date) if fields and fields.date is None else fields
        case ResourceLink():
            said = of_text(block.description or "") or of_text(block.title or block.name) or of_text(block.uri)
            if said:
                title = line(block.title or block.name, MAX_TITLE) or said.title
                yield said._replace(title=title, url=address(block.uri), date=date)
        case EmbeddedResource(resource=TextResourceContents() as resource):
            name = unquote(resource.uri[-300:].rstrip("/").rpartition("/")[2])
            said = of_text(resource.text, name if any(map(str.isalpha, name)) else "")
            yield said._replace(url=address(resource.uri), date=date) if said else None
        case _:
            pass


def _changed(annotations: Annotations | None) -> float | None:
    return moment(annotations.last_modified) if annotations else None


# Of their own: whoever searches, embeds or counts needs the others.
READERS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="mcp")


async def found(answer: CallToolResult, server: McpServer, within_s: float) -> tuple[Passage, ...]:
    if not is_large(answer):
        return passages(answer, server)
    async with asyncio.timeout(max(0.0, within_s)):
        return await asyncio.get_running_loop().run_in_executor(READERS, passages, answer, server)
