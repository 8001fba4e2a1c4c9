"""What only a log in memory can be asked: what it costs, what it forgets, and whom it wakes."""

import asyncio
import gc
import sys
import tracemalloc

import pytest
from test_log_contract import memory_log

from anabranch.domain.errors import NotFound, StreamFull, StreamsFull
from anabranch.domain.eventlog import LogLimits
from anabranch.domain.shares import Claimant, Limit, claimant
from anabranch.eventlog.cursors import ENTRY_BYTES
from anabranch.eventlog.memory import MemoryLog
from anabranch.eventlog.streams import STREAM_BYTES
from anabranch.planner.services import MemorySessions
from anabranch.testing import ManualClock
from anabranch.testing.contracts.event_log import entry

USUAL = LogLimits()


async def ended(log: MemoryLog, name: str, events: int = 10, size: int = 300) -> None:
    token = await log.open(name, identity="user:a", about=b"about")
    """One of its entries is a partial that the next one replaces."""
    entries = [entry(f"{name}:{number // 2}", number, bytes(size), partial=number == 0) for number in range(events - 1)]
    await log.append(name, token, [*entries, entry("end", final=True)])


class Shelf:
    """Streams that come and go, with their sessions."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.log = memory_log(self.clock, USUAL)
        self.sessions = MemorySessions(self.clock)

    async def fill(self, count: int) -> None:
        for number in range(count):
            await self.sessions.claim(f"session {number}", "user:a", USUAL.ttl_s)
            await ended(self.log, f"stream {number}")
            self.clock.advance(0.1)

    def empty(self) -> None:
        self.clock.advance(USUAL.ttl_s)
        self.log.tend()
        self.sessions.tend()
        gc.collect()
        assert (len(self.log.streams), len(self.sessions._held), self.log.streams.bytes_held) == (0, 0, 0)


async def test_ten_thousand_ended_streams_free_their_memory() -> None:
    shelf = Shelf()
    await shelf.fill(10)
    shelf.empty()
    before = sys.getallocatedblocks()
    await shelf.fill(10_000)
    held = sys.getallocatedblocks() - before
    shelf.empty()
    assert held > 100_000
    assert sys.getallocatedblocks() - before < held / 1_000


async def test_the_counted_bytes_match_the_memory_in_use_and_return_to_zero() -> None:
    shelf = Shelf()
    tracemalloc.start()
    try:
        await shelf.fill(10)
        shelf.empty()
        before, _ = tracemalloc.get_traced_memory()
        await shelf.fill(1_000)
        held = tracemalloc.get_traced_memory()[0] - before
        assert 0.75 < shelf.log.streams.bytes_held / held < 1.5
        shelf.empty()
        assert tracemalloc.get_traced_memory()[0] - before < held / 500
    finally:
        tracemalloc.stop()


async def test_tend_drops_expired_streams_and_reads_the_clock_once() -> None:
    clock = ManualClock()
    log = memory_log(clock, USUAL)
    for number in range(200):
        await ended(log, f"ended {number}", events=1)
        await log.open(f"live {number}", identity="")
        clock.advance(1.0)
    clock.advance(USUAL.ttl_s - 195.0)
    looks = 0

    class Looked(ManualClock):
        def monotonic(self) -> float:
            nonlocal looks
            looks += 1
            return clock.monotonic()

    log._clock = Looked()
    log.tend()
    assert (len(log.streams), looks) == (394, 1)
    log.tend()
    assert len(log.streams) == 394


async def test_an_active_stream_does_not_keep_expired_streams() -> None:
    clock = ManualClock()
    log = memory_log(clock, USUAL)
    token = await log.open("first", identity="")
    await log.open("second", identity="")
    clock.advance(USUAL.lease_s)
    await log.append("first", token, [])
    clock.advance(USUAL.ttl_s)
    log.tend()
    assert len(log.streams) == 1
    assert (await log.read("first", 0, 1)).abandoned


async def test_the_oldest_ended_streams_are_evicted_when_memory_is_short() -> None:
    each = STREAM_BYTES + 10_000
    log = memory_log(ManualClock(), LogLimits(memory_bytes=4 * each))
    for number in range(3):
        await ended(log, str(number), events=10, size=900)
    token = await log.open("live", identity="")
    await log.append("live", token, [entry("a", body=bytes(9_000))])
    await log.append("live", token, [entry("b", body=bytes(9_000))])
    with pytest.raises(NotFound):
        await log.read("0", 0, 1)
    assert (await log.read("1", 0, 1)).ended
    assert log.streams.bytes_held <= 4 * each


async def test_a_caller_over_its_limit_loses_its_own_ended_streams_and_nobody_elses() -> None:
    each = STREAM_BYTES + 10_000
    limit = Limit(name="stream_bytes", description="kept streams", unit="bytes", each=3 * each, setting="THE_SETTING")
    log = memory_log(ManualClock(), LogLimits(memory_bytes=100 * each, of_caller=limit))
    ada, bob = Claimant(name="user:ada"), Claimant(name="user:bob")
    claimant.set(bob)
    await ended(log, "bob's", events=10, size=900)
    claimant.set(ada)
    for number in range(5):
        await ended(log, str(number), events=10, size=900)
    assert (await log.read("bob's", 0, 1)).ended
    assert (await log.read("4", 0, 1)).ended
    with pytest.raises(NotFound):
        await log.read("0", 0, 1)
    assert 2 * each < log.streams.held_by(ada) <= 3 * each
    token = await log.open("live", identity="")
    with pytest.raises(StreamsFull, match="THE_SETTING"):
        await log.append("live", token, [entry("a", body=bytes(4 * each))])
    claimant.set(bob)
    other = await log.open("bob's live one", identity="")
    assert await log.append("bob's live one", other, [entry("a", body=bytes(each))])
    with pytest.raises(StreamsFull):
        await log.append("live", token, [entry("a", body=bytes(4 * each))])


async def test_live_streams_are_never_evicted_and_appends_without_room_are_refused() -> None:
    log = memory_log(ManualClock(), LogLimits(memory_bytes=30_000))
    await ended(log, "ended", events=1)
    token = await log.open("live", identity="")
    await log.append("live", token, [entry("a", body=bytes(20_000))])
    with pytest.raises(StreamFull):
        await log.append("live", token, [entry("b", body=bytes(20_000))])
    with pytest.raises(StreamFull):
        await log.open("other", identity="", about=bytes(20_000))
    assert (await log.read("live", 0, 10)).head == 1
    assert (await log.read("ended", 0, 10)).ended, "nothing is given up for what would still have no room"
    assert await log.append("live", token, [entry("a")]) == [0]
    assert await log.append("live", token, [entry("end", body=bytes(40_000), final=True)]) == [2]


async def test_superseded_partials_are_trimmed_before_a_stream_is_evicted() -> None:
    log = memory_log(ManualClock(), LogLimits(memory_bytes=60_000))
    await ended(log, "ended", events=1)
    tokens = {name: await log.open(name, identity="") for name in "ab"}
    for revision in range(1, 101):
        for name, token in tokens.items():
            await log.append(name, token, [entry("k", revision, bytes(5_000), partial=True)])
    assert log.streams.bytes_held <= 60_000
    assert (await log.read("ended", 0, 1)).ended
    for name in tokens:
        page = await log.read(name, 3, 1_000)
        assert (page.reset, page.entries[-1].revision) == (False, 100)


async def test_the_counted_bytes_are_never_negative_and_return_to_zero() -> None:
    clock = ManualClock()
    log = memory_log(clock, LogLimits(max_events=8, memory_bytes=20 * (STREAM_BYTES + 8 * ENTRY_BYTES)))
    for number in range(60):
        token = await log.open(str(number), identity="")
        for revision in range(20):
            await log.append(str(number), token, [entry("k", revision, bytes(50), partial=revision % 3 == 0)])
        await log.append(str(number), token, [entry("end", final=True)])
    assert 0 < len(log.streams) < 60
    clock.advance(USUAL.ttl_s)
    log.tend()
    assert (len(log.streams), log.streams.bytes_held) == (0, 0)


async def test_two_thousand_watchers_are_notified_once_each_and_free_their_memory() -> None:
    log = memory_log(ManualClock(), USUAL)
    token = await log.open("s", identity="")
    woken = asyncio.Semaphore(0)
    waiting = asyncio.Semaphore(0)

    async def wait() -> None:
        async with log.watch("s") as watch:
            waiting.release()
            await watch.changed()
            woken.release()
            await watch.changed()

    tasks = [asyncio.create_task(wait()) for _ in range(2_000)]
    for _ in tasks:
        await waiting.acquire()
    for task in tasks[:500]:
        task.cancel()
    await asyncio.wait(tasks[:500])
    assert len(log._watchers._watches["s"]) == 1_500
    await log.append("s", token, [entry("a")])
    await log.append("s", token, [entry("a")])
    for _ in tasks[500:]:
        await woken.acquire()
    await asyncio.sleep(0)
    assert woken.locked()
    assert not any(task.done() for task in tasks[500:])
    await log.append("s", token, [entry("b")])
    await asyncio.gather(*tasks[500:])
    assert not log._watchers._watches


async def test_a_watcher_is_notified_of_an_expired_and_of_a_new_stream() -> None:
    clock = ManualClock()
    log = memory_log(clock, USUAL)
    async with log.watch("s") as watch, asyncio.timeout(20):
        await log.open("s", identity="")
        await watch.changed()
        clock.advance(USUAL.lease_s + USUAL.ttl_s)
        log.tend()
        await watch.changed()
        with pytest.raises(NotFound):
            await log.read("s", 0, 1)


async def test_a_session_in_memory_is_owned_until_its_claim_expires() -> None:
    clock = ManualClock()
    sessions = MemorySessions(clock)
    assert await sessions.claim("s", "user:a", 10.0)
    assert not await sessions.claim("s", "user:b", 10.0)
    clock.advance(8.0)
    sessions.tend()
    assert await sessions.claim("s", "user:a", 10.0)
    clock.advance(8.0)
    sessions.tend()
    assert not await sessions.claim("s", "user:b", 10.0)
    clock.advance(2.0)
    assert await sessions.claim("s", "user:b", 10.0)
    assert not await sessions.claim("s", "user:a", 10.0)
    clock.advance(10.0)
    sessions.tend()
    assert len(sessions._held) == 0
    assert await sessions.claim("s", "user:a", 10.0)
