"""Circuit breakers shared between workers through Redis."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from anabranch.domain.model import Endpoint
from anabranch.policies.breaker import Policy, SharedBreakers, Upstreams
from anabranch.redis.client import Redis, RedisGone
from anabranch.telemetry.log import SilentTelemetry
from anabranch.testing import ManualClock
from support.valkey_server import Valkey, running_valkey

MODEL = Endpoint(slug="writer", url="http://models.example")


class Worker:
    def __init__(self, url: str) -> None:
        self.clock = ManualClock(1000.0)
        self.redis = Redis(url, timeout_s=5, clock=self.clock, telemetry=SilentTelemetry())
        self.upstreams = Upstreams(Policy(min_calls=2), self.clock, SilentTelemetry())
        self.shared = SharedBreakers(self.redis, self.upstreams, self.clock)

    @property
    def state(self) -> str:
        return self.upstreams.of(MODEL).breaker.state

    def call(self, *, good: bool) -> None:
        breaker = self.upstreams.of(MODEL).breaker
        breaker.leave(breaker.enter(), good)


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Valkey]:
    with running_valkey(tmp_path) as started:
        yield started


@pytest.fixture
async def workers(valkey: Valkey) -> AsyncIterator[tuple[Worker, Worker]]:
    both = Worker(valkey.url), Worker(valkey.url)
    yield both
    await asyncio.gather(*(worker.redis.close() for worker in both))


async def test_a_circuit_that_opens_in_one_worker_opens_in_the_other(workers: tuple[Worker, Worker]) -> None:
    one, other = workers
    assert other.state == "closed"  # it has been asked there too
    for _ in range(2):
        one.call(good=False)
    assert (one.state, other.state) == ("open", "closed")
    await one.shared.exchange()
    await other.shared.exchange()
    assert other.state == "open"
    assert 0 < other.upstreams.of(MODEL).breaker.open_s <= 10


async def test_a_circuit_opened_by_another_worker_is_not_published_again(
    workers: tuple[Worker, Worker], valkey: Valkey
) -> None:
    one, other = workers
    assert other.state == "closed"
    for _ in range(2):
        one.call(good=False)
    await one.shared.exchange()
    await other.shared.exchange()
    (before,) = [await one.redis.execute("PTTL", key) for key in await _keys(one)]
    async with asyncio.timeout(10):
        while [await one.redis.execute("PTTL", key) for key in await _keys(one)] == [before]:
            pass
    await other.shared.exchange()
    await one.shared.exchange()
    (after,) = [await one.redis.execute("PTTL", key) for key in await _keys(one)]
    assert isinstance(before, int)
    assert isinstance(after, int)
    assert after < before


async def test_each_worker_makes_its_own_trial_call(workers: tuple[Worker, Worker]) -> None:
    one, other = workers
    assert other.state == "closed"
    for _ in range(2):
        one.call(good=False)
    await one.shared.exchange()
    await other.shared.exchange()
    for worker in workers:
        worker.clock.advance(11)
    one.call(good=True)
    assert one.state == "closed"
    other.call(good=False)
    assert other.state == "open"


async def test_without_redis_circuits_are_not_shared(workers: tuple[Worker, Worker], valkey: Valkey) -> None:
    one, other = workers
    valkey.kill()
    for _ in range(2):
        one.call(good=False)
    with pytest.raises(RedisGone):
        await one.shared.exchange()
    assert (one.state, other.state) == ("open", "closed")


async def _keys(worker: Worker) -> list[bytes]:
    found = await worker.redis.execute("KEYS", "breaker:*")
    assert isinstance(found, list)
    return [key for key in found if isinstance(key, bytes)]
