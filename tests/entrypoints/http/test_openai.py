"""OpenAI's API, used by OpenAI's own clients: chat, streams, models, embeddings, responses, errors, permissions."""

import asyncio
import base64
import json
import re
import struct
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, AuthenticationError, BadRequestError, NotFoundError, RateLimitError
from openai._streaming import SSEDecoder
from openai.types.responses import Response

from anabranch.app.endpoint_resolver import EXTRACTIVE
from anabranch.domain.model import Endpoint
from anabranch.testing import Space
from support.collection_server import Library, library, text
from support.node_process import HERE, PACKAGES

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("knowledge-api-2")]

HANDBOOK = """# Refunds

Refunds for printed books take 30 days. Digital products cannot be returned once they were downloaded.

# Shipping

Parcels to Iceland leave on Tuesdays. Every parcel is insured up to 500 euros.
"""
EMBEDDER = "all-MiniLM-L6-v2"
QUESTION = "How long do refunds for printed books take?"
ANSWER = "Refunds for printed books take 30 days. [1]"
NODE = Path(sys.prefix) / "bin" / "node"
PAGE = (Path(__file__).parents[3] / "docs" / "openai.md").read_text(encoding="utf-8")
MESSAGES: Any = [{"role": "user", "content": QUESTION}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def model() -> AsyncIterator[Space]:
    async with Space() as opened:
        opened.model("writer", reply="Refunds take 30 days [1]. ### Nothing more.")
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shelf(tmp_path_factory: pytest.TempPathFactory, models_dir: Path, model: Space) -> AsyncIterator[Library]:
    folder = tmp_path_factory.mktemp("data")
    writer = Endpoint(slug="writer", url=model.url, kind="openai", operator=True)
    source = Endpoint(slug="docs", url=model.url, operator=True)
    async with library(
        folder,
        models_dir,
        models={"quotes": EXTRACTIVE, "writer": writer, "unmarked": msgspec.structs.replace(writer, slug="unmarked")},
        sources={"wiki": source},
    ) as opened:
        for name in ("shop", "a/b shop"):
            await opened.collection(name, default_permissions={"visibility": "public"})
        await opened.ingest("shop", text(HANDBOOK, title="Handbook", metadata={"url": "https://shop.example/handbook"}))
        await opened.ingest("a/b shop", text("Compost needs three months.", title="Garden"))
        await opened.collection("secret", who="alice", default_permissions={"visibility": "private"})
        await opened.ingest("secret", text("The vault opens with the number 4711.", title="Vault"), who="alice")
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(shelf: Library) -> AsyncIterator[AsyncOpenAI]:
    async with connected(shelf, "root") as opened:
        yield opened


def connected(shelf: Library, who: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{shelf.server.url}/v1", api_key=shelf.secrets[who], max_retries=0)


def details(answered: Any) -> dict[str, Any]:
    return dict(answered.model_extra["anabranch"])


async def post(shelf: Library, path: str, body: Any, who: str | None = None) -> Any:
    reply = await shelf.call("POST", path, body, who=who)
    assert reply.status == 200, reply
    return reply.body


async def refused(shelf: Library, path: str, **body: Any) -> dict[str, Any]:
    """The error of a request that is invalid."""
    reply = await shelf.call("POST", path, body)
    assert reply.status == 400, reply
    assert set(reply.body) == {"error"}
    assert set(reply.body["error"]) == {"message", "type", "param", "code"}
    assert reply.body["error"]["type"] == "invalid_request_error"
    return dict(reply.body["error"])


async def test_a_chat_completion_has_the_answer_with_its_citations(shelf: Library, client: AsyncOpenAI) -> None:
    answered = await client.chat.completions.create(model="collection:shop", messages=MESSAGES)
    (choice,) = answered.choices
    assert (choice.message.content, choice.finish_reason, choice.message.role) == (ANSWER, "stop", "assistant")
    assert (answered.object, answered.model) == ("chat.completion", "collection:shop")
    assert choice.message.annotations is not None
    (cited,) = [one.url_citation for one in choice.message.annotations]
    assert (cited.title, ANSWER[cited.start_index : cited.end_index]) == ("Handbook", "[1]")
    assert answered.usage is not None
    assert answered.usage.prompt_tokens > 10
    assert answered.usage.completion_tokens > 5
    assert answered.usage.total_tokens == answered.usage.prompt_tokens + answered.usage.completion_tokens
    more = details(answered)
    asked = await shelf.ask(QUESTION, collections=["shop"])
    assert more.keys() >= asked.keys() - {"answer"}
    for same in ("citations", "sentences", "faithfulness_score", "refused"):
        assert more[same] == asked[same]
    assert [one["title"] for one in more["sources"]] == [one["title"] for one in asked["sources"]]
    assert more["source_status"][0]["status"] == "success"
    assert answered.id == f"chatcmpl-{more['query_id']}"


async def test_a_citation_links_to_the_document_on_this_server(shelf: Library, client: AsyncOpenAI) -> None:
    asked: Any = [{"role": "user", "content": "What does compost need?"}]
    answered = await client.chat.completions.create(model="a/b shop", messages=asked)
    (annotation,) = list(answered.choices[0].message.annotations or [])
    (cited,) = details(answered)["citations"]
    place = f"{cited['document_id']}?start={cited['start_char']}&end={cited['end_char']}"
    assert annotation.url_citation.url == f"{shelf.server.url}/#/documents/{place}"


async def test_a_streamed_completion_folds_to_the_same_answer(client: AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model="all", messages=MESSAGES)
    stream = await client.chat.completions.create(
        model="all", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    *chosen, last = chunks
    assert (last.choices, last.usage) == ([], whole.usage)
    assert all(one.usage is None for one in chosen)
    assert "".join(one.choices[0].delta.content or "" for one in chosen) == whole.choices[0].message.content
    assert [one.choices[0].finish_reason for one in chosen] == [None] * (len(chosen) - 1) + ["stop"]
    extra = chosen[-1].choices[0].delta.model_extra or {}
    assert extra["annotations"] == [one.model_dump() for one in whole.choices[0].message.annotations or ()]
    streamed, plain = details(chosen[-1]), details(whole)
    for own in ("query_id", "conversation_id", "latency_ms", "timings", "source_status"):
        assert streamed.pop(own)
        plain.pop(own)
    assert streamed == plain
    assert len({one.id for one in chunks}) == 1


async def test_a_stream_ends_with_done(shelf: Library) -> None:
    body = {"model": "all", "messages": MESSAGES, "stream": True}
    reply = await shelf.call("POST", "/v1/chat/completions", body)
    assert reply.headers["Content-Type"].startswith("text/event-stream")
    lines = reply.body.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(line.startswith("data: {") for line in lines[:-2])
    assert "usage" not in json.loads(lines[-3].removeprefix("data: "))


async def test_stop_ends_quoted_answers(client: AsyncOpenAI) -> None:
    answered = await client.chat.completions.create(model="all", messages=MESSAGES, stop=["days", "nothing"])
    assert answered.choices[0].message.content == "Refunds for printed books take 30 "
    assert answered.choices[0].finish_reason == "stop"
    assert all(one["end"] <= 34 for one in details(answered)["sentences"])
    (cited,) = details(answered)["citations"]
    assert cited["quoted_text"].startswith("Refunds for printed books take 30 days")
    assert cited["answer_end"] <= 34
    stream = await client.chat.completions.create(model="all", messages=MESSAGES, stop="books", stream=True)
    said = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(said) == "Refunds for printed "
    cut = await client.chat.completions.create(model="all", messages=MESSAGES, stop="Refunds")
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("", "stop")


async def test_a_conversation_and_options_reach_a_configured_model(client: AsyncOpenAI, model: Space) -> None:
    messages: Any = [
        {"role": "system", "content": "Answer like a pirate."},
        {"role": "user", "content": [{"type": "text", "text": "What do you sell?"}]},
        {"role": "assistant", "content": "Books."},
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "How long do refunds"}, {"type": "text", "text": "take?"}],
        },
    ]
    answered = await client.chat.completions.create(
        model="model:writer", messages=messages, temperature=0.3, max_completion_tokens=77, stop=["###"], user="me"
    )
    assert (answered.choices[0].message.content, answered.choices[0].finish_reason) == (
        "Refunds take 30 days [1]. ",
        "stop",
    )
    assert details(answered)["usage"]["model"] == "writer"
    sent = model.requests[-1].body
    assert (sent["temperature"], sent["max_tokens"], sent["stop"]) == (0.3, 77, ["###"])
    roles = [one["role"] for one in sent["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    system = sent["messages"][0]["content"]
    assert system.startswith("You answer questions from numbered passages")
    assert system.endswith("Answer like a pirate.\n\nBe brief.")
    assert [one["content"] for one in sent["messages"][1:3]] == ["What do you sell?", "Books."]
    assert "Question: How long do refunds\ntake?" in sent["messages"][-1]["content"]


def asking(**more: Any) -> dict[str, Any]:
    return {"model": "all", "messages": MESSAGES, **more}


async def test_what_would_change_the_answer_is_refused_and_the_rest_is_ignored(shelf: Library) -> None:
    path = "/v1/chat/completions"
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x.example/a.png"}}]}]
    for param, body in {
        "n": asking(n=2),
        "tool_choice": asking(tool_choice="required"),
        "function_call": asking(function_call={"name": "f"}),
        "response_format": asking(response_format={"type": "json_schema", "json_schema": {"name": "a"}}),
        "modalities": asking(modalities=["text", "audio"]),
        "logprobs": asking(logprobs=True),
        "messages[0]": asking(messages=image),
        "messages": asking(messages=[{"role": "system", "content": "x"}]),
        "temperature": asking(temperature="hot"),
        "messages[0].role": asking(messages=[{"role": 5, "content": "x"}]),
    }.items():
        assert (await refused(shelf, path, **body))["param"] == param
    for method in ("GET", "PUT"):
        wrong = await shelf.call(method, path)
        assert (wrong.status, wrong.body["error"]["code"]) == (405, "method_not_allowed")
    harmless = asking(
        n=1, tools=[{"type": "function", "function": {"name": "f"}}], tool_choice="auto", seed=7, top_p=0.5,
        response_format={"type": "text"}, logit_bias={"5": 1}, metadata={"a": "b"}, reasoning_effort="low", store=False,
    )  # fmt: skip
    answered = await post(shelf, path, harmless)
    assert answered["choices"][0]["message"]["content"] == ANSWER


async def test_hostile_requests_are_refused_in_openais_form(shelf: Library) -> None:
    path = "/v1/chat/completions"
    for body in (
        asking(messages=[]),
        asking(messages=[{"role": "user", "content": "x"}] * 1_001),
        asking(messages=[{"role": "user", "content": "x" * 10_001}]),
        asking(messages=[{"role": "robot", "content": "x"}]),
        asking(messages="x"),
        asking(stop=["a"] * 5),
        asking(stop=[""]),
        asking(temperature=3),
        asking(max_tokens=0),
        asking(stream="yes"),
        {"messages": MESSAGES},
    ):
        await refused(shelf, path, **body)
    deep = '{"model": "all", "messages": ' + "[" * 5_000 + "]" * 5_000 + "}"
    for raw in (deep, '{"model": "all", "unknown": ' + '{"a":' * 5_000 + "1" + "}" * 5_000 + "}", "[]", "{", "\xff"):
        data = raw.encode("latin-1")
        async with shelf.server.session.post(f"{shelf.server.url}{path}", data=data) as response:
            assert response.status == 400
            assert (await response.json())["error"]["type"] == "invalid_request_error"
    surrogate = '{"model": "\\ud800", "messages": [{"role": "user", "content": "a \\ud800 b"}], "stop": "\\udc00"}'
    for raw in (surrogate, surrogate.replace('"\\ud800"', '"all"', 1)):
        async with shelf.server.session.post(f"{shelf.server.url}{path}", data=raw) as response:
            assert response.status in (200, 400, 404), await response.text()


async def test_models_are_what_the_caller_may_ask(shelf: Library, client: AsyncOpenAI) -> None:
    listed = [one.id async for one in client.models.list()]
    assert listed == [
        *("all", "collection:shop", "collection:/a%2Fb shop", "collection:secret"),
        *(
            "source:wiki",
            "model:extractive",
            "model:default",
            "model:quotes",
            "model:writer",
            "model:unmarked",
            EMBEDDER,
        ),
    ]
    for name in (*listed, "shop", "a/b shop"):
        found = await client.models.retrieve(name)
        assert (found.object, found.owned_by) == ("model", "anabranch")
        assert found.id in (name, f"collection:{name}")
    for name in ("nothing", "model:nothing", "source:", "mcp", "mcp:x", "collection:", "x" * 1_000):
        with pytest.raises(NotFoundError) as caught:
            await client.models.retrieve(name)
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


async def test_a_forbidden_collection_is_neither_listed_nor_answered(shelf: Library) -> None:
    asked: Any = [{"role": "user", "content": "Which number opens the vault?"}]
    async with connected(shelf, "alice") as alice:
        assert "collection:secret" in [one.id async for one in alice.models.list()]
        answered = await alice.chat.completions.create(model="collection:secret", messages=asked)
        assert "4711" in (answered.choices[0].message.content or "")
    async with connected(shelf, "bob") as bob:
        listed = [one.id async for one in bob.models.list()]
        assert listed == ["all", "collection:shop", "collection:/a%2Fb shop", "model:extractive", EMBEDDER]
        for name in ("collection:secret", "secret", "source:wiki", "model:writer"):
            with pytest.raises(NotFoundError) as caught:
                await bob.models.retrieve(name)
            assert caught.value.code == "model_not_found"
            with pytest.raises(NotFoundError):
                await bob.chat.completions.create(model=name, messages=asked)
            with pytest.raises(NotFoundError):
                await bob.responses.create(model=name, input="Which number opens the vault?", stream=True)
        answered = await bob.chat.completions.create(model="all", messages=asked)
        assert "4711" not in answered.model_dump_json()
        assert [one["source"] for one in details(answered)["source_status"]] == ["collections"]


async def test_a_wrong_key_and_a_wrong_request_are_openais_errors(shelf: Library, client: AsyncOpenAI) -> None:
    async with AsyncOpenAI(base_url=f"{shelf.server.url}/v1", api_key="ab_wrong", max_retries=0) as stranger:
        with pytest.raises(AuthenticationError) as unknown:
            await stranger.models.list()
    assert unknown.value.code == "invalid_api_key"
    with pytest.raises(BadRequestError) as caught:
        await client.chat.completions.create(model="all", messages=MESSAGES, n=3)
    assert (caught.value.param, caught.value.type) == ("n", "invalid_request_error")


async def test_a_source_that_fails_is_an_error_also_in_the_middle_of_a_stream(shelf: Library) -> None:
    body = {"model": "source:wiki", "messages": MESSAGES}
    reply = await shelf.call("POST", "/v1/chat/completions", body)
    assert (reply.status, reply.body["error"]["type"]) == (503, "server_error")
    streamed = await shelf.call("POST", "/v1/chat/completions", {**body, "stream": True})
    *_, error, done, _ = streamed.body.split("\n\n")
    assert json.loads(error.removeprefix("data: ")) == reply.body
    assert done == "data: [DONE]"
    events = await shelf.call("POST", "/v1/responses", {"model": "source:wiki", "input": QUESTION, "stream": True})
    assert events.body.count("event: ") == 3
    failed = json.loads(events.body.split("data: ")[-1])
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"]["message"] == reply.body["error"]["message"]


async def test_embeddings_are_those_of_the_installed_model(shelf: Library, client: AsyncOpenAI) -> None:
    one = await client.embeddings.create(model=EMBEDDER, input="cat")
    many = await client.embeddings.create(model=EMBEDDER, input=["cat", "dog", "\n"], dimensions=384)
    floats = await client.embeddings.create(model=EMBEDDER, input="cat", encoding_format="float")
    assert [item.index for item in many.data] == [0, 1, 2]
    assert many.data[0].embedding == one.data[0].embedding == floats.data[0].embedding
    assert sum(number * number for number in one.data[0].embedding) == pytest.approx(1, abs=1e-3)
    assert one.usage.prompt_tokens == one.usage.total_tokens > 0
    raw = await post(shelf, "/v1/embeddings", {"model": EMBEDDER, "input": "cat", "encoding_format": "base64"}, "bob")
    assert list(struct.unpack("<384f", base64.b64decode(raw["data"][0]["embedding"]))) == one.data[0].embedding
    with pytest.raises(NotFoundError) as caught:
        await client.embeddings.create(model="text-embedding-3-small", input="cat")
    assert caught.value.code == "model_not_found"
    bodies: tuple[dict[str, Any], ...] = (
        {"input": [1, 2, 3]},
        {"input": [[1, 2], [3]]},
        {"input": []},
        {"input": ""},
        {"input": ["a", ""]},
        {"input": ["a"] * 2_049},
        {"input": ["a" * 500_001] * 2},
        {"input": "a", "dimensions": 256},
    )
    for body in bodies:
        await refused(shelf, "/v1/embeddings", model=EMBEDDER, **body)


async def test_a_response_has_the_answer_with_its_citations(client: AsyncOpenAI) -> None:
    answered = await client.responses.create(model="all", input=QUESTION, instructions="Be brief.", store=False)
    assert (answered.output_text, answered.status, answered.error) == (ANSWER, "completed", None)
    message: Any = answered.output[0]
    (cited,) = message.content[0].annotations
    assert (cited.type, ANSWER[cited.start_index : cited.end_index]) == ("url_citation", "[1]")
    assert answered.usage is not None
    assert answered.usage.total_tokens == answered.usage.input_tokens + answered.usage.output_tokens > 0
    assert answered.usage.output_tokens_details.reasoning_tokens == 0
    assert answered.id == f"resp_{details(answered)['query_id']}"


async def test_texts_are_not_embedded_for_a_client_that_has_left(shelf: Library) -> None:
    body = {"model": EMBEDDER, "input": ["A sentence about parcels to Iceland and their insurance. " * 8] * 2_000}
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await shelf.call("POST", "/v1/embeddings", body)
    async with asyncio.timeout(10):
        await post(shelf, "/v1/embeddings", {"model": EMBEDDER, "input": "cat"})


async def test_texts_of_one_caller_are_not_embedded_before_those_of_another(shelf: Library) -> None:
    large = {"model": EMBEDDER, "input": ["A sentence about parcels to Iceland and their insurance. " * 8] * 2_000}
    assert shelf.server.service._anabranch is not None
    embedding = shelf.server.service._anabranch.limits.shares["embeddings"]
    asked = [asyncio.create_task(shelf.call("POST", "/v1/embeddings", large, who="alice")) for _ in range(2)]
    async with asyncio.timeout(10):
        while not embedding.held:  # noqa: ASYNC110 (nothing announces it)
            await asyncio.sleep(0.005)
        await post(shelf, "/v1/embeddings", {"model": EMBEDDER, "input": "cat"}, "bob")
    assert not any(one.done() for one in asked)
    for one in asked:
        one.cancel()
    await asyncio.wait(asked)


async def test_a_response_has_every_field_that_openais_types_require(shelf: Library) -> None:
    body = await post(shelf, "/v1/responses", {"model": "all", "input": QUESTION})
    Response.model_validate_json(json.dumps(body), strict=True)


async def test_a_streamed_response_has_openais_events(client: AsyncOpenAI) -> None:
    said: Any = [
        {"role": "user", "content": "Hello"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
    ]
    stream = await client.responses.create(model="all", input=said, stream=True)
    events: list[Any] = [event async for event in stream]
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * deltas,
        *("output_text.annotation.added", "output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER
    assert events[-1].response.output_text == ANSWER
    assert details(events[-1].response)["faithfulness_score"] == 1
    async with client.responses.stream(model="all", input=QUESTION) as helped:
        assert (await helped.get_final_response()).output_text == ANSWER


async def test_a_previous_response_continues_its_conversation(
    shelf: Library, client: AsyncOpenAI, model: Space
) -> None:
    first = await client.responses.create(model="model:writer", input="What do you sell?")
    second = await client.responses.create(model="model:writer", input="Since when?", previous_response_id=first.id)
    sent = model.requests[-1].body["messages"]
    assert [one["content"] for one in sent[1:-1]] == ["What do you sell?", first.output_text]
    assert details(second)["conversation_id"] == details(first)["conversation_id"]
    await client.responses.create(model="model:writer", input="And where?", previous_response_id=first.id)
    assert len(model.requests[-1].body["messages"]) == 4, "a second branch does not have the turns of the first"
    async with connected(shelf, "bob") as bob:
        with pytest.raises(BadRequestError) as caught:
            await bob.responses.create(model="all", input="Since when?", previous_response_id=first.id)
    assert caught.value.code == "previous_response_not_found"


async def test_responses_refuse_what_they_cannot_do(shelf: Library) -> None:
    asked = {"model": "all", "input": QUESTION}
    refusals: dict[str, dict[str, Any]] = {
        "text.format": {"text": {"format": {"type": "json_object"}}},
        "tool_choice": {"tool_choice": {"type": "function", "name": "f"}},
        "background": {"background": True},
        "conversation": {"conversation": "conv_1"},
        "prompt": {"prompt": {"id": "pmpt_1"}},
        "input": {"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]},
        "input[0]": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input ": {"input": [{"role": "user", "content": QUESTION}, {"role": "user", "content": " "}]},
        "previous_response_id": {"previous_response_id": "resp_nothing"},
    }
    for param, more in refusals.items():
        assert (await refused(shelf, "/v1/responses", **{**asked, **more}))["param"] == param.strip()


async def test_questions_are_in_the_query_log_under_openai(shelf: Library, client: AsyncOpenAI) -> None:
    answered = await client.chat.completions.create(model="collection:shop", messages=MESSAGES)
    logged = await shelf.good("GET", f"/v1/queries/{details(answered)['query_id']}")
    assert (logged["surface"], logged["query"], logged["answer"]) == ("openai", QUESTION, ANSWER)


async def test_a_resumable_completion_can_be_read_again(shelf: Library) -> None:
    response = {"model": "all", "input": QUESTION, "stream": True}
    for path, body in (("/v1/chat/completions", asking(stream=True)), ("/v1/responses", response)):
        reply = await shelf.call("POST", path, body, headers={"Prefer": "resumable"})
        assert reply.headers["Preference-Applied"] == "resumable"
        again = await shelf.call("GET", f"/v1/streams/{reply.headers['Stream-Id']}")
        assert again.body.partition("id: ")[2] == reply.body.partition("id: ")[2]
        assert "30 days" in again.body


async def test_openais_client_reads_a_resumable_stream_with_keep_alives(
    shelf: Library, client: AsyncOpenAI, model: Space
) -> None:
    resumable = {"Prefer": "resumable"}
    chunks = [
        chunk
        async for chunk in await client.chat.completions.create(
            model="collection:shop", messages=MESSAGES, stream=True, extra_headers=resumable
        )
    ]
    assert "".join(one.choices[0].delta.content or "" for one in chunks) == ANSWER
    events = await client.responses.create(
        model="collection:shop", input=QUESTION, stream=True, extra_headers=resumable
    )
    assert [event.type async for event in events][-1] == "response.completed"
    # A blank line after a comment would be an event without data to this client.
    reply = await shelf.call("POST", "/v1/chat/completions", asking(stream=True), headers=resumable)
    assert re.match(r"retry: \d+\nid: 1\ndata: ", reply.body)
    commented = reply.body.replace("id: 2", ": keep-alive\nid: 2").encode()
    assert all(one.data for one in SSEDecoder().iter_bytes(iter([commented])))


async def test_earlier_answers_are_read_by_their_id_and_tool_calls_are_skipped(
    shelf: Library, client: AsyncOpenAI, model: Space
) -> None:
    first = await client.responses.create(model="model:writer", input="What do you sell?")
    items: Any = [
        {"role": "user", "content": "What do you sell?"},
        {"type": "item_reference", "id": first.output[0].id},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "20"},
        {"role": "user", "content": "Since when?"},
    ]
    await client.responses.create(model="model:writer", input=items)
    sent = model.requests[-1].body["messages"]
    assert [one["content"] for one in sent[1:-1]] == ["What do you sell?", first.output_text]
    async with connected(shelf, "bob") as bob:
        with pytest.raises(BadRequestError, match="query log does not have"):
            await bob.responses.create(model="all", input=items)


async def test_only_a_key_that_was_sent_is_called_incorrect(tmp_path: Path, models_dir: Path) -> None:
    async with library(tmp_path, models_dir, rate_limit=0, auth="api_key") as opened:
        opened.secrets["nobody"] = "ab_wrong"
        without, wrong = [await opened.call("GET", "/v1/models", who=who) for who in (None, "nobody")]
    assert [one.status for one in (without, wrong)] == [401, 401]
    assert without.body["error"]["message"].startswith("This needs an API key")
    assert wrong.body["error"]["message"].startswith("Incorrect API key provided. ")


async def test_an_address_that_does_not_exist_is_openais_error(shelf: Library) -> None:
    for path, said in {
        "/v1/completions": "Questions go to /v1/chat/completions",
        "/v1/models/": "Questions go to",
        "/v1/files": "Questions go to",
        "/chat/completions": "under /v1",
    }.items():
        reply = await shelf.call("POST", path, {})
        assert (reply.status, reply.body["error"]["code"]) == (404, "not_found"), path
        assert said in reply.body["error"]["message"]


async def test_a_sentence_without_a_mark_is_annotated_as_a_whole(
    shelf: Library, client: AsyncOpenAI, model: Space
) -> None:
    model.model("unmarked", reply="Hello. Refunds for printed books take 30 days.")
    answered = await client.chat.completions.create(model="model:unmarked", messages=MESSAGES)
    message = answered.choices[0].message
    [cited] = [one.url_citation for one in message.annotations or []]
    assert (message.content or "")[cited.start_index : cited.end_index] == "Refunds for printed books take 30 days."


async def printed_by(*command: str | Path, folder: Path | None = None) -> str:
    process = await asyncio.create_subprocess_exec(*command, cwd=folder, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(30):
        printed, _ = await process.communicate()
    assert process.returncode == 0
    return printed.decode()


async def test_npms_client_asks_streams_and_embeds(shelf: Library) -> None:
    arguments = (str(PACKAGES), f"{shelf.server.url}/v1", shelf.secrets["bob"], EMBEDDER)
    found = json.loads(await printed_by(NODE, HERE / "openai_client.mjs", *arguments))
    assert found["models"] == ["all", "collection:shop", "collection:/a%2Fb shop", "model:extractive", EMBEDDER]
    assert found["model"]["id"] == "collection:/a%2Fb shop"
    assert found["chat"]["choices"][0]["message"]["content"] == ANSWER
    chunks = found["chunks"]
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in chunks[:-1]) == ANSWER
    assert chunks[-2]["anabranch"]["faithfulness_score"] == 1
    assert chunks[-1]["usage"]["total_tokens"] > 0
    assert [len(one["embedding"]) for one in found["embeddings"]["data"]] == [384, 384]
    assert found["response"]["output_text"] == ANSWER
    assert found["events"][-1]["type"] == "response.completed"
    assert found["error"] == {
        "status": 404,
        "code": "model_not_found",
        "type": "invalid_request_error",
        "kind": "NotFoundError",
    }


def example(shelf: Library, language: str) -> str:
    """An example of the page, for this server and a key of it."""
    (code,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return str(code.replace("http://127.0.0.1:8001", shelf.server.url).replace("KEY", shelf.secrets["bob"]))


async def test_the_documented_examples_run(shelf: Library, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "example.mjs").write_text(example(shelf, "javascript"), encoding="utf-8")
    (tmp_path / "node_modules").symlink_to(PACKAGES / "node_modules")
    assert await printed_by(NODE, "--preserve-symlinks-main", "example.mjs", folder=tmp_path) == f"{ANSWER}\n1\n"
    by_curl = json.loads(await printed_by("sh", "-c", example(shelf, "sh")))
    assert by_curl["choices"][0]["message"]["content"] == ANSWER
    names: dict[str, Any] = {}
    code = compile(example(shelf, "python"), "openai.md", "exec")
    capsys.readouterr()
    await asyncio.to_thread(exec, code, names)
    await asyncio.to_thread(names["client"].close)
    assert capsys.readouterr().out.startswith(f"{ANSWER}\nHandbook http")


async def test_the_rate_limit_of_the_surface_is_openais_error(tmp_path: Path, models_dir: Path) -> None:
    async with (
        library(tmp_path, models_dir, rate_limit=1, rate_limit_surfaces=("openai",)) as opened,
        connected(opened, "bob") as bob,
    ):
        await bob.embeddings.create(model=EMBEDDER, input="cat")
        with pytest.raises(RateLimitError) as caught:
            await bob.chat.completions.create(model="all", messages=MESSAGES)
    assert caught.value.code == "rate_limit_exceeded"
    assert int(caught.value.response.headers["Retry-After"]) > 0
