"""A data source of a Space: documents, returned best first; and sample documents for tests and benchmarks."""

import asyncio
import random
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
        query = _decoder.decode(body)
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        if dialect == "openai":
            return json(b'{"error":{"message":"A data source is not a model","type":"invalid_request_error"}}', 404)
        return json(self._reply(query))

    def _reply(self, query: _SourceRequest) -> bytes:
        found = len(self._documents)
        if query.similarity_threshold is not None:
            found = sum(document.score >= query.similarity_threshold for document in self._documents)
        if query.limit is not None:
            found = min(found, max(query.limit, 0))
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


RIVERS = (
    Document(
        title="What an anabranch is",
        content="An anabranch is a section of a river that leaves the main stem and rejoins it downstream. "
        "Islands between the channels can last for centuries and carry grown forest.",
        score=0.92,
    ),
    Document(
        title="Rivers that divide",
        content="Anabranching rivers divide where the valley is flat and the banks are firm. "
        "The Ob, the Niger and the Murray all have long reaches of this kind.",
        score=0.84,
    ),
    Document(
        title="Measuring a flow",
        content="The discharge of a river is its mean velocity times the area of its cross-section. "
        "Each channel is measured on its own, and the sum must agree with the reach upstream.",
        score=0.71,
    ),
)

_PLACES = ("valley", "estuary", "delta", "upland", "gorge", "floodplain", "wetland", "catchment")
_THINGS = ("gauge", "sluice", "channel", "levee", "meander", "sandbar", "culvert", "weir")
_DEEDS = ("carried", "diverted", "measured", "shaped", "flooded", "drained", "deepened", "slowed")
_KINDS = ("broad", "shallow", "silted", "ancient", "narrow", "seasonal", "restored", "tidal")
_WHEN = (
    "after the spring thaw",
    "in a dry year",
    "before the survey began",
    "during the long rains",
    "when the gates were opened",
    "by the end of the century",
)


def documents(name: str, *, count: int, size_bytes: int) -> list[Document]:
    """`count` documents of `size_bytes` each, different for each name, scored from 0.95 down to above 0.5."""
    rng = random.Random(name)
    return [
        Document(
            title=f"{name}: the {rng.choice(_KINDS)} {rng.choice(_THINGS)}, part {number + 1}",
            content=_prose(rng, size_bytes),
            score=round(0.95 - 0.44 * number / count, 4),
        )
        for number in range(count)
    ]


def _prose(rng: random.Random, size_bytes: int) -> str:
    sentences: list[str] = []
    size = 0
    while size < size_bytes:
        sentences.append(_sentence(rng))
        size += len(sentences[-1]) + 1
    return " ".join(sentences)[: size_bytes - 1] + "."


def _sentence(rng: random.Random) -> str:
    kind, other = rng.sample(_KINDS, 2)
    thing, second = rng.sample(_THINGS, 2)
    return (
        f"The {kind} {thing} of the {rng.choice(_PLACES)} {rng.choice(_DEEDS)} {rng.randint(2, 980)} "
        f"cubic metres a second past the {other} {second} {rng.choice(_WHEN)}."
    )
