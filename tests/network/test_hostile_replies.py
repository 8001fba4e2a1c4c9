"""Hostile replies of upstreams fail only their own part and cost little CPU."""

import asyncio
import gzip
import io
import random
import threading
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, Never

import msgspec
import pytest

from anabranch.configuration.settings import Settings
from anabranch.domain.errors import FailureKind, UpstreamError
from anabranch.domain.model import Context, Endpoint, Passage
from anabranch.network import syft_wire as wire
from anabranch.network.addresses import AddressGuard
from anabranch.network.outbound import AiohttpOutbound
from anabranch.network.sse import events
from anabranch.pipeline.cite import cite
from anabranch.sources import space as space_source
from anabranch.telemetry.log import LoggedEvents, configured_log
from anabranch.testing import Space
from conftest import Server, ref
from support.canary_server import Canary, reply

PROMPT = "What is an anabranch?"
DEEP = b"[" * 100_000 + b"]" * 100_000
MANY_CR = b"\r" * 2000


@contextmanager
def cpu_below(seconds: float) -> Iterator[None]:
    """For costs that are a hundred times less when all is well."""
    began = time.process_time()
    yield
    assert time.process_time() - began < seconds


async def read(*chunks: bytes) -> list[str]:
    async def pieces() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    return [data async for data in events(pieces())]


def streamed(body: bytes) -> bytes:
    return reply(body=body).replace(b"application/json", b"text/event-stream")


async def test_sse_parser_accepts_every_line_end_in_any_chunks() -> None:
    stream = b"data: a\r\ndata: b\r\rdata: c\n\n: note\r\n\r\ndata:d\r\n\r\n"
    expected = ["a\nb", "c", "d"]
    assert await read(stream) == expected
    assert await read(*(bytes([byte]) for byte in stream)) == expected
    for cut in range(len(stream)):
        assert await read(stream[:cut], stream[cut:]) == expected


async def test_sse_parser_counts_each_carriage_return_as_a_line_end() -> None:
    assert await read(b"data: x" + MANY_CR) == ["x"]
    assert await read(b"data: x", *(b"\r" for _ in range(2000)), b"data: y") == ["x", "y"]


async def test_a_model_stream_that_ends_in_carriage_returns_is_an_answer(server: Server) -> None:
    async with Canary(streamed(b'data: {"content": "Fine."}' + MANY_CR)) as upstream:
        answer = await server.chat(prompt=PROMPT, model={"url": upstream.url, "slug": "m"})
    assert answer["response"] == "Fine."


async def test_sse_parser_takes_linear_time_for_a_long_line_in_small_chunks() -> None:
    with cpu_below(0.5):
        assert await read(b"data:" + b"x" * 900_000, *(b"x" for _ in range(2000)))


async def test_thousands_of_documents_with_one_title_are_answered_quickly(server: Server, space: Space) -> None:
    document = {"content": "Words.", "metadata": {"title": "T"}, "similarity_score": 0.9}
    body = msgspec.json.encode({"references": {"documents": [document] * 5000}})
    async with Canary(reply(body=body)) as upstream:
        with cpu_below(0.8):
            answer = await server.chat(
                prompt=PROMPT,
                retrieval_only=True,
                data_sources=[{"url": upstream.url, "slug": "many"}, ref(space, "docs")],
            )
    assert [info["status"] for info in answer["retrieval_info"]] == ["success", "success"]


@pytest.mark.parametrize(
    "answer",
    [
        "[1]" * 5000,
        ("unmatched words here [" + ",".join(["1"] * 240) + "]\n") * 20,
        "unmatched words here [1] " * 5000,
        "[" * 1_000_000,
        ("[" + "a" * 499) * 2000,
    ],
    ids=["marks only", "one name many times", "many claims", "brackets", "open brackets"],
)
def test_citations_of_an_answer_full_of_markers_take_little_time(answer: str) -> None:
    passages = [Passage(source="o/s", title="T", text="a. " * 10_000, score=1.0)]
    with cpu_below(2):
        cite(answer, passages)


def chunked(*pieces: bytes, coding: str = "identity") -> bytes:
    head = f"HTTP/1.1 200 X\r\nContent-Encoding: {coding}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return head + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def empty_blocks() -> bytes:
    packer = zlib.compressobj(wbits=31)
    return packer.compress(b"{}") + packer.flush(zlib.Z_SYNC_FLUSH) + b"\0\0\0\xff\xff" * 200_000 + packer.flush()


async def read_reply(says: bytes) -> bytes:
    outbound = AiohttpOutbound(guard=AddressGuard(), max_reply_bytes=4_000_000)
    try:
        async with Canary(says) as canary, outbound.request("POST", canary.url, headers={}, operator=True) as exchange:
            return await exchange.read()
    finally:
        await outbound.close()


@pytest.mark.parametrize(
    "says",
    [
        chunked(*[b" "] * 300_000),
        b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1;a=aaaaaaaaaa\r\n \r\n" * 100_000,
        chunked(empty_blocks(), coding="gzip"),
        b"HTTP/1.1 100 X\r\n\r\n" * 50_000,
    ],
    ids=["chunks of a byte", "extensions of chunks", "compressed nothing", "interim replies"],
)
async def test_a_reply_that_is_framing_rather_than_body_is_not_read_to_its_end(says: bytes) -> None:
    with cpu_below(2), pytest.raises(UpstreamError, match="pieces that are too small") as refused:
        await read_reply(says)
    assert refused.value.failure_kind is FailureKind.UNUSABLE


@pytest.mark.parametrize("size", [24, 30, 200, 65_536])
async def test_a_reply_in_chunks_of_a_token_is_read_whole(size: int) -> None:
    pieces = [b"x" * size] * (2_000_000 // size)
    assert len(await read_reply(chunked(*pieces))) == size * len(pieces)


async def test_fifty_thousand_events_of_a_letter_are_read_whole() -> None:
    assert len(await read_reply(chunked(*[b"data: x\n\n"] * 50_000))) == 450_000


async def test_a_compressed_reply_is_read_whole() -> None:
    body = msgspec.json.encode([f"line {number}" for number in range(200_000)])
    assert await read_reply(chunked(gzip.compress(body), coding="gzip")) == body
    assert await read_reply(chunked(gzip.compress(random.Random(1).randbytes(3_000_000)), coding="gzip"))


async def test_others_have_their_turn_between_the_events_of_one_read() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    assert len(await read(b"data:[\n\n" * 32_768)) == 32_768
    counting.cancel()
    assert turns >= 32


EMPTY_LISTS = b"[" + b"[]," * 300_000 + b"[]]"


async def test_a_source_reply_with_hundreds_of_thousands_of_lists_is_unusable(server: Server, space: Space) -> None:
    for body in (EMPTY_LISTS, b'{"references":{"documents":[{"similarity_score":NaN,"x":' + EMPTY_LISTS + b"}]}}"):
        async with Canary(reply(body=body)) as upstream:
            answer = await server.chat(
                prompt=PROMPT,
                retrieval_only=True,
                data_sources=[{"url": upstream.url, "slug": "lists"}, ref(space, "docs")],
            )
        lists, docs = answer["retrieval_info"]
        assert (lists["status"], docs["status"]) == ("error", "success")
        assert lists["error_message"] == "The reply has more than 250,000 objects and lists."


async def test_a_model_reply_with_hundreds_of_thousands_of_lists_is_unusable(server: Server) -> None:
    body = b'{"content": "Fine.", "x": ' + EMPTY_LISTS + b"}"
    async with Canary(reply(body=body)) as upstream:
        request = {"prompt": PROMPT, "model": {"url": upstream.url, "slug": "m"}}
        async with server.session.post(f"{server.url}/api/v1/chat", json=request) as response:
            assert response.status == 502
            assert "more than 250,000 objects and lists" in (await response.json())["message"]


async def test_a_large_reply_is_decoded_outside_the_event_loop(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    strictly = space_source.decode_strictly

    def decode(body: bytes) -> space_source.QueryReply:
        threads.append(threading.current_thread())
        return strictly(body)

    monkeypatch.setattr(space_source, "decode_strictly", decode)
    for size in (1_000, 1_000_000):
        document = {"content": "x" * size, "similarity_score": 0.9}
        async with Canary(reply(body=msgspec.json.encode({"references": {"documents": [document]}}))) as upstream:
            sources = [{"url": upstream.url, "slug": "large"}]
            answer = await server.chat(prompt=PROMPT, retrieval_only=True, data_sources=sources)
        assert len(answer["sources"]) == 1
    small, large = threads
    assert small is threading.current_thread() is not large


async def test_deeply_nested_json_fails_only_its_upstream(server: Server, space: Space) -> None:
    model = ref(space, "scribe")
    async with Canary(reply(body=b'{"references":' + DEEP + b"}")) as upstream:
        sources = [{"url": upstream.url, "slug": "deep"}, ref(space, "docs")]
        answer = await server.chat(prompt=PROMPT, model=model, data_sources=sources)
        assert [info["status"] for info in answer["retrieval_info"]] == ["error", "success"]
        status, body, _ = await server.post(
            "/api/v1/chat", {"prompt": PROMPT, "model": {"url": upstream.url, "slug": "deep"}}
        )
        assert (status, body["error"]) == (502, "generation_failed")
    request = b'{"prompt":"x","model":{"url":"http://x","slug":"m"},"more":' + DEEP + b"}"
    async with server.session.post(f"{server.url}/api/v1/chat", data=request) as response:
        assert (response.status, (await response.json())["error"]) == (422, "invalid_request")


@pytest.mark.parametrize("where", ["url", "slug"])
async def test_a_url_over_the_length_limit_is_refused_and_not_cached(server: Server, space: Space, where: str) -> None:
    async with Canary() as upstream:
        source = {"url": upstream.url, "slug": "docs"}
        source[where] += "/" + "a" * 100_000
        answer = await server.chat(
            prompt=PROMPT, retrieval_only=True, data_sources=[{**source, "owner_username": "o"}, ref(space, "docs")]
        )
        assert upstream.accepted == 0
    failed, healthy = answer["retrieval_info"]
    assert (failed["status"], healthy["status"]) == ("error", "success")
    assert failed["error_message"].startswith("The endpoint's URL is not usable")


@pytest.mark.parametrize("form", ["json", "console"])
def test_a_crash_is_logged_without_tokens(form: Any) -> None:
    class Broken:
        def request(self, *args: object, **given: object) -> Never:
            raise KeyError("a bug")

    stream = io.StringIO()
    telemetry = LoggedEvents(configured_log(Settings(log_format=form), stream))
    secret = "-".join(("sat", "secret"))
    context = Context(correlation_id="c", deadline=0, tokens={"alice": secret}, transactions={"alice": secret})
    with pytest.raises(KeyError) as caught:
        wire.call(Endpoint(slug="s", url="http://x", owner="alice", token=secret), {}, context, Broken())
    telemetry.crashed(caught.value, context)
    assert "a bug" in stream.getvalue()
    assert secret not in stream.getvalue()
