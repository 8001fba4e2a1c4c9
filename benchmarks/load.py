"""A closed loop of questions against one server, every answer checked."""

import asyncio
from dataclasses import dataclass
from time import perf_counter

import msgspec

from benchmarks.servers import Server
from benchmarks.wire import Connection, connect, post, post_head

SOURCES = 5
DOCUMENTS = 5
DOCUMENT_BYTES = 2048
ANSWER_LIMIT_S = 60.0
WORKLOAD = "5 sources with 5 documents of 2 KB each, then a model"


class WrongAnswerError(Exception):
    """A server answered with less than the whole answer."""


class Cited(msgspec.Struct, gc=False):
    slug: str
    content: str


class Retrieval(msgspec.Struct, gc=False):
    path: str
    status: str
    documents_retrieved: int


class Answer(msgspec.Struct):
    response: str
    sources: dict[str, Cited]
    retrieval_info: list[Retrieval]


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """What one server did under one load for a second or two."""

    cpu_s: float
    elapsed_s: float
    latencies_ms: list[float]

    @property
    def cpu_ms_per_request(self) -> float:
        return self.cpu_s * 1000 / len(self.latencies_ms)

    @property
    def requests_per_s(self) -> float:
        return len(self.latencies_ms) / self.elapsed_s


decode_answer = msgspec.json.Decoder(Answer).decode


def question(upstream: Server, sources: int = SOURCES) -> bytes:
    """The body of a chat request to that many sources."""

    def endpoint(slug: str, name: str) -> dict[str, str]:
        return {"url": upstream.url, "slug": slug, "name": name, "owner_username": "bench"}

    return msgspec.json.encode(
        {
            "prompt": "What are the key features of our product?",
            "model": endpoint("scribe", "Scribe"),
            "data_sources": [endpoint(f"source-{index}", f"Source {index}") for index in range(1, sources + 1)],
            "top_k": DOCUMENTS,
            "max_tokens": 1024,
            "temperature": 0.7,
            "similarity_threshold": 0.0,
        }
    )


async def burst(server: Server, body: bytes, *, concurrency: int, seconds: float) -> Burst:
    """`concurrency` clients ask again and again; each asks once before the clock starts."""
    request = post(post_head(server.authority, "/api/v1/chat"), body)
    connections = [await connect(server.authority, []) for _ in range(concurrency)]
    await asyncio.gather(*(_ask(server, connection, request) for connection in connections))

    latencies_ms: list[float] = []
    cpu_before_s = server.cpu_s()
    started = perf_counter()

    async def client(connection: Connection) -> None:
        while perf_counter() - started < seconds:
            latencies_ms.append(await _ask(server, connection, request))

    await asyncio.gather(*(client(connection) for connection in connections))
    elapsed_s = perf_counter() - started
    cpu_s = server.cpu_s() - cpu_before_s
    for connection in connections:
        connection.close()
    return Burst(cpu_s=cpu_s, elapsed_s=elapsed_s, latencies_ms=latencies_ms)


async def _ask(server: Server, connection: Connection, request: bytes) -> float:
    sent = perf_counter()
    async with asyncio.timeout(ANSWER_LIMIT_S):
        status, body = await connection.send(request)
    latency_ms = (perf_counter() - sent) * 1000
    if status != 200:
        raise WrongAnswerError(f"{server.name} answered {status}: {body[:500]!r}")
    answer = decode_answer(body)
    successes = sum(
        each.status == "success" and each.documents_retrieved == DOCUMENTS for each in answer.retrieval_info
    )
    if not answer.response or successes != SOURCES or len(answer.sources) != SOURCES * DOCUMENTS:
        raise WrongAnswerError(
            f"{server.name} answered with {len(answer.response)} characters, {successes} successful sources "
            f"and {len(answer.sources)} documents: {answer.retrieval_info}"
        )
    return latency_ms
