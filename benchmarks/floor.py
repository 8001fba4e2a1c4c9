"""The least that plain Python asyncio can do for a right answer: raw ASGI, raw sockets, no checks, no logs."""

import argparse
import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from operator import itemgetter
from time import perf_counter
from typing import Any

import msgspec
import uvicorn

from benchmarks.prompt import SYSTEM, user_message
from benchmarks.wire import Pool, post, post_head

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Endpoint(msgspec.Struct, gc=False):
    url: str
    slug: str
    owner_username: str


class Question(msgspec.Struct):
    prompt: str
    model: Endpoint
    data_sources: list[Endpoint]
    top_k: int = 5
    max_tokens: int = 1024
    temperature: float = 0.7
    similarity_threshold: float = 0.5


class SourceQuery(msgspec.Struct, gc=False):
    messages: str
    limit: int
    similarity_threshold: float
    include_metadata: bool = True


class DocumentMetadata(msgspec.Struct, gc=False):
    title: str


class Document(msgspec.Struct, gc=False):
    content: str
    similarity_score: float
    metadata: DocumentMetadata


class References(msgspec.Struct):
    documents: list[Document]


class SourceReply(msgspec.Struct):
    references: References


class Turn(msgspec.Struct, gc=False):
    role: str
    content: str


class ModelQuery(msgspec.Struct):
    messages: list[Turn]
    max_tokens: int
    temperature: float
    stream: bool = False
    stop_sequences: tuple[()] = ()


class Summary(msgspec.Struct):
    message: Turn
    usage: msgspec.Raw = msgspec.Raw(b"null")


class ModelReply(msgspec.Struct):
    summary: Summary


class Cited(msgspec.Struct, gc=False):
    slug: str
    content: str


class Retrieval(msgspec.Struct, gc=False):
    path: str
    documents_retrieved: int
    status: str = "success"
    error_message: None = None


class Timing(msgspec.Struct, gc=False):
    retrieval_time_ms: int
    generation_time_ms: int
    total_time_ms: int


class Answer(msgspec.Struct):
    response: str
    sources: dict[str, Cited]
    retrieval_info: list[Retrieval]
    metadata: Timing
    usage: msgspec.Raw


encode = msgspec.json.Encoder().encode
decode_question = msgspec.json.Decoder(Question).decode
decode_source = msgspec.json.Decoder(SourceReply).decode
decode_model = msgspec.json.Decoder(ModelReply).decode


class Upstreams:
    """Every base URL seen so far, with its connections and the request heads of its slugs."""

    def __init__(self) -> None:
        self._pools: dict[str, Pool] = {}
        self._heads: dict[tuple[str, str], bytes] = {}

    async def query(self, endpoint: Endpoint, body: bytes) -> asyncio.Future[Any]:
        key = (endpoint.url, endpoint.slug)
        head = self._heads.get(key)
        if head is None:
            authority = endpoint.url.removeprefix("http://").rstrip("/")
            head = self._heads[key] = post_head(authority, f"/api/v1/endpoints/{endpoint.slug}/query")
            self._pools.setdefault(endpoint.url, Pool(authority))
        return await self._pools[endpoint.url].send(post(head, body))


class Floor:
    """The ASGI application."""

    def __init__(self) -> None:
        self._upstreams = Upstreams()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        body = b"{}" if scope["path"] == "/health" else await self._answer(await _read(receive))
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, body: bytes) -> bytes:
        started = perf_counter()
        question = decode_question(body)
        query = encode(SourceQuery(question.prompt, question.top_k, question.similarity_threshold))
        replies = [await self._upstreams.query(source, query) for source in question.data_sources]
        found: list[tuple[str, str, float, str]] = []
        retrieval_info = []
        for source, reply in zip(question.data_sources, replies, strict=True):
            path = f"{source.owner_username}/{source.slug}"
            documents = decode_source((await reply).body).references.documents
            found += [(path, each.metadata.title, each.similarity_score, each.content) for each in documents]
            retrieval_info.append(Retrieval(path, len(documents)))
        found.sort(key=itemgetter(2), reverse=True)
        retrieved = perf_counter()
        turns = [Turn("system", SYSTEM), Turn("user", user_message(question.prompt, found))]
        model_query = encode(ModelQuery(turns, question.max_tokens, question.temperature))
        reply = await self._upstreams.query(question.model, model_query)
        summary = decode_model((await reply).body).summary
        generated = perf_counter()
        timing = Timing(_ms(retrieved - started), _ms(generated - retrieved), _ms(generated - started))
        cited = {title: Cited(path, content) for path, title, _, content in found}
        return encode(Answer(summary.message.content, cited, retrieval_info, timing, summary.usage))


async def _read(receive: Receive) -> bytes:
    message = await receive()
    body: bytes = message["body"]
    while message.get("more_body"):
        message = await receive()
        body += message["body"]
    return body


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    uvicorn.run(
        Floor(),
        port=parser.parse_args().port,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
    )


if __name__ == "__main__":
    main()
