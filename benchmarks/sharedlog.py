"""What a stream costs through Redis: appending one entry at a time, to one stream and to many at once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from anabranch.domain.contracts import SystemClock
from anabranch.domain.eventlog import Entry, LogLimits
from anabranch.eventlog.redis.log import RedisLog
from anabranch.redis.client import Redis, RedisGone
from anabranch.redis.rpc import WorkerRpc
from anabranch.testing.fakes import Recorder
from benchmarks.cached import valkey
from benchmarks.log import EVENTS, STREAM, Figure, Round, figure, now, rounds_of, timed

MIN_SHARED_APPENDS_PER_S = 1_000.0
STREAMS = 50


@asynccontextmanager
async def redis_log(url: str) -> AsyncIterator[RedisLog]:
    """Empty, and the only one there."""
    clock = SystemClock()
    redis = Redis(url, timeout_s=2.0, clock=clock, telemetry=Recorder())
    await _emptied(redis)
    post = WorkerRpc(url, redis, worker="benchmark", clock=clock)
    log = RedisLog(redis, post, worker="benchmark", clock=clock, limits=LogLimits())
    post.start(_unheard)
    log.start()
    try:
        yield log
    finally:
        await log.close()
        await post.close()
        await redis.close()


async def _emptied(redis: Redis) -> None:
    """Once it is there: it has only just been started."""
    while True:
        try:
            await redis.execute("FLUSHALL")
        except RedisGone:
            await asyncio.sleep(0.05)
        else:
            return


async def append_through_redis(url: str, entries: list[Entry]) -> Round:
    """As a step's writer does, one entry at a time, each acknowledged before the next."""
    async with redis_log(url) as log:
        token = await log.open(STREAM, identity="operator")
        started = now()
        for each in entries:
            await log.append(STREAM, token, (each,))
        return timed(started)


async def append_to_many(url: str, entries: list[Entry]) -> Round:
    """The same number, by as many writers as there are streams."""
    async with redis_log(url) as log:
        names = [f"{STREAM}:{number}" for number in range(STREAMS)]
        tokens = {name: await log.open(name, identity="operator") for name in names}

        async def write(number: int, name: str) -> None:
            for each in entries[number::STREAMS]:
                await log.append(name, tokens[name], (each,))

        started = now()
        await asyncio.gather(*(write(number, name) for number, name in enumerate(names)))
        return timed(started)


def shared_appends(rounds: int) -> Figure:
    with valkey() as url:
        took = rounds_of(partial(append_through_redis, url), rounds)
    return _figure("append, through Redis", took)


def shared_appends_to_many(rounds: int) -> Figure:
    with valkey() as url:
        took = rounds_of(partial(append_to_many, url), rounds)
    return _figure(f"append to {STREAMS} streams, through Redis", took)


def _figure(name: str, took: Round) -> Figure:
    met = EVENTS / took.wall_ms * 1000 > MIN_SHARED_APPENDS_PER_S
    return figure(name, took, f"> {MIN_SHARED_APPENDS_PER_S:,.0f} events/s", met)


async def _unheard(body: bytes) -> bytes:
    return b""
