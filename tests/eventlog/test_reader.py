"""One reader of a stream: what it hands out, when it waits, and when it is cut."""

import asyncio
from collections.abc import Iterator

import pytest
from test_log_contract import memory_log

from anabranch.domain.errors import NotFound
from anabranch.domain.eventlog import Entry, LogLimits, Page
from anabranch.eventlog.memory import MemoryLog
from anabranch.eventlog.reader import BATCH, StreamReader, TooSlow
from anabranch.testing import ManualClock
from anabranch.testing.contracts.event_log import entry

LONG_S = 1_000.0
CAP = 10_000


class Scene:
    """A stream, its owner, and time that stands still."""

    def __init__(self, **given: float) -> None:
        self.clock = ManualClock()
        self.log: MemoryLog = memory_log(self.clock, LogLimits(**given))  # type: ignore[arg-type]
        self.token = ""

    async def begin(self) -> "Scene":
        self.token = await self.log.open("s", identity="user:a", about=b"about")
        return self

    async def write(self, *entries: Entry) -> None:
        await self.log.append("s", self.token, entries)

    def reader(self, after: int = 0, *, whole: bool = False) -> StreamReader:
        return StreamReader(self.log, "s", after, cap_bytes=CAP, lost=lost, whole=whole)


def lost(page: Page) -> Entry:
    return entry("end", body=b"lost:" + page.about, final=True)


def many(count: int, size: int = 2, named: str = "k") -> Iterator[Entry]:
    return (entry(f"{named}{number}", body=bytes(size)) for number in range(count))


def numbers(batch: Page | None) -> list[int]:
    assert batch is not None
    return [each.sequence for each in batch.entries]


async def test_a_reader_replays_in_batches_and_then_waits_for_new_entries() -> None:
    scene = await Scene().begin()
    await scene.write(*many(BATCH + 20))
    async with scene.reader() as reader:
        assert numbers(await reader.next(LONG_S)) == list(range(1, BATCH + 1))
        assert (reader.sequence, reader.head) == (BATCH, BATCH + 20)
        assert numbers(await reader.next(LONG_S)) == list(range(BATCH + 1, BATCH + 21))
        assert await reader.next(0) is None
        waiting = asyncio.create_task(reader.next(LONG_S))
        await asyncio.sleep(0)
        await scene.write(entry("new"))
        batch = await waiting
        assert (numbers(batch), reader.sequence, reader.head) == ([BATCH + 21], BATCH + 21, BATCH + 21)


async def test_entries_written_during_a_replay_are_read_once_and_in_order() -> None:
    scene = await Scene().begin()
    await scene.write(*many(BATCH))
    async with scene.reader(3) as reader:
        await scene.write(entry("during"))
        assert numbers(await reader.next(0)) == list(range(4, BATCH + 1))
        assert numbers(await reader.next(0)) == [BATCH + 1]
        assert await reader.next(0) is None


async def test_the_first_page_names_the_owner_before_any_entry_is_read() -> None:
    scene = await Scene().begin()
    await scene.write(*many(3))
    async with scene.reader(2) as reader:
        assert (reader.page.identity, reader.page.about, reader.page.head) == ("user:a", b"about", 3)
        assert [each.sequence for each in reader.page.entries] == [3]
        await reader.next(0)
        assert (reader.page.identity, reader.page.entries) == ("user:a", ())


async def test_entering_a_reader_of_an_unknown_stream_raises_not_found() -> None:
    scene = Scene()
    with pytest.raises(NotFound):
        async with scene.reader():
            pass
    assert not scene.log._watchers._watches


async def test_a_stream_that_expires_under_a_reader_is_not_found() -> None:
    scene = await Scene().begin()
    async with scene.reader() as reader:
        waiting = asyncio.create_task(reader.next(LONG_S))
        await asyncio.sleep(0)
        scene.clock.advance(10_000.0)
        scene.log.tend()
        with pytest.raises(NotFound):
            await waiting
    assert not scene.log._watchers._watches


async def test_the_last_batch_and_all_later_ones_say_that_the_stream_has_ended() -> None:
    scene = await Scene().begin()
    await scene.write(*many(BATCH), entry("end", final=True))
    async with scene.reader() as reader:
        first, second, third = [await reader.next(0) for _ in range(3)]
        assert first is not None
        assert first.ended is False
        assert second == Page(entries=second.entries if second else (), head=BATCH + 1, ended=True)
        assert (numbers(second), third) == ([BATCH + 1], Page(entries=(), head=BATCH + 1, ended=True))
    async with scene.reader(BATCH + 1) as reader:
        assert await reader.next(0) == Page(entries=(), head=BATCH + 1, ended=True)


async def test_an_invalid_cursor_resets_the_reader_once() -> None:
    scene = await Scene().begin()
    async with scene.reader(7) as reader:
        assert await reader.next(0) == Page(entries=(), head=0, reset=True)
        assert (reader.sequence, await reader.next(0)) == (0, None)
        await scene.write(*many(2))
        batch = await reader.next(0)
        assert (numbers(batch), batch and batch.reset) == ([1, 2], False)
    async with scene.reader(7) as reader:
        batch = await reader.next(0)
        assert (numbers(batch), batch and batch.reset) == ([1, 2], True)
        assert await reader.next(0) is None


async def test_a_snapshot_below_the_floor_is_read_in_batches() -> None:
    scene = await Scene(max_events=400).begin()
    await scene.write(*many(250))
    for revision in range(1, 301):
        await scene.write(entry("k", revision))
    async with scene.reader(2) as reader:
        batches = [batch for _ in range(5) if (batch := await reader.next(0)) is not None]
    assert [batch.reset for batch in batches] == [True] + [False] * (len(batches) - 1)
    assert max(len(batch.entries) for batch in batches) == BATCH
    kept = (await scene.log.read("s", 0, 1_000)).entries
    assert tuple(each for batch in batches for each in batch.entries) == kept


async def test_a_reader_that_is_catching_up_is_never_too_slow() -> None:
    scene = await Scene().begin()
    await scene.write(*many(3 * BATCH, size=CAP // 50))
    async with scene.reader() as reader:
        for _ in range(3):
            assert len(numbers(await reader.next(0))) == BATCH
            await scene.write(*(entry(f"more{reader.head}:{number}", body=bytes(CAP // 50)) for number in range(20)))
        assert len(numbers(await reader.next(0))) == 60


async def test_a_reader_is_catching_up_after_a_reset() -> None:
    scene = await Scene(max_events=4 * BATCH).begin()
    await scene.write(*many(BATCH + 20, size=CAP // 50))
    async with scene.reader(BATCH + 20) as reader:
        assert await reader.next(0) is None
        for revision in range(4 * BATCH):
            await scene.write(entry("k", revision))
        got: list[int] = []
        resets = 0
        while (batch := await reader.next(0)) is not None:
            resets += batch.reset
            got += numbers(batch)
            if len(got) == BATCH:
                await scene.write(*(entry(f"more{number}", body=bytes(CAP // 10)) for number in range(20)))
    assert resets == 1
    assert got == [each.sequence for each in (await scene.log.read("s", 0, 1_000)).entries]


async def test_a_reader_that_falls_behind_skips_superseded_partials() -> None:
    scene = await Scene().begin()
    async with scene.reader() as reader:
        assert await reader.next(0) is None
        await scene.write(entry("a"), entry("plain"), entry("plain", 2))
        assert numbers(await reader.next(0)) == [1, 2, 3]
        await scene.write(*(entry("a", revision, bytes(CAP // 10), partial=True) for revision in range(2, 22)))
        await scene.write(entry("plain", 3), entry("plain", 4), entry("b", body=bytes(CAP // 2), partial=True))
        assert numbers(await reader.next(0)) == [23, 24, 25, 26]
        assert await reader.next(0) is None


async def test_a_reader_within_its_cap_gets_every_partial() -> None:
    scene = await Scene().begin()
    async with scene.reader() as reader:
        assert await reader.next(0) is None
        await scene.write(*(entry("a", revision, b"xx", partial=True) for revision in range(2 * BATCH + 50)))
        got = [number for _ in range(3) for number in numbers(await reader.next(LONG_S))]
        assert got == list(range(1, 2 * BATCH + 51))


@pytest.mark.parametrize("count", [11, 5 * BATCH])
async def test_a_reader_too_far_behind_is_too_slow_and_can_continue_from_its_cursor(count: int) -> None:
    scene = await Scene().begin()
    async with scene.reader() as reader:
        await scene.write(entry("first"))
        assert numbers(await reader.next(0)) == [1]
        await scene.write(*many(count, size=CAP // 10))
        assert await taken(reader, count) == list(range(2, count + 2)), "one burst is nobody's fault"
        await scene.write(*many(count, size=CAP // 10, named="again"))
        with pytest.raises(TooSlow):
            await reader.next(0)
        cursor = reader.sequence
    assert cursor == count + 1
    async with scene.reader(cursor) as reader:
        assert await taken(reader, count) == list(range(count + 2, 2 * count + 2))


async def test_a_reader_that_has_caught_up_may_fall_behind_again() -> None:
    scene = await Scene().begin()
    async with scene.reader() as reader:
        assert await reader.next(0) is None
        for burst in range(4):
            await scene.write(*many(11, size=CAP // 10, named=f"burst {burst}"))
            assert len(await taken(reader, 11)) == 11
            await scene.write(entry(f"small {burst}"))
            assert len(await taken(reader, 1)) == 1


async def taken(reader: StreamReader, count: int) -> list[int]:
    """So many, and not one look more."""
    got: list[int] = []
    while len(got) < count:
        batch = await reader.next(0)
        assert batch is not None
        assert batch.reset is False
        got += numbers(batch)
    return got


async def test_a_reader_of_an_empty_stream_can_fall_behind() -> None:
    scene = await Scene().begin()
    async with scene.reader() as reader:
        assert await reader.next(0) is None
        await scene.write(*many(11, size=CAP // 10))
        assert len(await taken(reader, 11)) == 11
        await scene.write(*many(11, size=CAP // 10, named="again"))
        with pytest.raises(TooSlow):
            await reader.next(0)


async def test_a_live_reader_gets_an_entry_larger_than_its_cap() -> None:
    scene = await Scene().begin()
    async with scene.reader() as reader:
        assert await reader.next(0) is None
        await scene.write(entry("large", body=bytes(3 * CAP)))
        assert numbers(await reader.next(0)) == [1]


async def test_a_reader_that_is_cancelled_loses_no_entry() -> None:
    scene = await Scene().begin()
    async with scene.reader() as reader:
        waiting = asyncio.create_task(reader.next(LONG_S))
        await asyncio.sleep(0)
        await scene.write(entry("a"))
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        assert numbers(await reader.next(0)) == [1]


async def test_a_reader_ends_an_abandoned_stream() -> None:
    scene = await Scene(lease_s=10).begin()
    await scene.write(*many(2))
    async with scene.reader() as one, scene.reader() as other:
        assert numbers(await one.next(0)) == [1, 2]
        assert await one.next(0) is None
        scene.clock.advance(10.0)
        batch = await one.next(0)
        assert (numbers(batch), batch and batch.ended) == ([3], True)
        assert batch is not None
        assert batch.entries[0].body == b"lost:about"
        assert numbers(await other.next(0)) == [1, 2]
        last = await other.next(0)
        assert (numbers(last), last and last.ended) == ([3], True)
    async with scene.reader() as late:
        assert late.page.ended is True


async def test_a_reader_of_the_whole_stream_waits_for_its_end_and_skips_superseded_partials() -> None:
    scene = await Scene().begin()
    async with scene.reader(whole=True) as reader:
        await scene.write(entry("a", 1, partial=True), *many(BATCH, size=CAP // 10))
        assert await reader.next(0) is None
        waiting = asyncio.create_task(reader.next(LONG_S))
        await asyncio.sleep(0)
        await scene.write(entry("a", 2))
        for _ in range(3):
            await asyncio.sleep(0)
        assert not waiting.done()
        assert reader.sequence == 0
        await scene.write(entry("end", final=True))
        assert numbers(await waiting) == list(range(2, BATCH + 2))
        last = await reader.next(0)
        assert (numbers(last), last and last.ended) == ([BATCH + 2, BATCH + 3], True)


async def test_a_busy_process_does_not_take_its_own_stream_for_lost() -> None:
    """Its owner may only be late to renew the lease."""
    scene = await Scene(lease_s=10.0).begin()
    await scene.write(entry("1"))
    holding = True
    reader = StreamReader(scene.log, "s", 0, cap_bytes=CAP, lost=lost, held=lambda: holding)
    scene.clock.advance(60.0)
    async with reader:
        assert numbers(await reader.next(0)) == [1]
        assert await reader.next(0) is None
        await scene.write(entry("2"))
        assert numbers(await reader.next(LONG_S)) == [2]
        scene.clock.advance(60.0)
        holding = False
        batch = await reader.next(0)
        assert batch is not None
        assert (batch.ended, batch.entries[-1].body) == (True, b"lost:about")
