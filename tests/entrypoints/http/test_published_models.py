"""A model of the operator's that others may ask, under a name of its own."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from anabranch.configuration.settings import load
from anabranch.domain.errors import ConfigurationError, Conflict
from anabranch.entrypoints.cli.collections import publish as publish_command
from anabranch.knowledge.model import Caller
from anabranch.testing import Failure, Hub, Space
from support.federation import Node, logged, node
from support.scripted_source import until

Open = Callable[..., Any]

SECRET = "sk-operators-own"
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Where does it rain?"},
    {"role": "assistant", "content": "In Bergen."},
    {"role": "user", "content": "And where not?"},
]


@pytest.fixture
def publish(space: Space, tmp_path: Path) -> Open:
    """A node with one published model, `mia/writer`, which is this one of the space's."""

    @asynccontextmanager
    async def opened(slug: str = "gpt", kind: str = "space", **settings: Any) -> AsyncIterator[Node]:
        config = tmp_path / "anabranch.yaml"
        config.write_text(
            f"models:\n"
            f"  hidden: {{url: '{space.url}', slug: scribe}}\n"
            f"  inner: {{url: '{space.url}', slug: {slug}, kind: {kind}, token: {SECRET}, publish: mia/writer}}\n"
        )
        variables = {"LOG_LEVEL": "ERROR", "DATA_DIR": str(tmp_path / "data"), **settings}
        environment = {f"AGGREGATOR_{name.upper()}": str(value) for name, value in variables.items()}
        async with node(load(environment, config)) as started:
            yield started

    return opened


@pytest.mark.parametrize("kind", ["space", "openai"])
async def test_a_model_answers_with_a_summary(publish: Open, space: Space, kind: str) -> None:
    space.model("gpt", reply="In the Atacama.", token=SECRET)
    async with publish(kind=kind) as there:
        headers = {"X-Correlation-ID": "trace-1", "traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
        reply = await there.ask("writer", TALK, max_tokens=7, temperature=0.25, headers=headers)
    assert reply.status == 200
    assert reply.body == {
        "summary": {
            "id": "trace-1",
            "model": "writer",
            "message": {"role": "assistant", "content": "In the Atacama.", "tokens": 4},
            "finish_reason": "stop",
            "usage": {"prompt_tokens": 15, "completion_tokens": 4, "total_tokens": 19},
            "cost": 0.0,
            "provider_info": {"name": "anabranch", "endpoint": "mia/writer"},
        },
        "references": None,
    }
    (sent,) = space.requests
    assert sent.body["messages"] == TALK
    assert (sent.body["max_tokens"], sent.body["temperature"]) == (7, 0.25)
    assert sent.headers["Authorization"] == f"Bearer {SECRET}"
    assert sent.headers["X-Correlation-ID"] == "trace-1"
    assert sent.headers["traceparent"] == headers["traceparent"]


async def test_a_text_is_a_message_and_what_is_not_said_is_the_default(publish: Open, space: Space) -> None:
    space.model("gpt", reply="Hm.", usage=False)
    async with publish(max_top_k=1, default_top_k=1) as there:
        for path in ("writer", "mia/writer"):
            reply = await there.ask(path, "Why?")
            assert (reply.body["summary"]["message"]["content"], reply.body["summary"]["usage"]) == ("Hm.", None)
        for messages in ("", " ", [], [{"role": "system", "content": "x"}], [{"content": ""}]):
            assert (await there.ask("writer", messages)).status == 422
        for path in ("hidden", "inner", "scribe", "gpt", "alice/writer"):
            assert (await there.ask(path, "Why?")).status == 404
    assert space.requests[0].body["messages"] == [{"role": "user", "content": "Why?"}]
    assert space.requests[0].body["max_tokens"] == 1024


@pytest.mark.parametrize("kind", ["space", "openai"])
async def test_a_published_model_streams_completion_chunks(publish: Open, space: Space, kind: str) -> None:
    words = "Dry\u2028 and\u2029 \u0085 cold."
    space.model("gpt", reply=words, form="openai")
    async with publish(kind=kind, model_streaming_enabled=True) as there:
        reply = await there.ask("writer", "Where?", stream=True)
    assert reply.headers["Content-Type"].startswith("text/event-stream")
    assert reply.headers["Cache-Control"] == "no-cache"
    for character in "\u2028\u2029\u0085":
        assert character not in reply.body
    pieces = [line.removeprefix("data: ") for line in reply.body.strip().split("\n\n")]
    assert all("\n" not in piece for piece in pieces)
    assert pieces.pop() == "[DONE]"
    chunks = [json.loads(piece) for piece in pieces]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == words
    assert len(chunks) > 2
    assert {chunk["model"] for chunk in chunks} == {"writer"}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert chunks[-1]["usage"]["completion_tokens"] > 0


FAILURES = {
    Failure.HANG: (504, "the model did not finish within 0.2 seconds (AGGREGATOR_GENERATION_TIMEOUT)"),
    Failure.TRICKLE: (504, "the model did not finish within 0.2 seconds (AGGREGATOR_GENERATION_TIMEOUT)"),
    Failure.STATUS_401: (502, "It asks for a valid token (401)"),
    Failure.STATUS_402: (502, "It asks for payment (402)"),
    Failure.STATUS_429: (502, "It is being asked too often (429)"),
    Failure.STATUS_500: (502, "It answered with an error (500)"),
    Failure.ACCESS_DENIED: (502, "It denied access by policy"),
    Failure.HTML: (502, "The model's reply should be JSON, but it is an HTML page"),
    Failure.WRONG_SHAPE: (502, "The model's reply holds no answer"),
    Failure.INVALID_UTF8: (502, "The model's reply should be JSON, but it is something else"),
    Failure.RESET: (502, "The connection was closed before the reply was complete"),
    Failure.REDIRECT: (502, "It answered with a redirect, which is not followed"),
    Failure.STREAM_ERROR: (502, "The model reported an error in the middle of its answer"),
    Failure.HUGE: (502, "The reply is larger than 4,194,304 bytes (AGGREGATOR_MAX_REPLY_BYTES)"),
}


@pytest.mark.parametrize(("slow", "timeout_s"), [(True, 0.2), (False, 30)])
async def test_a_published_model_that_fails_hides_the_upstream_text(
    publish: Open, space: Space, tmp_path: Path, slow: bool, timeout_s: float
) -> None:
    """In a sentence of ours: the words of the model's server may quote the operator's key."""
    leak = json.dumps({"error": {"message": f"Incorrect API key provided: {SECRET}"}}).encode()
    async with publish(generation_timeout=timeout_s, model_retries=0, breaker_calls=1_000) as there:
        for failure, (status, sentence) in FAILURES.items():
            if slow != (status == 504):
                continue
            body = leak if failure.value.startswith("status") else None
            space.fails("gpt", failure, body=body, size_bytes=4 * 1024 * 1024)
            said = f"Model generation failed: {sentence}."
            reply = await there.ask("writer", "Why?", transaction_token="tx-failed")
            assert (reply.status, reply.body) == (status, {"detail": said})
            streamed = await there.ask("writer", "Why?", stream=True, transaction_token="tx-failed")
            assert streamed.status == 200
            *_, error, done = streamed.body.strip().split("\n\n")
            assert done == "data: [DONE]"
            assert json.loads(error.removeprefix("data: "))["error"]["message"] == said
            assert SECRET not in streamed.body
    assert not (tmp_path / "data").exists()  # nobody pays for nothing


async def test_the_whole_question_has_its_time(publish: Open) -> None:
    async with publish("hang", generation_timeout=9, total_timeout=0.2) as there:
        reply = await there.ask("writer", "Why?")
    assert reply.status == 504
    assert "total time" in reply.body["detail"]


async def test_the_models_key_is_nowhere(publish: Open, space: Space, capfd: pytest.CaptureFixture[str]) -> None:
    space.fails("gpt", Failure.STATUS_401, body=json.dumps({"detail": f"Bad key: {SECRET}"}).encode())
    async with publish(log_level="DEBUG") as there:
        replies = [await there.ask("writer", "Why?", stream=stream) for stream in (False, True)]
        async with there.server.session.get(f"{there.url}/openapi.json") as response:
            described = await response.text()
    log = capfd.readouterr().err
    assert "chat_request_completed" in log
    assert SECRET not in log + described + str(replies)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_ends_the_models_work(publish: Open, space: Space, stream: bool) -> None:
    async with publish("hang") as there:
        asking = asyncio.create_task(there.ask("writer", "Why?", stream=stream))
        await space.wait_for(lambda: space.requests)
        asking.cancel()
        await space.wait_for(lambda: space.requests[0].disconnected)


async def test_what_a_model_was_asked_is_recorded(publish: Open, space: Space, tmp_path: Path) -> None:
    """The first question that is paid for makes the log; before, a node that only lends its model keeps nothing."""
    space.model("gpt", reply="Because.")
    async with publish() as there:
        await there.ask("writer", "Why?")
        assert not (tmp_path / "data").exists()
        for transaction, stream in (("tx-1", False), ("tx-2", True)):
            assert (await there.ask("writer", "Why?", transaction_token=transaction, stream=stream)).status == 200
            (row,) = logged(tmp_path / "data", "transaction_token", transaction)
            assert (row["endpoint"], row["user"], row["model"]) == ("mia/writer", "(guest)", "mia/writer")
            assert (row["original"], row["answer"], row["output_tokens"]) == ("Why?", "Because.", 2)
        await there.ask("writer", "And without?")
        await until(lambda: len(logged(tmp_path / "data", "original", "And without?")) == 1)
    assert all("transaction_token" not in request.body for request in space.requests)


async def test_a_model_asks_for_a_token_like_everything_else(publish: Open, space: Space) -> None:
    space.model("gpt", reply="Because.", token=SECRET)
    async with Hub(signing=True) as hub, publish(auth="jwt", syfthub_url=hub.url) as there:
        assert (await there.ask("writer", "Why?")).status == 401
        assert (await there.ask("writer", "Why?", token=hub.token("alice", sub="17"))).status == 401
        assert not space.requests
        for token in (hub.token("mia"), hub.token("mia", sub="17")):
            assert (await there.ask("writer", "Why?", token=token)).status == 200


async def test_one_name_for_a_model_and_a_collection(publish: Open, space: Space) -> None:
    space.model("gpt", reply="Because.")
    async with publish() as there:
        anabranch = there.server.service._anabranch
        assert anabranch is not None
        room = await anabranch.knowledge()
        made = await room.create_collection(Caller(operator=True), "notes")
        for owner in ("mia", "zoe"):
            await room.publish(Caller(operator=True), made.id, owner, "writer")
        for path in ("mia/writer", "writer"):
            reply = await there.ask(path, "Why?")
            assert (reply.status, "both a model and a collection" in reply.body["detail"]) == (409, True)
        assert (await there.ask("zoe/writer", "Why?")).status == 200


def test_a_collection_is_not_published_under_a_models_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "anabranch.yaml"
    config.write_text("models: {inner: {url: 'http://x', slug: gpt, publish: mia/writer}}")
    monkeypatch.setenv("AGGREGATOR_DATA_DIR", str(tmp_path / "data"))
    arguments = ["notes", "--as", "mia/writer", "--config", str(config)]
    with pytest.raises(Conflict, match="mia/writer is the model 'inner'"):
        publish_command.main(arguments, standalone_mode=False)


@pytest.mark.parametrize(
    "path", ["writer", "mia/", "/writer", "mia/Writer", "mia/a/b", "mïa/writer", "mia/writer\\n", ""]
)
def test_a_name_that_cannot_be_published(tmp_path: Path, path: str) -> None:
    config = tmp_path / "anabranch.yaml"
    config.write_text(f'models: {{inner: {{url: "http://x", slug: gpt, publish: "{path}"}}}}\n', encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"models\.inner"):
        load({}, config)
