"""Which errors name the address that failed, and to whom."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anabranch import Anabranch, Settings
from anabranch.domain.model import Endpoint
from anabranch.testing import Failure, Space
from conftest import Server, ref
from support.collection_server import library, text

STRANGER = {"Via": "1.1 proxy"}


@pytest.fixture
def closed() -> Iterator[str]:
    """The address of a port on which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


async def failed(server: Server, reference: dict[str, Any], **headers: str) -> str:
    """The error of a source in a chat request."""
    body = {"prompt": "Why?", "data_sources": [reference], "retrieval_only": True}
    _, answer, _ = await server.post("/api/v1/chat", body, headers=headers)
    return str(answer["retrieval_info"][0]["error_message"])


async def test_an_address_that_the_request_names_is_in_the_error(serve: Any, closed: str) -> None:
    secretive = {"url": f"http://{closed}/k3y-in-the-path", "slug": "docs", "owner_username": "alice"}
    async with serve(endpoint_allowlist_public=True, model_retries=0) as server:
        for headers in ({}, STRANGER):
            assert await failed(server, secretive, **headers) == f"No connection could be made: {closed}."
        body = {"prompt": "Why?", "model": secretive}
        status, answer, _ = await server.post("/api/v1/chat", body, headers=STRANGER)
        unresolved = await failed(server, {"url": "http://nowhere.invalid", "slug": "docs"})
    assert (status, answer["message"]) == (502, f"Model generation failed: No connection could be made: {closed}.")
    assert unresolved == "The host name could not be resolved: nowhere.invalid:80."


async def test_a_token_of_the_caller_is_removed_from_an_address_in_an_error(serve: Any) -> None:
    body = {
        "prompt": "Why?",
        "data_sources": [{"url": "http://t0ken-of-alice.invalid", "slug": "docs", "owner_username": "alice"}],
        "endpoint_tokens": {"alice": "t0ken-of-alice"},
        "retrieval_only": True,
    }
    async with serve() as server:
        answer = await server.chat(**body)
    assert answer["retrieval_info"][0]["error_message"] == "The host name could not be resolved: [removed].invalid:80."


@pytest.mark.parametrize(
    ("auth", "who", "shown"),
    [("auto", None, True), ("auto", "root", True), ("api_key", "root", True), ("api_key", "bob", False)],
)
async def test_a_configured_address_is_shown_to_the_operator_only(
    tmp_path: Path, models_dir: Path, closed: str, auth: str, who: str | None, shown: bool
) -> None:
    wiki = Endpoint(slug="wiki", url=f"http://{closed}", operator=True)
    async with library(tmp_path, models_dir, auth=auth, sources={"wiki": wiki}) as shelf:
        error = await failed(shelf.server, {"slug": "wiki"}, **shelf.key(who))
        asked = await shelf.call("POST", "/v1/query", {"query": "Why?", "sources": ["wiki"]}, who=who)
    expected = f"No connection could be made: {closed}." if shown else "No connection could be made."
    assert (error, asked.status, asked.body["message"]) == (expected, 503, expected)


async def test_the_default_models_address_is_shown_to_the_operator_only(
    tmp_path: Path, models_dir: Path, closed: str
) -> None:
    given = {"model_url": f"http://{closed}", "model_name": "writer", "model_retries": 0, "model_fallback": "off"}
    question = {"query": "When does the ferry leave?"}
    async with library(tmp_path, models_dir, **given) as shelf:
        await shelf.collection("travel")
        await shelf.ingest("travel", text("The ferry leaves at noon.", title="Ferries"))
        own = await shelf.call("POST", "/v1/query", question)
        others = await shelf.call("POST", "/v1/query", question, who="bob")
        streamed = await shelf.call("POST", "/rag/stream", {**question, "threshold": 0}, who="bob")
    assert (own.status, others.status) == (503, 503)
    assert own.body["message"].endswith(f": {closed}. Check AGGREGATOR_MODEL_URL.")
    for reply in (others, streamed):
        assert closed.rpartition(":")[2] not in str(reply.body)
        assert "AGGREGATOR_MODEL_URL" not in str(reply.body)


@pytest.mark.parametrize(
    ("failure", "setting"),
    [(Failure.STATUS_401, "AGGREGATOR_MODEL_API_KEY"), (Failure.STATUS_404, "AGGREGATOR_MODEL_NAME")],
)
async def test_a_refusal_of_the_default_model_names_the_setting_to_the_operator(
    serve: Any, space: Space, failure: Failure, setting: str
) -> None:
    named = {"prompt": "When?", "data_sources": [ref(space, "docs")], "model": {"slug": "default"}}
    async with serve(model_url=space.url, model_name=failure.value, model_retries=0) as server:
        status, answer, _ = await server.post("/api/v1/chat", named)
    assert status == 502
    assert f" Check {setting}" in answer["message"]


async def test_a_source_that_needs_a_key_says_whom_to_ask_for_one(server: Server, space: Space) -> None:
    space.source("docs", documents=[], token="t-1")
    said = await failed(server, {"url": space.url, "slug": "docs", "owner_username": "ben"})
    assert "Ask ben for a key, and give it with --token ben=KEY (command line), in endpoint_tokens" in said
    unowned = await failed(server, {"url": space.url, "slug": "docs"})
    assert "Ask its owner for a key" in unowned
    assert "owner_username" in unowned


async def test_the_library_and_the_command_line_name_what_they_cannot_reach(closed: str) -> None:
    async with Anabranch.open(settings=Settings()) as ab:
        answer = await ab.ask("Why?", sources=[f"http://{closed}/docs"])
    assert answer.replies[0].error == f"No connection could be made: {closed}."


async def test_a_refused_address_names_the_setting(serve: Any, closed: str) -> None:
    async with serve(endpoint_allowlist=()) as server:
        error = await failed(server, {"url": f"http://{closed}", "slug": "docs"})
    assert error.startswith("This address is not open to requests")
    assert "AGGREGATOR_ENDPOINT_ALLOWLIST" in error


async def test_time_outs_and_limits_name_their_setting(serve: Any, space: Any) -> None:
    async with serve(retrieval_timeout=0.2, generation_timeout=0.2, max_reply_bytes=1_000, model_retries=0) as server:
        slow = await failed(server, {"url": space.url, "slug": "hang"})
        large = await failed(server, {"url": space.url, "slug": "huge"})
        body = {"prompt": "Why?", "model": {"url": space.url, "slug": "hang"}}
        _, writing, _ = await server.post("/api/v1/chat", body)
        _, many, _ = await server.post("/api/v1/chat", {**body, "data_sources": [{"url": space.url, "slug": "s"}] * 11})
    assert slow.endswith("(AGGREGATOR_RETRIEVAL_TIMEOUT).")
    assert large.endswith("(AGGREGATOR_MAX_REPLY_BYTES).")
    assert writing["message"].endswith("(AGGREGATOR_GENERATION_TIMEOUT).")
    assert many["message"].endswith("(AGGREGATOR_MAX_DATA_SOURCES).")
    async with serve(total_timeout=0.3) as server:
        assert (await failed(server, {"url": space.url, "slug": "hang"})).endswith("(AGGREGATOR_TOTAL_TIMEOUT).")
        _, late, _ = await server.post("/api/v1/chat", body)
    assert late["message"].endswith("(AGGREGATOR_TOTAL_TIMEOUT).")
