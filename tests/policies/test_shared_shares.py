"""Limits of callers, shared between workers through Redis."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.app.background import background
from anabranch.domain.errors import LimitReached
from anabranch.domain.shares import Claimant, Limit
from anabranch.policies.shared_shares import KEY, MAX_CALLERS, SharedShares
from anabranch.policies.shares import Share
from anabranch.redis.client import Redis
from anabranch.telemetry.log import SilentTelemetry
from anabranch.testing import ManualClock
from support.valkey_server import Valkey, running_valkey

ADA, BOB = Claimant(name="user:ada"), Claimant(name="user:bob")
STEPS = Limit(name="steps", description="steps", each=4, total=100)


class Worker:
    def __init__(self, url: str) -> None:
        self.redis = Redis(url, timeout_s=5, clock=ManualClock(1000.0), telemetry=SilentTelemetry())
        self.steps = Share(STEPS)
        self.shared = SharedShares(self.redis, {"steps": self.steps})


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Valkey]:
    with running_valkey(tmp_path) as started:
        yield started


async def test_a_caller_has_one_limit_over_all_workers(valkey: Valkey) -> None:
    one, two = Worker(valkey.url), Worker(valkey.url)
    held = [one.steps.enter(caller=ADA) for _ in range(3)]
    await one.shared.exchange()
    await two.shared.exchange()
    assert two.steps.usage(ADA).held == 3
    last = two.steps.enter(caller=ADA)
    with pytest.raises(LimitReached):
        two.steps.enter(caller=ADA)
    two.steps.enter(caller=BOB)
    for each in (*held, last):
        each.leave()
    await one.shared.exchange()
    await two.shared.exchange()
    assert two.steps.usage(ADA).held == 0
    await asyncio.gather(one.redis.close(), two.redis.close())


async def test_while_redis_is_gone_each_worker_has_its_own_limit(valkey: Valkey) -> None:
    one, two = Worker(valkey.url), Worker(valkey.url)
    for _ in range(4):
        one.steps.enter(caller=ADA)
    await one.shared.exchange()
    await two.shared.exchange()
    with pytest.raises(LimitReached):
        two.steps.enter(caller=ADA)
    valkey.stop()
    await two.shared.exchange()
    assert two.steps.enter(caller=ADA).granted
    await asyncio.gather(one.redis.close(), two.redis.close())


async def test_a_worker_that_leaves_or_that_wrote_nonsense_counts_for_nothing(valkey: Valkey) -> None:
    one, two = Worker(valkey.url), Worker(valkey.url)
    one.steps.enter(caller=ADA)
    async with background(one.shared.run()):
        await one.shared.exchange()
        await two.redis.execute("HSET", KEY, "another", "999999999999999{}")
        await two.redis.execute("HSET", KEY, "a third", f"{await _now(two.redis):015d}no JSON")
        await two.shared.exchange()
        assert two.steps.usage(ADA).held == 1
    await two.shared.exchange()
    assert two.steps.usage(ADA).held == 0
    await asyncio.gather(one.redis.close(), two.redis.close())


async def test_only_the_callers_that_hold_the_most_are_told(valkey: Valkey) -> None:
    one, two = Worker(valkey.url), Worker(valkey.url)
    one.steps.enter(2, caller=ADA)
    for number in range(MAX_CALLERS):
        one.steps.enter(0.1, caller=Claimant(name=f"address:{number}"))
    await one.shared.exchange()
    await two.shared.exchange()
    assert two.steps.usage(ADA).held == 2
    assert two.steps.usage(Claimant(name=f"address:{MAX_CALLERS - 1}")).held == 0
    await asyncio.gather(one.redis.close(), two.redis.close())


async def _now(redis: Redis) -> int:
    match await redis.execute("TIME"):
        case [bytes(seconds), *_]:
            return int(seconds) * 1_000
    raise AssertionError
