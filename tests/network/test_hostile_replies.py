"""Hostile replies of upstreams fail only their own part and cost little CPU."""

import io
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, Never

import msgspec
import pytest

from anabranch.configuration.settings import Settings
from anabranch.domain.model import Context, Endpoint, Passage
from anabranch.network import syft_wire as wire
from anabranch.network.sse import events
from anabranch.pipeline.cite import cite
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
