"""The shared log while Redis is killed, frozen, emptied, set back and cut off, and while workers pause and die."""

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from anabranch.domain.errors import LeaseLost, NotFound, StreamUnavailable
from anabranch.domain.eventlog import Page, epoch
from anabranch.eventlog.reader import StreamReader
from anabranch.eventlog.redis.store import RedisLogTiming, forget_before, forget_ended
from anabranch.testing.contracts.event_log import PLENTY, entry, read_through
from support.shared_log import TIMEOUT_S, WAIT_S, Wire, Worker, eventually, until
from support.shared_log import worker as any_worker
from support.valkey_server import Valkey, running_valkey

LEASE_S = 0.3
# Where a worker must not take itself for one that was paused while its calls to Redis time out.
LONG_LEASE_S = 1.5
# A machine that runs other things too may be this much late.
NOISE_S = 0.8


worker = partial(any_worker, timing=RedisLogTiming(repair_every_s=0.02, recheck_s=0.2), probe_every_s=0.02)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    with running_valkey(tmp_path_factory.mktemp("valkey")) as started:
        yield started


@pytest.fixture
async def shared(server: Valkey) -> Valkey:
    """A server that lives through the test, and knows nothing at its beginning."""
    async with worker(server.url) as someone:
        await someone.redis.execute("FLUSHALL")
    return server


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Valkey]:
    with running_valkey(tmp_path) as started:
        yield started


class Ledger:
    """Everything that anybody was ever shown: one sequence has one body, whoever shows it."""

    def __init__(self) -> None:
        self._bodies: dict[int, bytes] = {}

    def see(self, page: Page) -> Page:
        for each in page.entries:
            assert self._bodies.setdefault(each.sequence, each.body) == each.body, "a sequence was forked"
        return page

    async def read(self, one: Worker, after: int = 0) -> Page:
        return self.see(await one.log.read("s", after, PLENTY))


def bodies(page: Page) -> list[bytes]:
    return [each.body for each in page.entries]


def numbered(*numbers: int) -> list[bytes]:
    return [str(number).encode() for number in numbers]


async def put(one: Worker, token: str, number: int) -> int:
    (sequence,) = await one.log.append("s", token, [entry(str(number), body=str(number).encode())])
    return sequence


async def seen(one: Worker, wanted: list[bytes], ledger: Ledger | None = None) -> Page:
    """Read until that is what there is."""
    ledger = ledger or Ledger()

    async def there() -> bool:
        return bodies(await ledger.read(one)) == wanted

    await eventually(there)
    return await ledger.read(one)


async def test_after_a_kill_of_redis_streams_continue_in_a_new_epoch(mortal: Valkey) -> None:
    ledger = Ledger()
    async with worker(mortal.url, name="a") as a, worker(mortal.url, name="b") as b:
        token = await a.log.open("s", identity="user:a", about=b"about")
        first = await put(a, token, 1)
        assert bodies(await ledger.read(b)) == numbered(1)
        mortal.kill()
        began = time.monotonic()
        second = await put(a, token, 2)
        assert time.monotonic() - began < TIMEOUT_S + NOISE_S
        assert (epoch(first), epoch(second)) == (0, 1)
        page = await ledger.read(a, first)
        assert (page.reset, bodies(page)) == (True, numbered(1, 2))
        began = time.monotonic()
        for asked in (b.log.read("s", 0, 1), b.log.open("t", identity=""), a.log.open("t", identity="")):
            with pytest.raises(StreamUnavailable):
                await asked
        assert time.monotonic() - began < TIMEOUT_S + NOISE_S
        mortal.start()
        page = await seen(b, numbered(1, 2), ledger)
        assert (page.identity, page.about, page.keeper, page.head) == ("user:a", b"about", "a", second)
        assert epoch(await put(a, token, 3)) == 1
        assert bodies(await ledger.read(b, second)) == numbered(3)


async def test_commands_that_a_frozen_redis_runs_late_do_not_fork_a_stream(mortal: Valkey) -> None:
    ledger = Ledger()
    async with worker(mortal.url, name="a") as a, worker(mortal.url, name="b") as b:
        token = await a.log.open("s", identity="")
        await put(a, token, 1)
        await ledger.read(b)
        mortal.freeze()
        began = time.monotonic()
        late = await asyncio.gather(*(put(a, token, number) for number in (2, 3)))
        late.append(await put(a, token, 4))
        assert time.monotonic() - began < TIMEOUT_S + NOISE_S
        assert [epoch(sequence) for sequence in late] == [1, 1, 1]
        ledger.see(await a.log.read("s", 0, PLENTY))
        mortal.thaw()
        await seen(b, numbered(1, 2, 3, 4), ledger)
        await until(lambda: a.redis.reachable)
        await put(a, token, 5)
        await seen(b, numbered(1, 2, 3, 4, 5), ledger)


async def test_an_owner_restores_its_streams_to_an_empty_redis(mortal: Valkey) -> None:
    async with worker(mortal.url, name="a") as a, worker(mortal.url, name="b", lease_s=LEASE_S) as b:
        ended = await a.log.open("ended", identity="user:x")
        await a.log.append("ended", ended, [entry("end", body=b"over", final=True)])
        token = await a.log.open("s", identity="")
        cursor = await put(a, token, 1)
        mortal.kill()
        mortal.start()
        page = await seen(b, numbered(1))
        assert (page.head, epoch(page.head)) == (cursor, 0)
        assert await put(a, token, 2) == cursor + 1
        page = await b.log.read("s", cursor, PLENTY)
        assert (page.reset, bodies(page)) == (False, numbered(2))
        await eventually(lambda: b.redis.execute("EXISTS", "anabranch:{ended}:stream"))
        page = await b.log.read("ended", 0, PLENTY)
        assert (page.ended, page.identity, bodies(page)) == (True, "user:x", [b"over"])
        left_ms = await b.redis.execute("PTTL", "anabranch:{ended}:entries")
        assert isinstance(left_ms, int)
        assert 0 < left_ms <= 60_000
        with pytest.raises(LeaseLost):
            await a.log.append("ended", ended, [])


@pytest.mark.parametrize("lost", ["FLUSHALL", "DEL anabranch:{s}:entries anabranch:{ended}:entries"])
@pytest.mark.parametrize("watched", [True, False])
async def test_streams_that_redis_has_lost_unnoticed_are_restored_by_their_owner(
    shared: Valkey, lost: str, watched: bool
) -> None:
    """It was emptied, or has evicted or expired keys. No epoch changes, so that readers keep what they have."""
    async with worker(shared.url, name="a") as a, worker(shared.url, name="b") as b, AsyncExitStack() as watching:
        ended = await a.log.open("ended", identity="user:x", about=b"about")
        await a.log.append("ended", ended, [entry("1", body=b"begun"), entry("end", body=b"over", final=True)])
        token = await a.log.open("s", identity="")
        await put(a, token, 1)
        await b.redis.execute(*lost.split())
        for stream in ("ended", "s"):
            if watched:
                await watching.enter_async_context(b.log.watch(stream))
        page = await b.log.read("ended", 1, PLENTY)
        assert (page.identity, page.about, page.ended, page.reset) == ("user:x", b"about", True, False)
        assert bodies(page) == [b"over"]
        assert bodies(await b.log.read("s", 0, PLENTY)) == numbered(1)
        assert epoch(await put(a, token, 2)) == 0
        await seen(b, numbered(1, 2))
        with pytest.raises(NotFound):
            await b.log.read("unknown", 0, 1)


async def test_a_lost_stream_is_not_missing_while_a_worker_does_not_answer(shared: Valkey) -> None:
    async with AsyncExitStack() as stack:
        wire = await stack.enter_async_context(Wire(shared.port))
        a = await stack.enter_async_context(worker(wire.url, name="a"))
        b = await stack.enter_async_context(worker(shared.url, name="b"))
        await put(a, await a.log.open("s", identity=""), 1)
        await b.redis.execute("FLUSHALL")
        wire.become("late")
        with pytest.raises(StreamUnavailable):
            await b.log.read("s", 0, 1)
        wire.become("open")
        await seen(b, numbered(1))


async def test_streams_that_were_forgotten_are_not_restored(shared: Valkey) -> None:
    """An erasure deletes them in Redis, and their owner learns of it a little later."""
    async with worker(shared.url, name="a") as a, worker(shared.url, name="b") as b:
        for stream in ("s", "lost"):
            token = await a.log.open(stream, identity="")
            await a.log.append(stream, token, [entry("end", body=b"over", final=True)])
        lost = ("DEL", "anabranch:{lost}:stream", "anabranch:{lost}:entries")
        await b.redis.execute(*lost)
        await forget_before(b.redis, 60.0)
        assert bodies(await b.log.read("lost", 0, 1)) == [b"over"]
        await b.redis.execute(*lost)
        await forget_before(b.redis, 0.0)
        await forget_before(b.redis, 60.0)  # one of an earlier time changes nothing
        assert await forget_ended(b.redis, b"anabranch:{s}:stream", 60.0, 0.0) == 1
        for stream in ("s", "lost"):
            with pytest.raises(NotFound):
                await b.log.read(stream, 0, 1)


async def test_a_stream_that_may_still_be_restored_is_unavailable_and_not_missing(mortal: Valkey) -> None:
    """Its owner may be the last to hear that Redis is back."""
    async with AsyncExitStack() as stack:
        wire = await stack.enter_async_context(Wire(mortal.port))
        a = await stack.enter_async_context(worker(wire.url, name="a", lease_s=LEASE_S))
        b = await stack.enter_async_context(worker(mortal.url, name="b", lease_s=LEASE_S))
        token = await a.log.open("s", identity="")
        await put(a, token, 1)
        await stack.enter_async_context(renewing(a, token))
        wire.become("cut")
        mortal.kill()
        mortal.start()
        await until(lambda: b.post.up and b.redis.reachable)
        with pytest.raises(StreamUnavailable):
            await b.log.read("s", 0, 1)
        with pytest.raises(StreamUnavailable):
            await b.log.open("s", identity="")
        await eventually(lambda: unknown(b))
        # Now it may be opened anew, in numbers that its first owner has never used.
        ledger = Ledger()
        await put(a, token, 2)
        ledger.see(await a.log.read("s", 0, PLENTY))
        other = await b.log.open("s", identity="")
        assert epoch((await b.log.append("s", other, [entry("x", body=b"anew")]))[0]) >= 2**10
        wire.become("open")
        page = await seen(a, [b"anew"], ledger)
        assert page.keeper == "b"
        with pytest.raises(LeaseLost):
            await put(a, token, 3)


async def unknown(one: Worker) -> bool:
    try:
        await one.log.read("s", 0, 1)
    except NotFound:
        return True
    return False


async def test_an_owner_restores_entries_that_redis_has_lost(mortal: Valkey) -> None:
    ledger = Ledger()
    async with worker(mortal.url, name="a") as a, worker(mortal.url, name="b") as b:
        token = await a.log.open("s", identity="")
        await put(a, token, 1)
        assert await a.redis.execute("SAVE") == b"OK"
        for number in (2, 3):
            await put(a, token, number)
        cursor = (await ledger.read(b)).head
        mortal.kill()
        mortal.start()
        await put(a, token, 4)
        await seen(b, numbered(1, 2, 3, 4), ledger)
        assert bodies(await ledger.read(b, cursor)) == numbered(4)


async def test_after_a_loss_in_redis_an_abandoned_stream_ends_in_a_new_epoch(mortal: Valkey) -> None:
    """Its owner is dead; readers have had numbers that Redis has forgotten, and must not get others under them."""
    ledger = Ledger()
    async with worker(mortal.url, name="b", lease_s=LEASE_S) as b:
        async with worker(mortal.url, name="a", lease_s=LEASE_S) as a:
            token = await a.log.open("s", identity="")
            await put(a, token, 1)
            assert await a.redis.execute("SAVE") == b"OK"
            await put(a, token, 2)
            cursor = (await ledger.read(b)).head
        mortal.kill()
        mortal.start()
        await until(lambda: b.post.up)
        await eventually(lambda: buried(b))
        page = await ledger.read(b, cursor)
        assert (page.reset, page.ended, bodies(page)) == (True, True, [b"1", b"lost"])
        assert epoch(page.head) >= 2**15


async def buried(one: Worker) -> bool:
    return await one.log.end_abandoned("s", entry("end", body=b"lost", final=True))


async def refused(one: Worker, token: str) -> bool:
    try:
        await one.log.append("s", token, [])
    except LeaseLost:
        return True
    return False


async def test_an_append_whose_reply_is_lost_is_delivered_once(shared: Valkey) -> None:
    ledger = Ledger()
    async with Wire(shared.port) as wire, worker(wire.url, name="a") as a, worker(shared.url, name="b") as b:
        token = await a.log.open("s", identity="")
        await put(a, token, 1)
        wire.become("deaf")
        sequence = await put(a, token, 2)
        assert (epoch(sequence), wire.swallowed > 0) == (1, True)
        # Redis has taken it all the same, under the number that it would have had.
        assert bodies(await ledger.read(b)) == numbered(1, 2)
        ledger.see(await a.log.read("s", 0, PLENTY))
        await put(a, token, 3)
        wire.become("open")
        page = await seen(b, numbered(1, 2, 3), ledger)
        assert epoch(page.head) >= 1


async def test_commands_that_arrive_late_change_nothing(shared: Valkey) -> None:
    """They wait in a socket while their sender has long gone on, and run after what it sent later."""
    ledger = Ledger()
    async with Wire(shared.port) as wire, worker(wire.url, name="a") as a, worker(shared.url, name="b") as b:
        token = await a.log.open("s", identity="")
        await put(a, token, 1)
        for round_ in range(2):
            wire.become("late")
            await put(a, token, 10 * round_ + 2)  # the append is held, then a restore or two
            await until(lambda: wire.held > 3)
            await put(a, token, 10 * round_ + 3)
            ledger.see(await a.log.read("s", 0, PLENTY))
            wire.become("open")
            wire.let_go()
            wanted = bodies(await a.log.read("s", 0, PLENTY))
            await seen(b, wanted, ledger)
            await put(a, token, 10 * round_ + 4)
            await seen(b, [*wanted, str(10 * round_ + 4).encode()], ledger)


def evals(server: Valkey) -> int:
    """How many scripts it has run."""
    return int(server.info("commandstats")["cmdstat_eval"].split(",")[0].partition("=")[2])


RESTORES = b"unstaged"  # stands in that script only


@asynccontextmanager
async def disconnected_owner(server: Valkey, lease_s: float) -> AsyncIterator[tuple[Wire, Worker, Worker, str]]:
    """Worker `a` has written 1, lost its connection and written 2. The next fault on its wire affects restores only."""
    async with AsyncExitStack() as stack:
        wire = await stack.enter_async_context(Wire(server.port))
        a = await stack.enter_async_context(worker(wire.url, name="a", lease_s=lease_s))
        b = await stack.enter_async_context(worker(server.url, name="b", lease_s=lease_s))
        token = await a.log.open("s", identity="")
        await put(a, token, 1)
        wire.become("cut")
        await put(a, token, 2)
        wire.victim = RESTORES
        yield wire, a, b, token


async def test_a_restore_without_a_reply_is_followed_by_a_new_epoch(shared: Valkey) -> None:
    ledger = Ledger()
    async with disconnected_owner(shared, LONG_LEASE_S) as (wire, a, b, token):
        wire.become("deaf")
        page = await seen(b, numbered(1, 2), ledger)
        assert (epoch(page.head), wire.swallowed > 0) == (1, True)
        wire.become("cut")
        await put(a, token, 3)  # Redis is behind this, and another writes there now.
        ledger.see(await a.log.read("s", 0, PLENTY))
        await eventually(lambda: buried(b))
        assert bodies(await ledger.read(b)) == [b"1", b"2", b"lost"]


async def test_a_late_restore_changes_nothing(shared: Valkey) -> None:
    ledger = Ledger()
    async with disconnected_owner(shared, LEASE_S) as (wire, a, b, token):
        wire.become("late")
        await until(lambda: wire.held > 0)
        wire.become("open")  # The next one gets through, before the one that is held.
        await seen(b, numbered(1, 2), ledger)
        await put(a, token, 3)
        await seen(b, numbered(1, 2, 3), ledger)
        before = evals(shared)
        wire.let_go()
        await until(lambda: evals(shared) > before)
        wire.become("cut")
        await eventually(lambda: buried(b))
        assert bodies(await ledger.read(b)) == [b"1", b"2", b"3", b"lost"]


async def test_a_stream_whose_open_got_no_reply_can_be_opened_again(shared: Valkey) -> None:
    async with Wire(shared.port) as wire, worker(wire.url, name="a", lease_s=LEASE_S) as a:
        wire.become("deaf")
        with pytest.raises(StreamUnavailable):
            await a.log.open("s", identity="")
        wire.become("open")
        async with worker(shared.url, name="b") as b:
            # It is taken back, so any worker can.
            await eventually(lambda: b.log.open("s", identity=""))


async def test_a_cancelled_open_leaves_no_stream(shared: Valkey) -> None:
    async with worker(shared.url) as one:
        opening = asyncio.create_task(one.log.open("s", identity=""))
        await asyncio.sleep(0)
        opening.cancel()
        await asyncio.wait([opening])
        assert opening.cancelled()
        await eventually(lambda: one.log.open("s", identity=""))


async def test_an_owner_paused_for_longer_than_its_lease_writes_nothing_locally(shared: Valkey) -> None:
    """It was stopped, another has buried its stream, and then its first call to Redis gets lost: that is no reason to
    go on alone, and to end a stream that has ended."""
    async with AsyncExitStack() as stack:
        wire = await stack.enter_async_context(Wire(shared.port))
        a = await stack.enter_async_context(worker(wire.url, name="a", lease_s=LEASE_S))
        b = await stack.enter_async_context(worker(shared.url, name="b", lease_s=LEASE_S))
        token = await a.log.open("s", identity="")
        await put(a, token, 1)
        await eventually(lambda: buried(b))
        wire.become("cut")
        for last in (False, True):
            with pytest.raises(StreamUnavailable):
                await a.log.append("s", token, [entry("end", body=b"done", final=last)])
        assert [each.body for each in (await a.log.read("s", 0, PLENTY)).entries] == [b"1"]
        wire.become("open")
        await eventually(lambda: refused(a, token))
        assert [each.body for each in (await a.log.read("s", 0, PLENTY)).entries][-1] == b"lost"


@asynccontextmanager
async def renewing(owner: Worker, token: str) -> AsyncIterator[None]:
    """As a living owner does, whatever becomes of it."""

    async def renew() -> None:
        while True:
            with suppress(StreamUnavailable, LeaseLost):
                await owner.log.append("s", token, [])
            await asyncio.sleep(LEASE_S / 4)

    task = asyncio.create_task(renew())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_an_owner_that_was_disconnected_learns_that_its_stream_was_ended(shared: Valkey) -> None:
    ledger = Ledger()
    async with AsyncExitStack() as stack:
        wire = await stack.enter_async_context(Wire(shared.port))
        a = await stack.enter_async_context(worker(wire.url, name="a", lease_s=LEASE_S))
        b = await stack.enter_async_context(worker(shared.url, name="b", lease_s=LEASE_S))
        token = await a.log.open("s", identity="")
        await put(a, token, 1)
        await stack.enter_async_context(renewing(a, token))
        async with StreamReader(
            a.log, "s", 0, cap_bytes=10**6, lost=lambda _: entry("end", body=b"lost", final=True)
        ) as reader:
            wire.become("cut")
            cursor = await put(a, token, 2)
            ledger.see(await a.log.read("s", 0, PLENTY))
            await eventually(lambda: buried(b))
            await ledger.read(b)
            await put(a, token, 3)
            ledger.see(await a.log.read("s", cursor, PLENTY))
            wire.become("open")
            await eventually(lambda: refused(a, token))
            got: list[bytes] = []
            async with asyncio.timeout(WAIT_S):
                while True:
                    batch = await tried(reader)
                    if batch is not None and batch.reset:
                        got = []
                    got += [each.body for each in batch.entries] if batch else []
                    if batch is not None and batch.ended:
                        break
            assert got == [b"1", b"lost"]
            await ledger.read(a)


async def tried(reader: StreamReader) -> Page | None:
    try:
        return await reader.next(1.0)
    except StreamUnavailable:
        await asyncio.sleep(0.01)
        return None


async def test_a_full_redis_counts_as_unreachable(shared: Valkey) -> None:
    ledger = Ledger()
    async with worker(shared.url, name="a") as a, worker(shared.url, name="b") as b:
        token = await a.log.open("s", identity="")
        await put(a, token, 1)
        await b.redis.execute("CONFIG", "SET", "maxmemory", "1")
        try:
            assert epoch(await put(a, token, 2)) == 1
            refusals = len(a.signals)
            await until(lambda: len(a.signals) > refusals + 3)
            assert epoch(await put(a, token, 3)) == 1  # though it tried to restore it meanwhile
            ledger.see(await a.log.read("s", 0, PLENTY))
            assert bodies(await ledger.read(b)) == numbered(1)
            with pytest.raises(StreamUnavailable):
                await b.log.open("t", identity="")
        finally:
            await b.redis.execute("CONFIG", "SET", "maxmemory", "0")
        page = await seen(b, numbered(1, 2, 3), ledger)
        assert epoch(page.head) == 1
        assert epoch(await put(a, token, 4)) == 1


async def test_a_stream_is_not_ended_right_after_an_outage_in_which_its_lease_expired(shared: Valkey) -> None:
    async with worker(shared.url, name="a", lease_s=0.5) as a, worker(shared.url, name="b", lease_s=0.5) as b:
        token = await a.log.open("s", identity="")
        await put(a, token, 1)
        await b.redis.execute("CONFIG", "SET", "maxmemory", "1")
        try:

            async def refused_to_bury() -> bool:
                await put(a, token, 2)
                try:
                    assert not await buried(b)
                except StreamUnavailable:
                    return True
                return False

            await eventually(refused_to_bury)
        finally:
            await b.redis.execute("CONFIG", "SET", "maxmemory", "0")
        assert not await buried(b)
        assert not (await seen(b, numbered(1, 2))).ended


async def paged(one: Worker, wanted: list[bytes], ledger: Ledger) -> bool:
    read, _ = await read_through(one.log, "s", 0, PLENTY)
    ledger.see(Page(entries=tuple(read), head=0))
    return [each.body for each in read] == wanted


async def test_a_large_stream_is_restored_in_chunks_while_it_is_written(mortal: Valkey) -> None:
    ledger = Ledger()
    async with worker(mortal.url, name="a", timeout_s=5.0) as a, worker(mortal.url, name="b", timeout_s=5.0) as b:
        token = await a.log.open("s", identity="")
        large = [entry(f"large {number}", body=bytes([number]) * 50_000) for number in range(60)]
        await a.log.append("s", token, large)
        mortal.kill()
        mortal.start()
        numbers = range(100)
        for number in numbers:
            await put(a, token, number)
        wanted = [each.body for each in large] + numbered(*numbers)
        await eventually(lambda: paged(b, wanted, ledger))
        ledger.see(await a.log.read("s", 0, PLENTY))
        assert await a.redis.execute("KEYS", "*staged*") == []


async def test_cancelled_appends_leave_redis_and_the_owners_copy_equal(shared: Valkey) -> None:
    chance = random.Random(5)
    async with worker(shared.url, name="a", timeout_s=WAIT_S) as a, worker(shared.url, name="b") as b:
        token = await a.log.open("s", identity="")
        returned: dict[int, int] = {}

        async def caller(number: int) -> None:
            for _ in range(chance.randrange(20)):
                await asyncio.sleep(0)
            asked = asyncio.create_task(put(a, token, number))
            if chance.random() < 0.5:
                for _ in range(chance.randrange(10)):
                    await asyncio.sleep(0)
                asked.cancel()
            await asyncio.wait([asked])
            if not asked.cancelled():
                returned[asked.result()] = number

        await asyncio.gather(*(caller(number) for number in range(300)))
        await a.log.append("s", token, [])
        mirror, redis = await a.log.read("s", 0, PLENTY), await b.log.read("s", 0, PLENTY)
        assert mirror.entries == redis.entries
        assert [each.sequence for each in redis.entries] == list(range(1, len(redis.entries) + 1))
        there = {each.sequence: int(each.body) for each in redis.entries}
        assert 50 < len(returned) < 300
        assert returned.items() <= there.items()


async def test_two_hundred_readers_share_one_replica(shared: Valkey) -> None:
    async with worker(shared.url, name="a") as a, worker(shared.url, name="b") as b, AsyncExitStack() as stack:
        token = await a.log.open("s", identity="")
        await put(a, token, 0)
        readers = [
            StreamReader(b.log, "s", 0, cap_bytes=10**6, lost=lambda _: entry("x", final=True)) for _ in range(200)
        ]
        await asyncio.gather(*(stack.enter_async_context(reader) for reader in readers))

        async def follow(reader: StreamReader) -> list[bytes]:
            got: list[bytes] = []
            while True:
                batch = await reader.next(WAIT_S)
                assert batch is not None
                got += [each.body for each in batch.entries]
                if batch.ended:
                    return got

        before = evals(shared)
        following = [asyncio.create_task(follow(reader)) for reader in readers]
        for number in range(1, 50):
            await put(a, token, number)
        await a.log.append("s", token, [entry("end", body=b"50", final=True)])
        async with asyncio.timeout(WAIT_S):
            assert await asyncio.gather(*following) == [numbered(*range(51))] * 200
        assert evals(shared) - before <= 50 + 50 + WAIT_S


async def test_a_replica_reads_again_if_a_notification_is_lost(shared: Valkey) -> None:
    """One worker's ears are cut off again and again, and at last for good."""
    async with Wire(shared.port) as wire, worker(shared.url, name="a") as a, worker(shared.url, name="b") as b:
        await b.post.close()
        token = await a.log.open("s", identity="")
        async with b.log.watch("s") as watch:
            assert (await b.log.read("s", 0, PLENTY)).head == 0
            await put(a, token, 1)
            async with asyncio.timeout(WAIT_S):
                while not (await b.log.read("s", 0, PLENTY)).entries:
                    await watch.changed()
        async with worker(wire.url, name="c") as c, c.log.watch("s") as watch:
            for number in range(2, 6):
                await c.log.read("s", 0, PLENTY)
                await a.redis.execute("CLIENT", "KILL", "TYPE", "pubsub")
                await put(a, token, number)
                async with asyncio.timeout(WAIT_S):
                    while len((await c.log.read("s", 0, PLENTY)).entries) < number:
                        await watch.changed()


async def test_a_cursor_ahead_of_the_replica_is_not_reset(shared: Valkey) -> None:
    """A client comes from a worker that knows more than this one does yet."""
    async with worker(shared.url, name="a") as a, worker(shared.url, name="b") as b:
        await b.post.close()  # so that it is late
        token = await a.log.open("s", identity="")
        async with b.log.watch("s"):
            assert (await b.log.read("s", 0, PLENTY)).head == 0
            cursor = await put(a, token, 1)
            page = await b.log.read("s", cursor, PLENTY)
            assert (page.reset, page.head) == (False, cursor)


async def follow(one: Worker, ledger: Ledger) -> list[bytes]:
    """What a client has at the end that comes back with its cursor whenever it is turned away."""
    got: list[bytes] = []
    after, ended = 0, False
    while not ended:
        try:
            async with StreamReader(
                one.log, "s", after, cap_bytes=10**6, lost=lambda _: entry("end", body=b"lost", final=True)
            ) as reader:
                while not ended:
                    batch = await reader.next(0.2)
                    after = reader.sequence
                    if batch is not None:
                        ledger.see(Page(entries=batch.entries, head=batch.head))
                        got = ([] if batch.reset else got) + [each.body for each in batch.entries]
                        ended = batch.ended
        except (StreamUnavailable, NotFound):
            await asyncio.sleep(0.01)
    return got


async def write(one: Worker, token: str, chance: random.Random, over: asyncio.Event) -> list[bytes]:
    """What was accepted, to the end; nothing if the stream was lost."""
    accepted: list[bytes] = []
    try:
        while not over.is_set():
            assert await put(one, token, len(accepted))
            accepted.append(str(len(accepted)).encode())
            await asyncio.sleep(chance.random() * 0.01)
        await one.log.append("s", token, [entry("end", body=b"over", final=True)])
    except LeaseLost:
        return []
    return [*accepted, b"over"]


@pytest.mark.parametrize(("seed", "lease_s"), [(1, 5.0), (2, 5.0), (3, 0.1)])
async def test_random_faults_never_publish_two_bodies_under_one_sequence(
    shared: Valkey, seed: int, lease_s: float
) -> None:
    chance = random.Random(seed)
    ledger = Ledger()
    over = asyncio.Event()
    async with AsyncExitStack() as stack:
        wires = [await stack.enter_async_context(Wire(shared.port)) for _ in range(2)]
        a, b = [
            await stack.enter_async_context(worker(wire.url, name=name, timeout_s=0.05, lease_s=lease_s))
            for wire, name in zip(wires, "ab", strict=True)
        ]
        token = await a.log.open("s", identity="")
        writing = asyncio.create_task(write(a, token, chance, over))
        following = [asyncio.create_task(follow(one, ledger)) for one in (a, b)]
        for _ in range(25):
            wire = chance.choice(wires)
            wire.become(chance.choice(["cut", "deaf", "late", "open"]))
            wire.victim = chance.choice([b"", RESTORES])
            if chance.random() < 0.3:
                wire.let_go()
            await asyncio.sleep(chance.random() * 0.08)
        for wire in wires:
            wire.become("open")
            wire.let_go()
        over.set()
        async with asyncio.timeout(WAIT_S):
            accepted = await writing
            one, other = await asyncio.gather(*following)
        if lease_s > 1:
            assert one == other == accepted
        # If another worker took it for dead, what its owner still did alone was only seen there, and only till now.
        assert {one[-1], other[-1]} <= {b"over", b"lost"}

        async def agreed() -> bool:
            return bodies(await ledger.read(a)) == bodies(await ledger.read(b))

        await eventually(agreed)


async def test_a_paused_process_loses_its_stream_and_that_of_a_killed_one_is_ended(shared: Valkey) -> None:
    tests = Path(__file__).parents[1]
    owner = await asyncio.create_subprocess_exec(
        sys.executable,
        str(tests / "support" / "stream_owner.py"),
        shared.url,
        str(LEASE_S),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(tests)},
    )
    assert owner.stdout is not None
    try:
        async with worker(shared.url, name="b", lease_s=LEASE_S) as b:
            await eventually(lambda: written_to(b, "first"))
            owner.send_signal(signal.SIGSTOP)
            got = await to_the_end(b, "first")
            assert got == [*numbered(*range(1, len(got))), b"lost"]
            owner.send_signal(signal.SIGCONT)
            async with asyncio.timeout(WAIT_S):
                assert await owner.stdout.readline() == f"lost first {len(got)} lost\n".encode()
            await eventually(lambda: written_to(b, "second"))
            owner.kill()
            got = await to_the_end(b, "second")
            assert got == [*numbered(*range(1, len(got))), b"lost"]
    finally:
        if owner.returncode is None:
            with suppress(ProcessLookupError):
                owner.kill()
            await owner.wait()


async def written_to(one: Worker, stream: str) -> bool:
    return len((await one.log.read(stream, 0, PLENTY)).entries) > 2


async def to_the_end(one: Worker, stream: str) -> list[bytes]:
    """What a reader gets that joins now and stays."""
    got: list[bytes] = []
    async with StreamReader(
        one.log, stream, 0, cap_bytes=10**6, lost=lambda _: entry("end", body=b"lost", final=True)
    ) as reader:
        async with asyncio.timeout(WAIT_S):
            while True:
                batch = await reader.next(0.05)
                if batch is not None:
                    assert not batch.reset
                    got += [each.body for each in batch.entries]
                    if batch.ended:
                        return got
