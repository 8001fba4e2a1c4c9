"""One Anabranch asks another: what is published on one is a source and a model on the other."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from syfthub_sdk import SyftHubClient
from syfthub_sdk.models import SourceStatus

from anabranch import Anabranch
from anabranch.configuration.settings import Settings
from anabranch.domain.model import Endpoint, Status
from anabranch.testing import Document, Hub, Space
from conftest import LOCAL, Server, running
from support.federation import OPENING, Node, Seeded, node, seeded

__all__ = ["seeded"]  # the fixture

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("endpoints")]

NOON = "The canteen opens at noon."
ELEVEN = "The staff canteen opens at eleven."


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hub() -> AsyncIterator[Hub]:
    async with Hub(signing=True) as started:
        started.member("syft_pat_carol", sub="17", username="carol")
        started.member("syft_pat_bob", sub="18", username="bob")
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def library() -> AsyncIterator[Space]:
    """What neither of them has itself: a model."""
    async with Space() as started:
        started.model("scribe", token="sk-far")
        started.model("plain", reply="Plain\u2028 words.", form="openai")
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def far(seeded: Seeded, hub: Hub, library: Space) -> AsyncIterator[Node]:
    """The node that publishes; nobody is at its machine."""
    models = {
        "inner": Endpoint(slug="scribe", url=library.url, operator=True, token="sk-far"),
        "plain": Endpoint(slug="plain", url=library.url, operator=True, kind="openai"),
    }
    published = {"mia/writer": "inner", "mia/plain": "plain"}
    settings = seeded.settings(syfthub_url=hub.url, trusted_proxies=LOCAL, models=models, published_models=published)
    async with node(settings, seeded.secrets) as started:
        hub.publish(owner="alice", slug="canteen", url=started.url, type="data_source", tenant="alice")
        hub.publish(owner="mia", slug="writer", url=started.url, type="model")
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def near(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    """The node that is asked."""
    data = tmp_path_factory.mktemp("near")
    settings = Settings(endpoint_allowlist=LOCAL, log_level="ERROR", model_streaming_enabled=True, data_dir=str(data))
    async with running(settings) as started:
        yield started


def at(far: Node, slug: str, owner: str, **more: Any) -> dict[str, Any]:
    return {"url": far.url, "slug": slug, "owner_username": owner, **more}


async def found(near: Server, far: Node, token: str | None, slug: str = "canteen", **more: Any) -> dict[str, Any]:
    tokens = {"alice": token} if token is not None else {}
    return await near.chat(
        prompt=OPENING,
        data_sources=[at(far, slug, "alice", **more)],
        endpoint_tokens=tokens,
        retrieval_only=True,
    )


@pytest.mark.parametrize(
    ("who", "contents"),
    [
        ("bob", {NOON}),
        ("carol", {NOON, ELEVEN}),
        ("erin", {NOON, ELEVEN}),
        ("guest", {NOON}),
        ("member", {NOON, ELEVEN}),
    ],
)
async def test_federation_returns_documents_visible_to_the_token(
    near: Server, far: Node, hub: Hub, who: str, contents: set[str]
) -> None:
    hubs = {"guest": hub.token("alice"), "member": hub.token("alice", sub="17", username="carol")}
    answer = await found(near, far, hubs.get(who) or far.secrets[who])
    assert {source["content"] for source in answer["sources"].values()} == contents
    assert {source["slug"] for source in answer["sources"].values()} == {"alice/canteen"}
    assert "Canteen" in answer["sources"]
    (info,) = answer["retrieval_info"]
    assert (info["status"], info["documents_retrieved"]) == ("success", len(contents))


async def test_federation_reports_the_remote_refusal(near: Server, far: Node, hub: Hub) -> None:
    for token, words in (
        (None, "needs an API key"),
        ("ab_wrong", "not known"),
        (hub.token("alice", expires_s=-60), "expired"),
        (hub.token("mallory"), "another audience"),
    ):
        (info,) = (await found(near, far, token))["retrieval_info"]
        assert info["status"] == "access_denied"
        assert words in info["error_message"]
    (info,) = (await found(near, far, far.secrets["bob"], "nothing"))["retrieval_info"]
    assert (info["status"], "no endpoint 'nothing' here" in info["error_message"]) == ("error", True)


async def test_federation_disambiguates_one_slug_of_two_owners(near: Server, far: Node, hub: Hub) -> None:
    key = far.secrets["bob"]
    (info,) = (await found(near, far, key, "docs"))["retrieval_info"]
    assert "alice, bob" in info["error_message"]
    for reached in (
        await found(near, far, key, "docs", tenant_name="alice"),
        await found(near, far, key, "alice/docs"),
        await found(near, far, hub.token("alice"), "docs"),
    ):
        assert reached["sources"]["Canteen"]["content"] == NOON


async def test_an_answer_by_a_model_that_is_published_too(near: Server, far: Node, hub: Hub, library: Space) -> None:
    body = {
        "prompt": OPENING,
        "data_sources": [at(far, "canteen", "alice")],
        "model": at(far, "writer", "mia"),
        "endpoint_tokens": {"alice": hub.token("alice"), "mia": far.secrets["bob"]},
        "transaction_tokens": {"alice": "tx-alice-1", "mia": "tx-mia-1"},
    }
    answer = await near.chat(**body)
    assert answer["response"] == "The canteen opens at noon [alice/canteen]."
    assert answer["usage"]["total_tokens"] > 0
    events = await near.stream(**body)
    assert "".join(event.data["content"] for event in events if event.name == "token") == answer["response"]
    assert events[-1].name == "done"
    assert events[-1].data["usage"] == answer["usage"]
    assert all(request.headers["Authorization"] == "Bearer sk-far" for request in library.requests)
    assert all("transaction_token" not in request.body for request in library.requests)


async def test_federation_records_each_query_on_its_node(near: Server, far: Node, seeded: Seeded) -> None:
    await near.chat(
        prompt=OPENING,
        data_sources=[at(far, "canteen", "alice")],
        model=at(far, "writer", "mia"),
        endpoint_tokens={"alice": far.secrets["carol"], "mia": far.secrets["bob"]},
        transaction_tokens={"alice": "tx-alice-2", "mia": "tx-mia-2"},
    )
    for transaction, endpoint, user in (("tx-alice-2", "alice/canteen", "carol"), ("tx-mia-2", "mia/writer", "bob")):
        (row,) = seeded.queries(transaction)
        assert (row["endpoint"], row["user"]) == (endpoint, user)


async def test_federation_preserves_unicode_line_separators(near: Server, far: Node) -> None:
    body = {"prompt": "?", "model": at(far, "plain", "mia"), "endpoint_tokens": {"mia": far.secrets["bob"]}}
    assert (await near.chat(**body))["response"] == "Plain\u2028 words."
    tokens = [event.data["content"] for event in await near.stream(**body) if event.name == "token"]
    assert "".join(tokens) == "Plain\u2028 words."


async def test_federation_reports_a_failed_published_model(near: Server, far: Node) -> None:
    body = {"prompt": "?", "model": at(far, "nothing", "mia"), "endpoint_tokens": {"mia": far.secrets["bob"]}}
    status, answer, _ = await near.post("/api/v1/chat", body)
    assert status == 502
    assert "There is no such endpoint (404)" in answer["message"]


@pytest.mark.parametrize(
    ("api_token", "contents"), [("syft_pat_carol", {NOON, ELEVEN}), ("syft_pat_bob", {NOON}), (None, {NOON})]
)
async def test_with_the_public_client_and_a_hub(
    near: Server, far: Node, hub: Hub, api_token: str | None, contents: set[str]
) -> None:
    def ask() -> tuple[Any, Any]:
        aggregator = f"{near.url}/api/v1"
        with SyftHubClient(base_url=hub.url, aggregator_url=aggregator, api_token=api_token) as client:
            guest, sources = api_token is None, list[Any](["alice/canteen"])
            return (
                client.search.query(prompt=OPENING, data_sources=sources, guest_mode=guest),
                client.chat.complete(prompt=OPENING, data_sources=sources, guest_mode=guest, model="mia/writer"),
            )

    documents, answer = await asyncio.to_thread(ask)
    assert {document.content for document in documents.documents} == contents
    assert [info.status for info in answer.retrieval_info] == [SourceStatus.SUCCESS]
    assert "opens at noon [alice/canteen]" in answer.response


async def test_from_the_library_as_a_guest(far: Node, hub: Hub) -> None:
    settings = Settings(syfthub_url=hub.url, endpoint_allowlist=LOCAL)
    async with Anabranch.open(settings=settings) as anabranch:
        answer = await anabranch.ask(OPENING, sources=["alice/canteen"], model="extractive")
    assert [reply.status for reply in answer.replies] == [Status.SUCCESS]
    assert [passage.text for passage in answer.passages] == [NOON]


async def test_cancelling_a_question_cancels_it_on_the_remote_node(near: Server, far: Node, library: Space) -> None:
    library.model("scribe", reply="Too late.", delay_s=60)
    try:
        body = {"prompt": "?", "model": at(far, "writer", "mia"), "endpoint_tokens": {"mia": far.secrets["bob"]}}
        before = len(library.requests)
        asking = asyncio.create_task(near.chat(**body))
        await library.wait_for(lambda: len(library.requests) > before)
        asking.cancel()
        await library.wait_for(lambda: library.requests[-1].disconnected)
    finally:
        library.model("scribe", token="sk-far")


async def test_a_node_can_be_its_own_source(near: Server, library: Space) -> None:
    """Nothing of that kind is published: it says so, and does not turn in circles."""
    library.source("docs", documents=[Document(title="Note", content="Streams rejoin.")])
    sources = [{"url": near.url, "slug": "docs"}, {"url": library.url, "slug": "docs"}]
    answer = await near.chat(prompt="?", data_sources=sources, retrieval_only=True)
    assert [info["status"] for info in answer["retrieval_info"]] == ["error", "success"]
