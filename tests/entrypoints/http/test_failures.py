"""What goes wrong upstream: visible to the caller, and never at the cost of the others."""

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import trustme

from anabranch.testing import Failure, Space
from conftest import Server, parse_sse, ref

PROMPT = "What flows where?"

SOURCE_FAILURES = [
    (Failure.HANG, "timeout", "did not answer within"),
    (Failure.TRICKLE, "timeout", "did not answer within"),
    (Failure.STATUS_401, "access_denied", "401"),
    (Failure.STATUS_402, "payment_failed", "402"),
    (Failure.STATUS_403, "access_denied", "403"),
    (Failure.ACCESS_DENIED, "access_denied", "policy"),
    (Failure.RATE_LIMITED, "rate_limited", "policy"),
    (Failure.POLICY_VIOLATION, "policy_violation", "policy"),
    (Failure.STATUS_404, "error", "404"),
    (Failure.STATUS_429, "rate_limited", "429"),
    (Failure.STATUS_500, "error", "500"),
    (Failure.STATUS_503, "error", "503"),
    (Failure.HTML, "error", "HTML page"),
    (Failure.HTML_500, "error", "500"),
    (Failure.BAD_JSON, "error", "should be JSON"),
    (Failure.WRONG_SHAPE, "error", "neither documents nor a summary"),
    (Failure.INVALID_UTF8, "error", "should be JSON"),
    (Failure.RESET, "error", "closed before"),
    (Failure.CUT, "error", "broke off"),
    (Failure.HUGE, "error", "larger than"),
    (Failure.BOMB, "error", "larger than"),
    (Failure.REDIRECT, "error", "redirect"),
]

MODEL_FAILURES = [
    (Failure.HANG, 504),
    (Failure.TRICKLE, 504),
    (Failure.STATUS_401, 502),
    (Failure.STATUS_402, 502),
    (Failure.POLICY_VIOLATION, 502),
    (Failure.STATUS_404, 502),
    (Failure.STATUS_429, 502),
    (Failure.STATUS_500, 502),
    (Failure.HTML, 502),
    (Failure.HTML_500, 502),
    (Failure.BAD_JSON, 502),
    (Failure.WRONG_SHAPE, 502),
    (Failure.INVALID_UTF8, 502),
    (Failure.RESET, 502),
    (Failure.CUT, 502),
    (Failure.HUGE, 502),
    (Failure.BOMB, 502),
    (Failure.REDIRECT, 502),
]


@pytest.fixture
async def server(serve: Any) -> AsyncIterator[Server]:
    """With a small appetite."""
    async with serve(retrieval_timeout=5, generation_timeout=5, max_reply_bytes=1_000_000) as started:
        yield started


@pytest.fixture
async def impatient(serve: Any) -> AsyncIterator[Server]:
    async with serve(retrieval_timeout=0.4, generation_timeout=0.4) as started:
        yield started


ENDLESS = (Failure.HANG, Failure.TRICKLE)


def question(space: Space, *slugs: str, model: str = "scribe") -> dict[str, Any]:
    return {
        "prompt": PROMPT,
        "model": ref(space, model, "mia"),
        "data_sources": [ref(space, slug, "alice") for slug in slugs],
    }


def clean(message: str) -> bool:
    return not any(bad in message for bad in ("<", ">", "Traceback", "aiohttp", "Error("))


async def raw_post(url: str, path: str, request: dict[str, Any]) -> asyncio.StreamWriter:
    """A client that sends a request and then does not read."""
    host, port = url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port), limit=1024)
    body = json.dumps(request).encode()
    writer.write(f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    return writer


@pytest.mark.parametrize(("failure", "status", "says"), SOURCE_FAILURES, ids=str)
async def test_a_failing_source_costs_nobody_the_answer(
    server: Server, impatient: Server, space: Space, failure: Failure, status: str, says: str
) -> None:
    server = impatient if failure in ENDLESS else server
    request = question(space, "docs", failure.value)
    whole, events = await asyncio.gather(server.chat(**request), server.stream(**request))
    for answer in (whole, events[-1].data):
        good, bad = answer["retrieval_info"]
        assert (good["path"], good["status"], good["documents_retrieved"]) == ("alice/docs", "success", 3)
        assert (bad["path"], bad["status"], bad["documents_retrieved"]) == (f"alice/{failure.value}", status, 0)
        assert says in bad["error_message"]
        assert clean(bad["error_message"])
    assert "[alice/docs]" in whole["response"]
    assert events[-1].name == "done"


@pytest.mark.parametrize(("failure", "status"), MODEL_FAILURES, ids=str)
async def test_a_failing_model_is_an_error_that_says_which(
    server: Server, impatient: Server, space: Space, failure: Failure, status: int
) -> None:
    server = impatient if failure in ENDLESS else server
    request = question(space, "docs", model=failure.value)
    code, body, _ = await server.post("/api/v1/chat", request)
    assert (code, body["error"]) == (status, "generation_failed")
    assert body["message"] == body["detail"]
    assert body["message"].startswith("Model generation failed: ")
    assert clean(body["message"])
    assert body["details"]["model_path"] == f"mia/{failure.value}"
    assert isinstance(body["details"]["latency_ms"], int)
    events = await server.stream(**request)
    assert [event.name for event in events].count("error") == 1
    assert events[-1].name == "error"
    assert events[-1].data["error"] == "generation_failed"


@pytest.mark.parametrize("failure", [Failure.STREAM_BREAK, Failure.STREAM_ERROR, Failure.STREAM_ENDLESS_LINE])
@pytest.mark.parametrize("kind", ["space", "openai"])
async def test_a_model_stream_that_breaks_ends_in_one_error(
    serve: Any, space: Space, failure: Failure, kind: str
) -> None:
    async with serve(model_streaming_enabled=True, generation_timeout=5, max_reply_bytes=8_000_000) as server:
        request = question(space, "docs", model=failure.value)
        request["model"]["kind"] = kind
        events = await server.stream(**request)
        assert events[-1].name == "error"
        assert [event.name for event in events].count("error") == 1
        if failure is not Failure.STREAM_ENDLESS_LINE:
            assert any(event.name == "token" for event in events)
        code, body, _ = await server.post("/api/v1/chat", request)
        assert (code, body["error"]) == (502, "generation_failed")


@pytest.mark.parametrize(
    "url",
    ["tunneling:alice", "", "ftp://example.com", "http://", "http://[", "not a url", "http://a:b@example.com", "//x"],
)
async def test_an_unusable_url_fails_that_source_alone(server: Server, space: Space, url: str) -> None:
    request = question(space, "docs")
    request["data_sources"].append({"url": url, "slug": "s", "owner_username": "bob"})
    answer = await server.chat(**request)
    good, bad = answer["retrieval_info"]
    assert (good["status"], bad["status"]) == ("success", "error")
    assert bad["error_message"]
    assert answer["response"]


async def test_a_name_that_does_not_resolve(server: Server, space: Space) -> None:
    request = question(space, "docs")
    request["data_sources"].append({"url": "http://nowhere.invalid", "slug": "s", "owner_username": "bob"})
    _, bad = (await server.chat(**request))["retrieval_info"]
    assert bad["status"] in ("error", "timeout")


async def test_a_source_that_refuses_connections_is_an_error(server: Server, space: Space) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        request = question(space, "docs")
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        request["data_sources"].append({"url": url, "slug": "s"})
        _, bad = (await server.chat(**request))["retrieval_info"]
    address = url.removeprefix("http://")
    assert (bad["status"], bad["error_message"]) == ("error", f"No connection could be made: {address}.")


@asynccontextmanager
async def tls_space() -> AsyncIterator[Space]:
    """A Space behind a certificate that nobody has signed for us."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    async with Space(everything=True, tls=context) as space:
        yield space


async def test_a_certificate_that_cannot_be_trusted(server: Server, space: Space) -> None:
    async with tls_space() as untrusted:
        request = question(space, "docs")
        request["data_sources"].append(ref(untrusted, "docs", "bob"))
        _, bad = (await server.chat(**request))["retrieval_info"]
        assert bad["status"] == "error"
        assert "certificate could not be verified" in bad["error_message"]
        assert untrusted.requests == []


async def test_tls_spoken_to_plain_http(server: Server, space: Space) -> None:
    request = question(space, "docs")
    request["data_sources"].append({"url": space.url.replace("http:", "https:"), "slug": "docs"})
    _, bad = (await server.chat(**request))["retrieval_info"]
    assert bad["status"] == "error"
    assert "secure connection" in bad["error_message"]


async def test_without_a_token_the_source_is_asked_and_its_own_refusal_shown(server: Server, space: Space) -> None:
    space.source("guarded", documents=[], token="secret")
    answer = await server.chat(**question(space, "docs", "guarded"))
    guarded = answer["retrieval_info"][1]
    assert guarded["status"] == "access_denied"
    assert "401" in guarded["error_message"]
    assert any(request.slug == "guarded" for request in space.requests)


@pytest.mark.parametrize(
    ("slugs", "instruction"),
    [
        ([], "No documents were provided"),
        (["status-500", "html"], "No relevant documents retrieved"),
        (["nothing"], "returned no documents"),
    ],
    ids=["no sources", "all failed", "nothing found"],
)
async def test_the_model_is_asked_even_without_documents(
    server: Server, space: Space, slugs: list[str], instruction: str
) -> None:
    space.source("nothing", documents=[])
    answer = await server.chat(**question(space, *slugs))
    prompt = space.requests[-1].body["messages"][-1]["content"]
    assert instruction in prompt
    assert "<documents>" not in prompt
    assert answer["response"] == "The documents do not contain the answer."
    assert answer["sources"] == {}


async def test_more_documents_than_asked_for_are_shown_as_they_came(server: Server, space: Space) -> None:
    body = json.dumps({"references": {"documents": [{"content": f"Text {n}."} for n in range(7)]}}).encode()
    space.fails("generous", Failure.BAD_JSON, body=body)
    request = question(space, "generous") | {"top_k": 2}
    answer = await server.chat(**request)
    assert answer["retrieval_info"][0]["documents_retrieved"] == 7
    assert "Document 7" in answer["sources"]


@pytest.mark.parametrize(
    "document",
    [
        {"content": "Text.", "similarity_score": 1e308, "metadata": None},
        {"content": "Text.", "similarity_score": -5},
        {"content": "Text.", "metadata": {"title": None, "more": [1, {"x": 2}]}},
        {"content": "Text.", "metadata": {"title": 12}, "document_id": 5},
    ],
)
async def test_odd_documents_are_taken_as_well_as_they_can_be(
    server: Server, space: Space, document: dict[str, Any]
) -> None:
    space.fails("odd", Failure.BAD_JSON, body=json.dumps({"references": {"documents": [document]}}).encode())
    answer = await server.chat(**question(space, "odd"))
    assert answer["retrieval_info"][0]["documents_retrieved"] == 1
    assert "Text" in answer["response"]


@pytest.mark.parametrize(
    "odd",
    [
        b'{"content": "Odd.", "metadata": "text"}',
        b'{"content": "Odd.", "metadata": {"title": ["a"]}}',
        b'{"content": "Odd.", "similarity_score": "0.5"}',
        b'{"content": "Odd.", "similarity_score": 1e400}',
        b'{"content": "Odd.", "similarity_score": NaN}',
        b'{"content": "Odd.", "similarity_score": -1' + b"0" * 400 + b"}",
        b'{"content": "Odd half \\ud800."}',
        b'{"content": {}}',
        b"null",
        b"[]",
    ],
    ids=str,
)
async def test_an_odd_document_does_not_cost_the_others(server: Server, space: Space, odd: bytes) -> None:
    good = b'{"content": "Good.", "similarity_score": 0.9, "metadata": {"title": "G"}}'
    body = b'\xef\xbb\xbf{"summary": null, "references": {"documents": [' + odd + b", " + good + b"]}}"
    space.fails("mixed", Failure.BAD_JSON, body=body)
    answer = await server.chat(**question(space, "mixed"))
    info = answer["retrieval_info"][0]
    assert info["status"] == "success"
    assert info["documents_retrieved"] == 1 + (b"Odd" in odd)
    assert answer["sources"]["G"]["content"] == "Good."


async def test_documents_none_of_which_can_be_read_are_a_failure(server: Server, space: Space) -> None:
    space.fails("unreadable", Failure.BAD_JSON, body=b'{"references": {"documents": [{"content": 5}, 7]}}')
    info = (await server.chat(**question(space, "unreadable")))["retrieval_info"][0]
    assert info["status"] == "error"
    assert "none of its documents can be read" in info["error_message"]


async def test_an_empty_answer_is_a_failure(server: Server, space: Space) -> None:
    space.model("mute", reply="")
    code, body, _ = await server.post("/api/v1/chat", question(space, "docs", model="mute"))
    assert (code, body["message"]) == (502, "Model generation failed: The model's reply holds no answer.")


@pytest.mark.parametrize("kind", ["space", "openai"])
async def test_an_answer_that_was_cut_off_says_so(server: Server, space: Space, kind: str) -> None:
    reply = {
        "summary": {"message": {"content": "Half a sen"}, "finish_reason": "length"},
        "choices": [{"message": {"content": "Half a sen"}, "finish_reason": "length"}],
    }
    space.fails("short", Failure.BAD_JSON, body=json.dumps(reply).encode())
    request = question(space, "docs", model="short")
    request["model"]["kind"] = kind
    answer = await server.chat(**request)
    assert answer["response"] == "Half a sen"
    assert answer["metadata"]["finish_reason"] == "length"


async def test_a_connection_closed_while_idle_costs_no_answer(server: Server) -> None:
    """An upstream that closes a used connection the moment it is written to again."""
    served = 0

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        await reader.readuntil(b"\r\n\r\n")
        body = b'{"references": {"documents": [{"content": "Once."}]}}'
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        served += 1
        with suppress(asyncio.IncompleteReadError):  # on a slow machine the client has closed it as idle
            await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(once, "127.0.0.1", 0) as upstream:
        url = f"http://127.0.0.1:{upstream.sockets[0].getsockname()[1]}"
        for _ in range(4):
            answer = await server.chat(prompt="?", retrieval_only=True, data_sources=[{"url": url, "slug": "s"}])
            assert answer["retrieval_info"][0]["status"] == "success"
    assert served == 4


async def test_a_fresh_connection_that_is_dropped_is_not_tried_again(server: Server, space: Space) -> None:
    await server.chat(**question(space, "docs", "reset"))
    assert len([request for request in space.requests if request.slug == "reset"]) == 1


async def test_line_separators_do_not_break_the_stream(server: Server, space: Space) -> None:
    said = "one\u2028two\u2029three\u0085four"
    space.model("separator", reply=said)
    request = question(space, "docs", model="separator")
    async with server.session.post(f"{server.url}/api/v1/chat/stream", json=request) as response:
        text = await response.text()
    assert all(line.startswith(("event: ", "data: ")) for line in text.splitlines() if line)
    assert [event.data["content"] for event in parse_sse(text) if event.name == "token"] == [said]


@pytest.mark.parametrize("slug", ["hang", "trickle"])
@pytest.mark.parametrize("path", ["/api/v1/chat", "/api/v1/chat/stream"])
@pytest.mark.parametrize("role", ["source", "model"])
async def test_when_the_client_goes_its_upstreams_are_closed(
    serve: Any, space: Space, slug: str, path: str, role: str
) -> None:
    request = question(space, slug) if role == "source" else question(space, "docs", model=slug)
    async with serve() as server:
        writer = await raw_post(server.url, path, request)
        await space.wait_for(lambda: any(sent.slug == slug for sent in space.requests))
        writer.close()
        await space.wait_for(lambda: all(sent.disconnected for sent in space.requests if sent.slug == slug), 1.0)


async def test_the_total_timeout_limits_model_and_sources(serve: Any, space: Space) -> None:
    async with serve(total_timeout=0.5) as server:
        status, body, _ = await server.post("/api/v1/chat", question(space, "docs", model="hang"))
        assert (status, body["error"]) == (504, "deadline_exceeded")
        answer = await server.chat(**question(space, "docs", "hang"))
        assert [info["status"] for info in answer["retrieval_info"]] == ["success", "timeout"]


async def test_the_run_of_a_client_that_does_not_read_ends_at_the_total_timeout(serve: Any, space: Space) -> None:
    """Its Run is held back, not buffered without end, and ends with its time."""
    space.model("endless", reply="word " * 600_000, delay_s=0)
    async with serve(total_timeout=1.0, model_streaming_enabled=True, max_reply_bytes=500_000_000) as server:
        writer = await raw_post(server.url, "/api/v1/chat/stream", question(space, "docs", model="endless"))
        await space.wait_for(lambda: any(sent.slug == "endless" and sent.disconnected for sent in space.requests), 20)
        writer.close()


async def test_keep_alive_while_a_model_thinks(serve: Any, space: Space) -> None:
    space.model("thinker", reply="At last.", delay_s=0.4)
    async with serve(heartbeat_interval=0.1) as server:
        request = question(space, "docs", model="thinker")
        async with server.session.post(f"{server.url}/api/v1/chat/stream", json=request) as response:
            text = await response.text()
    assert ": keep-alive\n\n" in text
    assert parse_sse(text)[-1].name == "done"
