"""The log in Redis keeps what every log promises, between two workers, and costs what it should."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import msgspec
import pytest

from anabranch.domain.errors import NotFound, StreamFull
from anabranch.domain.eventlog import LogLimits
from anabranch.eventlog.redis.log import RedisLog
from anabranch.planner.services import RedisSessions
from anabranch.testing import ManualClock
from anabranch.testing.contracts.event_log import PLENTY, EventLogContract, LogCase, OpenCase, entry
from support.shared_log import travel, worker
from support.valkey_server import Valkey, running_valkey

LONG_S = 20.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    with running_valkey(tmp_path_factory.mktemp("valkey")) as started:
        yield started


@pytest.fixture
def open_case(server: Valkey) -> OpenCase:
    @asynccontextmanager
    async def opened(limits: LogLimits) -> AsyncIterator[LogCase]:
        clock = ManualClock(1_000.0)
        given = msgspec.structs.asdict(limits)
        async with AsyncExitStack() as stack:
            writer, reader = [
                await stack.enter_async_context(worker(server.url, name=name, clock=clock, timeout_s=LONG_S, **given))
                for name in ("one", "two")
            ]
            await writer.redis.execute("FLUSHALL")

            async def advance(seconds: float) -> None:
                await travel(writer.redis, seconds)
                clock.advance(seconds)

            yield LogCase(writer=writer.log, reader=reader.log, advance=advance, limits=limits)

    return opened


def held(log: RedisLog) -> int:
    """The number of streams in the process, owned and replicas."""
    return len(log.streams) + len(log._replicas._replicas)


class TestRedisLog(EventLogContract):
    pass


async def test_evicted_streams_stay_readable_from_redis(server: Valkey) -> None:
    async with worker(server.url, name="one", memory_bytes=300_000) as one:
        await one.redis.execute("FLUSHALL")
        for number in range(20):
            token = await one.log.open(str(number), identity="")
            await one.log.append(
                str(number), token, [entry("a", body=bytes(50_000)), entry("end", body=b"over", final=True)]
            )
            assert one.log.streams.bytes_held <= 310_000
        for number in range(20):
            page = await one.log.read(str(number), 0, PLENTY)
            assert (page.ended, page.head, page.entries[-1].body) == (True, 2, b"over")
        tokens = [await one.log.open(f"live {number}", identity="") for number in range(2)]
        await one.log.append("live 0", tokens[0], [entry("a", body=bytes(200_000))])
        with pytest.raises(StreamFull):
            await one.log.append("live 1", tokens[1], [entry("a", body=bytes(200_000))])
        assert await one.log.append("live 1", tokens[1], [entry("end", body=bytes(200_000), final=True)]) == [1]


async def test_expired_streams_free_their_memory_in_this_worker(server: Valkey) -> None:
    clock = ManualClock()
    async with worker(server.url, name="one", clock=clock, ttl_s=60, lease_s=5) as one:
        await one.redis.execute("FLUSHALL")
        for number in range(50):
            token = await one.log.open(str(number), identity="")
            await one.log.append(str(number), token, [entry("end", final=number % 2 == 0)])
        clock.advance(61)
        one.log.tend()
        assert held(one.log) == 25
        clock.advance(5)
        one.log.tend()
        assert (held(one.log), one.log.streams.bytes_held) == (0, 0)


async def test_a_replica_is_dropped_with_its_last_watcher(server: Valkey) -> None:
    async with worker(server.url, name="one") as one, worker(server.url, name="two") as two:
        await one.redis.execute("FLUSHALL")
        token = await one.log.open("s", identity="")
        await one.log.append("s", token, [entry("a", body=bytes(10_000))])
        async with two.log.watch("s"), two.log.watch("s"):
            assert (await two.log.read("s", 0, PLENTY)).head == 1
            assert (held(two.log), two.log.streams.bytes_held > 10_000) == (1, True)
        assert (held(two.log), two.log.streams.bytes_held) == (0, 0)
        assert (await two.log.read("s", 0, PLENTY)).head == 1


async def test_a_watcher_is_notified_when_another_worker_opens_the_stream(server: Valkey) -> None:
    async with worker(server.url, name="one") as one, worker(server.url, name="two") as two:
        await one.redis.execute("FLUSHALL")
        async with one.log.watch("s") as here, two.log.watch("s") as elsewhere:
            for log in (one.log, two.log):
                with pytest.raises(NotFound):
                    await log.read("s", 0, 1)
            for watch in (here, elsewhere):
                with suppress(TimeoutError):  # It may have been rung for what was missing.
                    async with asyncio.timeout(0.05):
                        await watch.changed()
            await one.log.open("s", identity="")
            async with asyncio.timeout(LONG_S):
                await here.changed()
                await elsewhere.changed()
            for log in (one.log, two.log):
                assert (await log.read("s", 0, 1)).keeper == "one"


async def test_a_session_in_redis_is_owned_until_its_claim_expires(server: Valkey) -> None:
    async with worker(server.url, name="one") as one, worker(server.url, name="two") as two:
        await one.redis.execute("FLUSHALL")
        first, second = RedisSessions(one.redis), RedisSessions(two.redis)
        assert await first.claim("s", "user:a", 60) is True
        assert await second.claim("s", "user:a", 60) is True
        assert await second.claim("s", "user:b", 60) is False
        assert await second.claim("t", "user:b", 60) is True
        await travel(one.redis, 59)
        assert await second.claim("s", "user:b", 60) is False
        assert await first.claim("s", "user:a", 60) is True
        await travel(one.redis, 59)
        assert await second.claim("s", "user:b", 60) is False
        await travel(one.redis, 2)
        assert await second.claim("s", "user:b", 60) is True
