"""The public SyftHub client, unchanged from the package registry, against our server."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from syfthub_sdk import EndpointRef, SyftHubClient
from syfthub_sdk.chat import DoneEvent, ErrorEvent, TokenEvent
from syfthub_sdk.exceptions import AggregatorError
from syfthub_sdk.models import SourceStatus

from anabranch.testing import Document, Hub, Space
from conftest import Server


@pytest.fixture
async def federation(space: Space) -> AsyncIterator[Hub]:
    """A hub that knows two owners' data and a third one's model; two of them ask for tokens."""
    space.source("docs", documents=[Document(title="Guide", content="Water runs downhill.")], token="satellite-alice")
    space.source("open", documents=[Document(title="Note", content="Streams rejoin.")])
    space.source("guests", documents=[Document(title="Hello", content="Guests are welcome.")], token="guest-alice")
    async with Hub() as hub:
        for slug in ("docs", "guests"):
            hub.publish(owner="alice", slug=slug, url=space.url, type="data_source", tenant="acme")
        hub.publish(owner="bob", slug="open", url=space.url, type="data_source")
        hub.publish(owner="mia", slug="scribe", url=space.url, type="model")
        yield hub


@pytest.fixture
def client(federation: Hub, server: Server) -> Any:
    made = SyftHubClient(base_url=federation.url, aggregator_url=f"{server.url}/api/v1", api_token="syft_pat_1")
    yield made
    made.close()


async def test_sdk_gets_a_complete_answer(client: SyftHubClient, space: Space) -> None:
    answer = await asyncio.to_thread(
        client.chat.complete, prompt="Where to?", model="mia/scribe", data_sources=["alice/docs", "bob/open"]
    )
    assert answer.response == "Water runs downhill [alice/docs]. Streams rejoin [bob/open]."
    assert answer.sources["Guide"].slug == "alice/docs"
    assert [info.status for info in answer.retrieval_info] == [SourceStatus.SUCCESS] * 2
    assert answer.usage is not None
    sent = {request.slug: request for request in space.requests}
    assert sent["docs"].headers["Authorization"] == "Bearer satellite-alice"
    assert sent["docs"].headers["X-Tenant-Name"] == "acme"
    assert sent["docs"].body["transaction_token"] == "tx-alice"
    assert sent["open"].headers["Authorization"] == "Bearer satellite-bob"


async def test_sdk_streams_an_answer(client: SyftHubClient) -> None:
    def listen() -> list[Any]:
        return list(client.chat.stream(prompt="Where to?", model="mia/scribe", data_sources=["alice/docs", "bob/open"]))

    events = await asyncio.to_thread(listen)
    assert [event.type for event in events] == [
        "retrieval_start",
        "source_complete",
        "source_complete",
        "retrieval_complete",
        "generation_start",
        "token",
        "done",
    ]
    text = "".join(event.content for event in events if isinstance(event, TokenEvent))
    assert text == "Water runs downhill [alice/docs]. Streams rejoin [bob/open]."
    done = events[-1]
    assert isinstance(done, DoneEvent)
    assert [info.path for info in done.retrieval_info] == ["alice/docs", "bob/open"]
    assert done.metadata is not None


async def test_sdk_searches_documents(client: SyftHubClient, space: Space) -> None:
    found = await asyncio.to_thread(client.search.query, prompt="Where to?", data_sources=["alice/docs", "bob/open"])
    assert {(document.title, document.slug) for document in found.documents} == {
        ("Guide", "alice/docs"),
        ("Note", "bob/open"),
    }
    assert not any(request.slug == "scribe" for request in space.requests)


async def test_sdk_works_in_guest_mode(federation: Hub, server: Server) -> None:
    with SyftHubClient(base_url=federation.url, aggregator_url=f"{server.url}/api/v1") as guest:
        answer = await asyncio.to_thread(
            guest.chat.complete,
            prompt="May I?",
            model="mia/scribe",
            data_sources=["alice/guests"],
            guest_mode=True,
        )
    assert answer.response == "Guests are welcome [alice/guests]."


async def test_sdk_sends_history_with_plain_references(server: Server, space: Space) -> None:
    with SyftHubClient(base_url="http://127.0.0.1:1", aggregator_url=f"{server.url}/api/v1") as client:
        answer = await asyncio.to_thread(
            client.chat.complete,
            prompt="And then?",
            model=EndpointRef(url=space.url, slug="scribe", name="Scribe"),
            data_sources=[EndpointRef(url=space.url, slug="docs", name="Docs")],
            messages=[{"role": "user", "content": "First?"}, {"role": "assistant", "content": "This."}],
        )
    assert answer.response
    messages = space.requests[-1].body["messages"]
    assert [message["content"] for message in messages[1:3]] == ["First?", "This."]


@pytest.mark.parametrize(
    ("slug", "status"),
    [
        ("status-401", SourceStatus.ACCESS_DENIED),
        ("status-402", SourceStatus.PAYMENT_FAILED),
        ("policy-violation", SourceStatus.POLICY_VIOLATION),
        ("rate-limited", SourceStatus.RATE_LIMITED),
        ("status-500", SourceStatus.ERROR),
        ("hang", SourceStatus.TIMEOUT),
    ],
)
async def test_sdk_knows_every_retrieval_status(
    client: SyftHubClient, space: Space, slug: str, status: SourceStatus
) -> None:
    broken = EndpointRef(url=space.url, slug=slug, owner_username="alice")
    found = await asyncio.to_thread(client.search.query, prompt="?", data_sources=[broken, "bob/open"])
    assert [info.status for info in found.retrieval_info] == [status, SourceStatus.SUCCESS]
    assert found.retrieval_info[0].error_message


async def test_sdk_receives_errors_in_its_format(client: SyftHubClient, space: Space) -> None:
    broken = EndpointRef(url=space.url, slug="status-500", owner_username="mia")
    with pytest.raises(AggregatorError, match="Model generation failed") as caught:
        await asyncio.to_thread(client.chat.complete, prompt="?", model=broken)
    assert caught.value.status_code == 502
    events = await asyncio.to_thread(lambda: list(client.chat.stream(prompt="?", model=broken)))
    assert isinstance(events[-1], ErrorEvent)
    assert "Model generation failed" in events[-1].message
    with pytest.raises(AggregatorError, match="at most 10"):
        await asyncio.to_thread(client.search.query, prompt="?", data_sources=[broken] * 11)
