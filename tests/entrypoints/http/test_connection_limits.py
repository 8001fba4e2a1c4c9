"""The limits on connections, over real ones. On this machine a proxy may be, so its address has no limit by itself."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from anabranch.configuration.settings import Settings
from anabranch.domain.shares import Limit
from anabranch.entrypoints.http.server import HeadCapped
from anabranch.policies.connections import CONNECTIONS, OpenConnections
from conftest import Server, running
from support.step_requests import STEPS, begin

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
# The head of a request whose body does not come.
BUSY = b"POST /api/v1/chat HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n"
TWO = Limit(name="connections", description="connections at once", each=2, setting="AGGREGATOR_CALLER_CONNECTIONS")


class OfOneAddress(HeadCapped):
    """Takes this machine for one caller."""

    counted = OpenConnections(TWO, lambda _: False)

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.app_state = {**self.app_state, CONNECTIONS: self.counted}


class Clients(AsyncExitStack):
    """Clients of a server, which leave at the end."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.server = server

    async def sends(self, sent: bytes) -> asyncio.StreamReader:
        host, port = self.server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        self.callback(writer.close)
        writer.write(sent)
        return reader


@asynccontextmanager
async def clients(protocol: type[HeadCapped] = HeadCapped, **settings: Any) -> AsyncIterator[Clients]:
    async with running(Settings(log_level="ERROR", **settings), protocol) as server, Clients(server) as found:
        yield found


async def replied(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(10):
        return await reader.readuntil(b"\r\n\r\n")


async def test_a_half_open_connection_makes_room_for_a_new_one() -> None:
    async with clients(max_connections=3) as found:
        half_open = [await found.sends(b"GET /health HTTP/1.1\r\n") for _ in range(3)]
        for _ in range(3):
            assert b"200 OK" in await replied(await found.sends(GET))
        for reader in half_open:
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await replied(reader)


async def test_where_every_connection_has_a_request_a_new_one_is_refused_with_503() -> None:
    async with clients(max_connections=2) as found, Clients(found.server) as busy:
        for _ in range(2):
            await busy.sends(BUSY)
        reader = await found.sends(GET)
        head = await replied(reader)
        assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert b"retry-after: 1\r\n" in head
        assert b"limit of 2 connections at once (AGGREGATOR_MAX_CONNECTIONS)" in await reader.read()
        await busy.aclose()
        await answered(found)


async def test_a_client_with_too_many_connections_is_refused_with_429() -> None:
    async with clients(OfOneAddress) as found:
        for _ in range(2):
            await found.sends(b"")
        async with found.server.session.get(f"{found.server.url}/health") as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "1")
            said = await response.json()
        assert (said["error"], said["details"]["limit"]) == ("rate_limited", "connections")
        assert "your limit of 2 connections at once (AGGREGATOR_CALLER_CONNECTIONS)" in said["message"]


async def test_in_a_flood_of_connections_few_are_told_why_they_are_refused() -> None:
    class Flooded(OfOneAddress):
        counted = OpenConnections(TWO, lambda _: False)
        max_refused = 1
        refusal_s = 10.0

    async with clients(Flooded) as found:
        for _ in range(2):
            await found.sends(b"")
        assert b"429" in await replied(await found.sends(b""))
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await replied(await found.sends(b""))


async def test_a_websocket_has_the_place_of_its_connection_until_it_ends() -> None:
    async with clients(max_connections=2) as found:
        assert (await begin(found.server, "step"))[0] == 201
        address = f"{found.server.url}{STEPS}/step/ws"
        sockets = [await found.server.session.ws_connect(address) for _ in range(2)]
        assert b"503" in await replied(await found.sends(GET))
        for one in sockets:
            await one.close()
        await answered(found)


async def answered(found: Clients) -> None:
    """A connection that has just ended is counted until the server has noticed it."""
    async with asyncio.timeout(10):
        while b"200 OK" not in await replied(await found.sends(GET)):
            pass
