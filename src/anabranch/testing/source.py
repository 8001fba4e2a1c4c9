"""A data source of a Space: documents that are returned best first."""

import asyncio
from collections.abc import Sequence

import msgspec
from aiohttp import web

from anabranch.domain.model import EndpointKind
from anabranch.testing.http_server import json


class Document(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    content: str
    score: float = 0.9
    document_id: str | None = None


class _SourceRequest(msgspec.Struct, frozen=True, kw_only=True):
    limit: int | None = None
    similarity_threshold: float | None = None


_decoder = msgspec.json.Decoder(_SourceRequest)


class DataSource:
    def __init__(
        self, slug: str, *, documents: Sequence[Document], delay_s: float, token: str | None, summary: str | None
    ) -> None:
        self.token = token
        self._slug = slug
        self._documents = sorted(documents, key=lambda document: -document.score)
        self._delay_s = delay_s
        self._summary = summary
        self._replies: dict[int, bytes] = {}

    async def answer(self, request: web.BaseRequest, body: bytes, dialect: EndpointKind) -> web.StreamResponse:  # noqa: ARG002
        asked = _decoder.decode(body)
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        if dialect == "openai":
            return json(b'{"error":{"message":"A data source is not a model","type":"invalid_request_error"}}', 404)
        return json(self._reply(asked))

    def _reply(self, asked: _SourceRequest) -> bytes:
        found = len(self._documents)
        if asked.similarity_threshold is not None:
            found = sum(document.score >= asked.similarity_threshold for document in self._documents)
        if asked.limit is not None:
            found = min(found, max(asked.limit, 0))
        if found not in self._replies:
            self._replies[found] = self._encode(found)
        return self._replies[found]

    def _encode(self, found: int) -> bytes:
        documents = [
            {
                "document_id": document.document_id or f"{self._slug}-{number}",
                "content": document.content,
                "metadata": {"title": document.title},
                "similarity_score": document.score,
            }
            for number, document in enumerate(self._documents[:found], start=1)
        ]
        summary = self._summary and {"message": {"role": "assistant", "content": self._summary}}
        references = {"documents": documents, "provider_info": {}, "cost": 0.0}
        return msgspec.json.encode({"summary": summary or None, "references": references})
