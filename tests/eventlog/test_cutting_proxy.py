"""The proxy that other tests cut connections with does what it says."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from support.cutting_proxy import CuttingProxy

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
async def echo() -> AsyncIterator[str]:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(1000):
            writer.write(piece)
        writer.close()

    async with await asyncio.start_server(say, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def connected(proxy: CuttingProxy) -> Connection:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rpartition(":")[2]))
    return reader, writer


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """What still comes before the connection ends, in whatever way."""
    heard = b""
    try:
        while piece := await reader.read(1000):
            heard += piece
    except ConnectionError:
        pass
    return heard


async def test_the_proxy_forwards_bytes_until_it_is_cut(echo: str) -> None:
    async with asyncio.timeout(10), CuttingProxy(echo) as proxy:
        reader, writer = await connected(proxy)
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        assert (proxy.connections, proxy.cut()) == (1, 1)
        assert await rest_of(reader) == b""
        writer.close()
        assert (proxy.accepted, proxy.cuts) == (1, 1)


async def test_the_proxy_can_cut_a_connection_after_a_byte(echo: str) -> None:
    async with asyncio.timeout(10), CuttingProxy(echo, cut_after=[7]) as proxy:
        reader, writer = await connected(proxy)
        writer.write(b"hello, world")
        assert await rest_of(reader) == b"hello, "
        writer.close()
        reader, writer = await connected(proxy)
        writer.write(b"hello, world")
        assert await reader.readexactly(12) == b"hello, world"
        writer.close()


async def test_the_proxy_can_stall_a_connection_and_then_cut_it(echo: str) -> None:
    async with asyncio.timeout(10), CuttingProxy(echo) as proxy:
        (reader, writer), (other, spare) = await connected(proxy), await connected(proxy)
        writer.write(b"a")
        assert await reader.readexactly(1) == b"a"
        proxy.stall()
        writer.write(b"b")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.05)
        proxy.resume()
        assert await reader.readexactly(1) == b"b"
        proxy.stall()
        writer.write(b"c")
        proxy.cut()
        assert await rest_of(reader) == b""
        assert await rest_of(other) == b""
        writer.close()
        spare.close()
