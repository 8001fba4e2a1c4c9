"""An MCP server as a source like any other."""

from collections.abc import Awaitable, Callable

import msgspec

from anabranch.domain.model import Context, Passage, Query, SourceReply
from anabranch.domain.support import MAX_READ, Wording, share

Asked = Callable[[str, Query, Context], Awaitable[SourceReply]]


class McpSource:
    """Asks one server by name, and gives what it found in the server's own order."""

    def __init__(self, name: str, ask: Asked) -> None:
        self._name = name
        self._ask = ask

    async def search(self, query: Query, context: Context) -> SourceReply:
        reply = await self._ask(self._name, query, context)
        if query.raw or not reply.passages:
            return reply
        wording = Wording(query.text)
        passages = tuple(_scored(passage, wording) for passage in reply.passages[: query.limit])
        return msgspec.structs.replace(reply, passages=passages)


def _scored(passage: Passage, wording: Wording) -> Passage:
    """Where the server does not say how good a result is, the share of the question's words in it stands for it."""
    if passage.score > 0:
        return passage
    found = wording.within(f"{passage.title}\n{passage.text[:MAX_READ]}")
    return msgspec.structs.replace(passage, score=share(found, wording.words))
