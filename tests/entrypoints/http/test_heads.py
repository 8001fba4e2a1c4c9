"""A request's head is bounded in size and in time, and nobody else pays for one that is not."""

import asyncio

import pytest

from anabranch.configuration.settings import Settings
from anabranch.entrypoints.http.server import HeadCapped
from conftest import running

QUIET = Settings(log_level="ERROR")
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"


class Impatient(HeadCapped):
    head_s = 0.2


async def connected(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def closed(reader: asyncio.StreamReader) -> bool:
    """Whether the server closes, by whichever means, without an answer."""
    async with asyncio.timeout(5):
        try:
            return await reader.read() == b""
        except ConnectionError:
            return True


async def test_a_head_without_end_is_cut_off() -> None:
    async with running(QUIET) as server:
        reader, writer = await connected(server.url)
        writer.write(GET + b"X-Long: " + b"x" * 1_000_000)
        assert await closed(reader)
        writer.close()
        async with server.session.get(f"{server.url}/health") as response:
            assert response.status == 200


async def test_a_long_body_is_not_taken_for_a_head() -> None:
    async with running(QUIET) as server:
        body = b'{"prompt": "' + b"x" * 300_000 + b'", "retrieval_only": true}'
        async with server.session.post(f"{server.url}/api/v1/chat", data=body) as response:
            assert response.status == 200


async def test_a_head_that_dawdles_is_cut_off() -> None:
    async with running(QUIET, Impatient) as server:
        for begun in (b"", GET):
            reader, writer = await connected(server.url)
            writer.write(begun)
            assert await closed(reader)
            writer.close()


async def test_a_connection_may_be_idle_between_requests() -> None:
    async with running(QUIET, Impatient) as server:
        reader, writer = await connected(server.url)
        for _ in range(2):
            writer.write(GET + b"\r\n")
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            await reader.readuntil(b"}")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(2 * Impatient.head_s):
                    await reader.read(1)
        writer.close()
