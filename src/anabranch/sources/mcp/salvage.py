"""What a tool replied, read block by block: what does not have its form is passed over, and does not cost the rest."""

from collections.abc import Mapping
from typing import Any

from mcp_types import (
    AudioContent,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
)
from pydantic import ValidationError

from anabranch.domain.errors import Trouble, UpstreamError

MAX_BLOCKS = 5_000
BLOCKS: Mapping[str, type[ContentBlock]] = {
    "text": TextContent,
    "image": ImageContent,
    "audio": AudioContent,
    "resource_link": ResourceLink,
    "resource": EmbeddedResource,
}


def salvaged(reply: Mapping[str, Any]) -> CallToolResult:
    if reply.get("resultType") == "input_required":
        raise UpstreamError("The server asks for more input, which a search cannot give it.", Trouble.REQUEST)
    if reply.keys().isdisjoint(("content", "structuredContent", "isError")):
        raise UpstreamError("The server's reply does not have the form that MCP prescribes.", Trouble.UNUSABLE)
    given = reply.get("content")
    blocks = given[:MAX_BLOCKS] if isinstance(given, list) else ()
    return CallToolResult(
        content=[block for one in blocks if (block := _block(one)) is not None],
        structured_content=reply.get("structuredContent"),
        is_error=reply.get("isError") is True,
    )


def _block(given: Any) -> ContentBlock | None:
    if not isinstance(given, dict):
        return None
    kind = given.get("type")
    model = BLOCKS.get(kind) if isinstance(kind, str) else None
    if model is None:
        return None
    bare = {name: value for name, value in given.items() if name not in ("annotations", "_meta")}
    for tried in (given, bare):
        try:
            return model.model_validate(tried, by_name=False)
        except ValidationError:
            continue
    return None
