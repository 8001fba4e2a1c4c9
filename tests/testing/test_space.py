"""The fake Space with a plain HTTP client."""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import trustme

from anabranch.testing import Document, Failure, Space
from anabranch.testing.model import Form

ASKED = {"messages": "anabranch?", "limit": 5, "similarity_threshold": 0.5}
PROMPT = """<documents>
<document index="1">
<source>alice/docs</source>
<title>Rivers &amp; channels</title>
<relevance>0.92</relevance>
<content>
Rivers &lt;divide&gt; at 3.5 km. They join again.
</content>
</document>

<document index="2">
<source>bob/faq</source>
<title>FAQ</title>
<relevance>0.80</relevance>
<content>
Why? Because.
</content>
</document>
</documents>"""
CITED = "Rivers <divide> at 3.5 km [alice/docs]. Why [bob/faq]."


def prompted(text: str = PROMPT, **more: object) -> dict[str, object]:
    return {"messages": [{"role": "system", "content": "Be good."}, {"role": "user", "content": text}], **more}


def query(slug: str) -> str:
    return f"/api/v1/endpoints/{slug}/query"


@pytest.fixture
async def space() -> AsyncIterator[Space]:
    async with Space(everything=True) as space:
        yield space


@pytest.fixture
async def http(space: Space) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(space.url) as session:
        yield session


async def read(http: aiohttp.ClientSession, path: str, body: object, **headers: str) -> tuple[int, Any]:
    async with http.post(path, json=body, headers=headers) as response:
        return response.status, await response.json()


async def events(http: aiohttp.ClientSession, path: str, body: object) -> list[str]:
    async with http.post(path, json=body) as response:
        assert response.content_type == "text/event-stream"
        text = await response.text()
        return [event.removeprefix("data: ") for event in text.split("\n\n") if event]


async def test_a_source_returns_its_best_documents(space: Space, http: aiohttp.ClientSession) -> None:
    space.source("shelf", documents=[Document(title="B", content="b", score=0.6), Document(title="A", content="a")])
    status, reply = await read(http, query("shelf"), ASKED)
    assert status == 200
    assert reply["summary"] is None
    first, second = reply["references"]["documents"]
    assert first == {
        "document_id": "shelf-1",
        "content": "a",
        "metadata": {"title": "A"},
        "similarity_score": 0.9,
    }
    assert second["metadata"]["title"] == "B"


@pytest.mark.parametrize(("cut", "found"), [({"limit": 2}, 2), ({"similarity_threshold": 0.9}, 1), ({"limit": 0}, 0)])
async def test_a_source_honours_limit_and_threshold(
    http: aiohttp.ClientSession, cut: dict[str, float], found: int
) -> None:
    _, reply = await read(http, query("docs"), ASKED | cut)
    assert len(reply["references"]["documents"]) == found


async def test_a_hybrid_source_has_a_summary(space: Space, http: aiohttp.ClientSession) -> None:
    space.source("hybrid", summary="In short: yes.")
    _, reply = await read(http, query("hybrid"), ASKED)
    assert reply["summary"]["message"]["content"] == "In short: yes."


async def test_space_endpoints_require_their_token(space: Space, http: aiohttp.ClientSession) -> None:
    space.source("locked", token="secret")
    assert (await read(http, query("locked"), ASKED))[0] == 401
    assert (await read(http, query("locked"), ASKED, Authorization="Bearer other"))[0] == 401
    assert (await read(http, query("locked"), ASKED, Authorization="Bearer secret"))[0] == 200


async def test_space_rejects_unknown_endpoints_and_invalid_json(http: aiohttp.ClientSession) -> None:
    assert (await read(http, query("nobody"), ASKED))[0] == 404
    assert (await read(http, query("scribe"), {"messages": 5}))[0] == 422
    assert (await read(http, "/v1/chat/completions", prompted(model="docs")))[0] == 404


async def test_requests_are_recorded(space: Space, http: aiohttp.ClientSession) -> None:
    await read(http, query("docs"), ASKED, **{"X-Correlation-ID": "abc"})
    (recorded,) = space.requests
    assert (recorded.slug, recorded.body, recorded.headers["x-correlation-id"]) == ("docs", ASKED, "abc")
    assert recorded.finished
    assert not recorded.disconnected


async def test_the_scribe_cites_the_documents(http: aiohttp.ClientSession) -> None:
    _, reply = await read(http, query("scribe"), prompted(stream=False))
    assert reply["references"] is None
    assert reply["summary"]["message"]["content"] == CITED
    usage = reply["summary"]["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


async def test_the_scribe_has_no_answer_without_documents(http: aiohttp.ClientSession) -> None:
    _, reply = await read(http, query("scribe"), prompted("No documents here."))
    assert reply["summary"]["message"]["content"] == "The documents do not contain the answer."


def content(form: Form, data: str) -> str:
    if form == "plain":
        return data.replace("\ndata: ", "\n")
    value = json.loads(data)
    match form:
        case "summary":
            return str(value["summary"]["message"]["content"])
        case "openai":
            return "".join(choice["delta"].get("content", "") for choice in value["choices"])
        case _:
            return str(value[form])


@pytest.mark.parametrize("form", ["summary", "openai", "content", "text", "plain"])
@pytest.mark.parametrize("done_mark", [True, False])
@pytest.mark.parametrize("chunk_delay_s", [0, 0.001])
async def test_a_model_streams_word_by_word(
    space: Space, http: aiohttp.ClientSession, form: Form, done_mark: bool, chunk_delay_s: float
) -> None:
    text = "  Two lines,\n\nnaïve as they are.\n"
    space.model("poet", reply=text, form=form, done_mark=done_mark, chunk_delay_s=chunk_delay_s, usage=False)
    sent = await events(http, query("poet"), prompted(stream=True))
    assert (sent[-1] == "[DONE]") == done_mark
    words = [content(form, data) for data in (sent[:-1] if done_mark else sent)]
    assert "".join(words) == text
    assert sum(bool(word) for word in words) == len(text.split())


async def test_space_models_speak_the_openai_dialect(space: Space, http: aiohttp.ClientSession) -> None:
    space.model("echo", reply=lambda messages: messages[-1].content)
    path = "/v1/chat/completions"
    _, reply = await read(http, path, prompted("Hello there", model="echo"))
    assert reply["choices"][0]["message"]["content"] == "Hello there"
    assert reply["usage"]["completion_tokens"] == 3
    body = prompted("Hello there", model="echo", stream=True)
    silent = await events(http, path, body)
    *told, done = await events(http, path, body | {"stream_options": {"include_usage": True}})
    assert silent == [*told[:-1], done]
    assert "".join(content("openai", data) for data in told) == "Hello there"
    last = json.loads(told[-1])
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)


async def test_space_lists_models_and_health(http: aiohttp.ClientSession) -> None:
    async with http.get("/v1/models") as response:
        assert [model["id"] for model in (await response.json())["data"]] == ["scribe"]
    async with http.get("/health") as response:
        assert response.status == 200


@pytest.mark.parametrize("status", [401, 402, 403, 404, 429, 500, 503])
async def test_space_status_failures(http: aiohttp.ClientSession, status: int) -> None:
    async with http.post(query(f"status-{status}"), json=ASKED) as response:
        assert response.status == status
        assert "detail" in await response.json()
        assert ("Retry-After" in response.headers) == (status == 429)


@pytest.mark.parametrize("outcome", ["access_denied", "rate_limited", "policy_violation"])
async def test_space_policy_failures(http: aiohttp.ClientSession, outcome: str) -> None:
    status, reply = await read(http, query(outcome.replace("_", "-")), ASKED)
    assert status == 403
    assert reply["policy_metadata"]["outcome"] == outcome


@pytest.mark.parametrize(("failure", "status"), [(Failure.HTML, 200), (Failure.HTML_500, 500)])
async def test_space_html_failures(http: aiohttp.ClientSession, failure: Failure, status: int) -> None:
    async with http.post(query(failure), json=ASKED) as response:
        assert (response.status, response.content_type) == (status, "text/html")
        assert "<html>" in await response.text()


@pytest.mark.parametrize(
    ("failure", "error"), [(Failure.BAD_JSON, json.JSONDecodeError), (Failure.INVALID_UTF8, UnicodeDecodeError)]
)
async def test_space_replies_that_cannot_be_decoded(
    http: aiohttp.ClientSession, failure: Failure, error: type[Exception]
) -> None:
    async with http.post(query(failure), json=ASKED) as response:
        body = await response.read()
    with pytest.raises(error):
        json.loads(body.decode())


async def test_space_wrong_shape_failure_is_valid_json(space: Space, http: aiohttp.ClientSession) -> None:
    _, reply = await read(http, query("wrong-shape"), ASKED)
    assert not {"summary", "references"} & reply.keys()
    space.fails("list", Failure.WRONG_SHAPE, body=b"[1]")
    assert await read(http, query("list"), ASKED) == (200, [1])


async def test_space_reset_failure_closes_before_a_reply(http: aiohttp.ClientSession) -> None:
    with pytest.raises((aiohttp.ClientOSError, ConnectionResetError)) as caught:
        await read(http, query("reset"), ASKED)
    assert "reset by peer" in str(caught.value)


async def test_space_cut_failure_ends_in_the_middle_of_a_reply(http: aiohttp.ClientSession) -> None:
    async with http.post(query("cut"), json=ASKED) as response:
        assert response.content_length
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()


async def test_huge_reply_exceeds_the_given_size(space: Space, http: aiohttp.ClientSession) -> None:
    space.fails("huge", Failure.HUGE, size_bytes=300_000)
    async with http.post(query("huge"), json=ASKED) as response:
        body = await response.read()
    assert len(body) > 300_000
    assert json.loads(body)["summary"]["message"]["content"].startswith("xxx")


async def test_bomb_is_small_on_the_wire(http: aiohttp.ClientSession) -> None:
    async with http.post(query("bomb"), json=ASKED) as response:
        assert response.headers["Content-Encoding"] == "gzip"
        assert 0 < int(response.headers["Content-Length"]) < 200_000
        assert sum([len(chunk) async for chunk in response.content.iter_any()]) > 64 * 1024 * 1024


async def test_redirect_points_to_the_given_location(space: Space, http: aiohttp.ClientSession) -> None:
    space.fails("away", Failure.REDIRECT, location="http://169.254.169.254/")
    async with http.post(query("away"), json=ASKED, allow_redirects=False) as response:
        assert (response.status, response.headers["Location"]) == (307, "http://169.254.169.254/")
    await read(http, query("redirect"), ASKED)
    assert [request.slug for request in space.requests] == ["away", "redirect", "docs"]


async def test_a_broken_stream_gives_two_words(space: Space, http: aiohttp.ClientSession) -> None:
    async with http.post(query("stream-break"), json=prompted(stream=True)) as response:
        lines = [await response.content.readline() for _ in range(4)]
        assert [content("summary", line.decode()[6:]) for line in lines[::2]] == ["Two ", "words "]
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()
    (recorded,) = space.requests
    assert not recorded.finished
    assert not recorded.disconnected


async def test_space_stream_error_is_an_event(http: aiohttp.ClientSession) -> None:
    word, error = await events(http, query("stream-error"), prompted(stream=True))
    assert content("summary", word) == "One "
    assert json.loads(error) == {"error": "the model broke"}
    word, error = await events(http, "/v1/chat/completions", prompted(stream=True, model="stream-error"))
    assert content("openai", word) == "One "
    assert json.loads(error)["error"]["message"] == "the model broke"


async def test_space_endless_line_failure_sends_no_line_end(http: aiohttp.ClientSession) -> None:
    async with http.post(query("stream-endless-line"), json=prompted(stream=True)) as response:
        start = await response.content.readexactly(1_000_000)
    assert start.startswith(b"data: ")
    assert b"\n" not in start


@pytest.mark.parametrize("slug", ["hang", "trickle", "slow-source", "slow-model", "slow-stream", "stream-endless-line"])
async def test_space_records_client_disconnects(space: Space, slug: str) -> None:
    space.source("slow-source", delay_s=60)
    space.model("slow-model", delay_s=60)
    space.model("slow-stream", chunk_delay_s=0.02, reply="word " * 1000)
    async with aiohttp.ClientSession(space.url) as http:
        asking = asyncio.create_task(read(http, query(slug), prompted(stream=True)))
        await space.wait_for(lambda: space.requests)
        assert space.open_connections == 1
        asking.cancel()
        await space.wait_for(lambda: space.requests[0].disconnected, timeout_s=0.1)
        await space.wait_for(lambda: space.open_connections == 0, timeout_s=0.1)
    assert not space.requests[0].finished


async def test_space_stops_at_once_with_open_connections() -> None:
    async with Space(everything=True) as space, aiohttp.ClientSession(space.url) as http:
        slugs = ["hang", "trickle", "stream-endless-line", "huge"]
        asking = [await http.post(query(slug), json=ASKED) for slug in slugs[1:]]
        hanging = asyncio.create_task(read(http, query("hang"), ASKED))
        await space.wait_for(lambda: len(space.requests) == 4)
        started = time.monotonic()
        await space.__aexit__(None, None, None)
        assert time.monotonic() - started < 0.2
        with pytest.raises(aiohttp.ClientError):
            await hanging
        for response in asking:
            response.close()
        assert not any(request.disconnected or request.finished for request in space.requests)


async def test_space_wait_for_times_out(space: Space) -> None:
    with pytest.raises(TimeoutError):
        await space.wait_for(lambda: False, timeout_s=0.01)


async def test_space_serves_tls() -> None:
    authority = trustme.CA()
    server, client = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(server)
    authority.configure_trust(client)
    connector = aiohttp.TCPConnector(ssl=client)
    async with Space(tls=server, everything=True) as space:
        assert space.url.startswith("https://127.0.0.1:")
        async with aiohttp.ClientSession(space.url, connector=connector) as http:
            assert (await read(http, query("docs"), ASKED))[0] == 200
            with pytest.raises((aiohttp.ClientOSError, aiohttp.ServerDisconnectedError, ConnectionResetError)):
                await read(http, query("reset"), ASKED)
