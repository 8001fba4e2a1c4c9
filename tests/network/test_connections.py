"""The outbound HTTP client with a resolver that returns changing and private addresses."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from ipaddress import ip_network

import pytest

from anabranch.domain.errors import UpstreamError
from anabranch.domain.shares import Claimant, claimant
from anabranch.network.addresses import AddressGuard
from anabranch.network.outbound import REFUSED, AiohttpOutbound
from support.canary_server import Canary, Names, Watch, watching

CAP = 1024 * 1024
LOCAL_TWO = AddressGuard([ip_network("127.0.0.2/32")])
PUBLIC = "93.184.216.34"


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return watching(monkeypatch)


@pytest.fixture
async def canary() -> AsyncIterator[Canary]:
    async with Canary() as listening:
        yield listening


async def fetched(outbound: AiohttpOutbound, url: str, *, operator: bool = False) -> int:
    async with outbound.request("POST", url, headers={}, body=b"{}", operator=operator) as exchange:
        await exchange.read()
        return exchange.status


async def test_a_caller_has_half_of_the_connections_and_its_further_requests_wait(canary: Canary) -> None:
    outbound = AiohttpOutbound(guard=AddressGuard(), max_reply_bytes=CAP, max_connections=4)
    assert await asyncio.gather(*(fetched(outbound, canary.url, operator=True) for _ in range(10))) == [200] * 10
    assert canary.accepted == 2
    async with Canary(b"HTTP/1.1 200 X\r\nContent-Length: 9\r\n\r\n{") as endless, contextlib.AsyncExitStack() as held:
        for _ in range(2):
            await held.enter_async_context(outbound.request("POST", endless.url, headers={}, body=b"", operator=True))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await fetched(outbound, endless.url, operator=True)
        waiting = asyncio.create_task(fetched(outbound, canary.url, operator=True))
        other = claimant.set(Claimant(name="user:bob"))
        assert await fetched(outbound, canary.url, operator=True) == 200
        claimant.reset(other)
        assert not waiting.done()
    assert await waiting == 200
    assert await fetched(outbound, canary.url, operator=True) == 200
    await outbound.close()


async def test_the_address_that_was_checked_is_the_one_connected_to(canary: Canary, watch: Watch) -> None:
    names = Names({"rebind.example": [[PUBLIC], ["127.0.0.1"]]})
    outbound = AiohttpOutbound(guard=AddressGuard(), max_reply_bytes=CAP, resolver=lambda: names)
    with pytest.raises(UpstreamError, match="No connection could be made"):
        await fetched(outbound, f"http://rebind.example:{canary.port}/")
    assert watch.dialled == [(PUBLIC, canary.port)]
    assert names.lookups == ["rebind.example"]
    await outbound.close()
    assert canary.accepted == 0


async def test_a_host_name_that_changes_to_a_private_address_is_refused(canary: Canary) -> None:
    names = Names({"rebind.example": [["127.0.0.2"], ["127.0.0.1"]]})
    outbound = AiohttpOutbound(guard=LOCAL_TWO, max_reply_bytes=CAP, resolver=lambda: names)
    async with Canary(host="127.0.0.2") as first:
        assert await fetched(outbound, f"http://rebind.example:{first.port}/") == 200
        with pytest.raises(UpstreamError, match=REFUSED):
            await fetched(outbound, f"http://rebind.example:{canary.port}/")
        await outbound.close()
    assert canary.accepted == 0


@pytest.mark.parametrize("order", [1, -1])
async def test_a_host_name_with_one_private_address_is_refused(canary: Canary, watch: Watch, order: int) -> None:
    names = Names({"both.example": [[PUBLIC, "2606:4700::1111", "127.0.0.1"][::order]]})
    outbound = AiohttpOutbound(guard=AddressGuard(), max_reply_bytes=CAP, resolver=lambda: names)
    with pytest.raises(UpstreamError, match=REFUSED):
        await fetched(outbound, f"http://both.example:{canary.port}/")
    await outbound.close()
    assert watch.dialled == []
    assert canary.accepted == 0


async def test_a_public_address_is_connected_to(watch: Watch) -> None:
    """The proof that the tests above would see it."""
    outbound = AiohttpOutbound(guard=AddressGuard(), max_reply_bytes=CAP, resolver=lambda: Names({}))
    for url in (f"http://{PUBLIC}:81/", "http://[2606:4700::1111]:82/", "http://[::ffff:8.8.8.8]:83/"):
        with pytest.raises(UpstreamError, match="No connection could be made"):
            await fetched(outbound, url)
    await outbound.close()
    assert watch.dialled == [(PUBLIC, 81), ("2606:4700::1111", 82), ("::ffff:808:808", 83)]


async def test_guarded_and_operator_connections_are_not_shared(canary: Canary) -> None:
    outbound = AiohttpOutbound(
        guard=AddressGuard(),
        max_reply_bytes=CAP,
        resolver=lambda: Names({"host.example": [["127.0.0.1"]]}),
    )
    for host in ("127.0.0.1", "host.example"):
        url = f"http://{host}:{canary.port}/"
        assert await fetched(outbound, url, operator=True) == 200
        assert await fetched(outbound, url, operator=True) == 200
        seen = (canary.accepted, len(canary.received))
        with pytest.raises(UpstreamError, match=REFUSED):
            await fetched(outbound, url)
        assert (canary.accepted, len(canary.received)) == seen
    await outbound.close()
    assert (canary.accepted, len(canary.received)) == (2, 4)


async def test_a_refused_address_is_never_connected_to(watch: Watch, canary: Canary) -> None:
    outbound = AiohttpOutbound(guard=AddressGuard(), max_reply_bytes=CAP, resolver=lambda: Names({}))
    for host in ("127.0.0.1", "0x7f.1", "[::1]", "169.254.169.254", "0.0.0.0"):
        with pytest.raises(UpstreamError, match=REFUSED):
            await fetched(outbound, f"http://{host}:{canary.port}/")
    await outbound.close()
    assert watch.dialled == []
