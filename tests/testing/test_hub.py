"""The stub Hub with the public SDK as its client."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest
from syfthub_sdk import SyftHubClient
from syfthub_sdk.exceptions import AuthenticationError

from anabranch.testing import Hub


@pytest.fixture
async def hub() -> AsyncIterator[Hub]:
    async with Hub() as hub:
        hub.publish(owner="alice", slug="docs", url="http://space.test", type="data_source", tenant="acme")
        hub.publish(owner="bob", slug="scribe", url="http://space.test", type="model")
        yield hub


async def test_the_sdk_lists_endpoints_page_by_page(hub: Hub) -> None:
    def browse() -> list[tuple[str, str, dict[str, object]]]:
        with SyftHubClient(base_url=hub.url) as client:
            found = client.hub.browse(page_size=1).all()
            return [(endpoint.path, endpoint.type.value, endpoint.connect[0].config) for endpoint in found]

    assert await asyncio.to_thread(browse) == [
        ("alice/docs", "data_source", {"url": "http://space.test", "tenant_name": "acme"}),
        ("bob/scribe", "model", {"url": "http://space.test", "tenant_name": None}),
    ]


async def test_the_sdk_gets_tokens(hub: Hub) -> None:
    def tokens() -> tuple[dict[str, str], dict[str, str]]:
        with SyftHubClient(base_url=hub.url, api_token="syft_pat_x") as client:
            owners = ["alice", "bob"]
            return client.auth.get_satellite_tokens(owners), client.auth.get_guest_satellite_tokens(owners)

    satellite, guest = await asyncio.to_thread(tokens)
    assert satellite == {"alice": "satellite-alice", "bob": "satellite-bob"}
    assert guest == {"alice": "guest-alice", "bob": "guest-bob"}


async def test_a_satellite_token_needs_a_login(hub: Hub) -> None:
    def token() -> None:
        with SyftHubClient(base_url=hub.url) as client:
            client.auth.get_satellite_token("alice")

    with pytest.raises(AuthenticationError):
        await asyncio.to_thread(token)


async def test_transaction_tokens_come_per_owner(hub: Hub) -> None:
    async with aiohttp.ClientSession(hub.url) as session:
        path = "/api/v1/accounting/transaction-tokens"
        async with session.post(path, json={"owner_usernames": ["alice"]}) as response:
            assert await response.json() == {"tokens": {"alice": "tx-alice"}, "errors": {}}
        async with session.post(path, json={}) as response:
            assert response.status == 422
