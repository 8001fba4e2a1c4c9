"""Redis killed and frozen under questions to /rag/stream: who loses how much, what still holds, how it comes back."""

import asyncio
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import redis
from anabranch.testing import Space
from support.load_clients import LIMIT, Crowd, Load, crowd
from support.valkey_server import Valkey, running_valkey, until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("rag-redis")]

REACHABLE = "anabranch_redis_reachable"
# What a question may lose to Redis, and what it may take longer besides: less than one more time-out would.
LOST_S = 0.3
NOISE_S = 0.15
EVERY_S = 0.025
# A second to drain, and a second more for everything else.
ENDED_WITHIN_S = 2.5
SAID = "Refunds take 30 days [1]."

Act = Callable[[Valkey], None]
FAULTS = [pytest.param(Valkey.kill, Valkey.start, id="killed"), pytest.param(Valkey.freeze, Valkey.thaw, id="frozen")]


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    with running_valkey(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def asked(tmp_path_factory: pytest.TempPathFactory, models_dir: Path, valkey: Valkey) -> AsyncIterator[Crowd]:
    """Two servers, so that there is something to share."""
    home = tmp_path_factory.mktemp("faults")
    async with crowd(home, models_dir, people=40, workers=(1, 1), redis_url=valkey.url) as opened:
        for at in (0, 1):  # what a server does at its first question only, it has done
            await opened.ask(at=at)
        yield opened
        assert opened.complaints() == []


@pytest.fixture(scope="module")
def names(asked: Crowd) -> Iterator[str]:
    """People who have not asked yet."""
    return iter(asked.secrets)


async def both_read(asked: Crowd, reachable: float) -> None:
    for at in (0, 1):
        await asked.reads(REACHABLE, reachable, at=at)


@pytest.mark.parametrize(("breaks", "mends"), FAULTS)
async def test_nobody_loses_more_than_300_ms_and_nothing_fails(
    asked: Crowd, valkey: Valkey, names: Iterator[str], breaks: Act, mends: Act
) -> None:
    await both_read(asked, 1)
    load = Load(asked, names, EVERY_S)
    before = await load.send(15)
    async with asked.pulse() as pulse:
        sending = asyncio.create_task(load.send(25))
        await asyncio.sleep(5 * EVERY_S)
        breaks(valkey)
        told = await sending
        await both_read(asked, 0)
        sending = asyncio.create_task(load.send(25))
        await asyncio.to_thread(mends, valkey)
        told += await sending
        await both_read(asked, 1)
    assert [one for one in (*before, *told) if not one.is_answered] == []
    usual_s, longest_s = max(one.took_s for one in before), max(one.took_s for one in told)
    assert longest_s < usual_s + max(pulse) + LOST_S + NOISE_S


@pytest.mark.parametrize(("breaks", "mends"), FAULTS)
async def test_each_process_keeps_the_limit_by_itself_and_then_together_again(
    asked: Crowd, valkey: Valkey, names: Iterator[str], breaks: Act, mends: Act
) -> None:
    """Before, six at each server; while Redis is gone, as many more as each may admit alone; after it has come back,
    empty if it was killed, none."""
    who, other = next(names), next(names)

    async def statuses(count: int, at: int, who: str = who) -> Counter[int]:
        told = await asyncio.gather(*(asked.ask(who=who, at=at) for _ in range(count)))
        return Counter(one.status for one in told)

    assert [await statuses(6, at) for at in (0, 1)] == [{200: 6}, {200: 6}]
    breaks(valkey)
    assert [await statuses(LIMIT, at) for at in (0, 1)] == [{200: LIMIT - 6, 429: 6}] * 2
    await both_read(asked, 0)
    mends(valkey)
    await both_read(asked, 1)
    assert [await statuses(3, at) for at in (0, 1)] == [{429: 3}, {429: 3}]
    together = await asyncio.gather(*(statuses(15, at, other) for at in (0, 1)))
    assert sum(together, Counter()) == {200: LIMIT, 429: 30 - LIMIT}


async def test_answers_are_cached_in_redis_again_after_an_outage(
    asked: Crowd, valkey: Valkey, names: Iterator[str]
) -> None:
    valkey.kill()
    await asyncio.gather(*(asked.ask(who=next(names), at=at) for at in (0, 1)))
    await both_read(asked, 0)
    valkey.start()
    await both_read(asked, 1)
    with redis.Redis.from_url(valkey.url) as kept:
        assert not (await asked.ask(who=next(names), max_tokens=77, at=0)).end["cached"]
        await until(lambda: next(kept.scan_iter("rag:qa:*"), None) is not None)
    assert (await asked.ask(who=next(names), max_tokens=77, at=1)).end["cached"]


async def test_a_server_that_never_had_redis_finds_it_when_it_comes_and_ends_while_it_is_frozen(
    tmp_path: Path, models_dir: Path
) -> None:
    async with Space() as space:
        space.model("writer", reply=SAID)
        model: Any = {"model_url": space.url, "model_name": "writer", "query_rewriting": "false", "drain_timeout": "1"}
        with running_valkey(tmp_path) as valkey:
            valkey.kill()
            async with crowd(tmp_path, models_dir, people=1, redis_url=valkey.url, **model) as asked:
                told = [await asked.ask(who="person-0") for _ in range(LIMIT + 1)]
                assert Counter(one.status for one in told) == {200: LIMIT, 429: 1}
                await asked.reads(REACHABLE, 0)
                valkey.start()
                await asked.reads(REACHABLE, 1)
                await ended_while_frozen(asked, space, valkey)


async def ended_while_frozen(asked: Crowd, space: Space, valkey: Valkey) -> None:
    """One stream is under way, and others wait for Redis, or have left it something to keep."""
    space.requests.clear()
    space.model("writer", reply="word " * 1_000, chunk_delay_s=0.02)
    slow = asyncio.create_task(asked.ask(max_tokens=9))
    await space.wait_for(lambda: space.requests)
    valkey.freeze()
    space.model("writer", reply=SAID)
    rest = [asyncio.create_task(asked.ask(max_tokens=number)) for number in range(10, 13)]
    await space.wait_for(lambda: len(space.requests) > 1)
    [program] = asked.programs
    program.send(signal.SIGTERM)
    signalled = time.monotonic()
    assert (await slow).end["error_code"] == "shutting_down"
    assert all(one.is_answered for one in await asyncio.gather(*rest))
    assert await program.ended() == 0
    assert time.monotonic() - signalled < ENDED_WITHIN_S
    assert [line for line in asked.complaints() if '"shutting_down"' not in line] == []
