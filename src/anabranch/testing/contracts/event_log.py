"""The tests of the contract EventLog."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from itertools import product
from typing import Any

import msgspec
import pytest

from anabranch.domain.contracts import EventLog
from anabranch.domain.errors import Conflict, LeaseLost, NotFound, StreamFull
from anabranch.domain.eventlog import EPOCH, LAST, Entry, LogLimits, Page, SequencedEntry, place

WAIT_S = 20.0
PLENTY = 1_000


class LogCase(msgspec.Struct, kw_only=True):
    """Two logs over one store, or the same log twice: one writes and one reads. `limits` are those in force; `advance`
    lets that many seconds pass for both; `token` is that of the stream `s`, which each test starts with."""

    writer: EventLog
    reader: EventLog
    advance: Callable[[float], Awaitable[None]]
    limits: LogLimits
    token: str = ""

    async def append(self, *entries: Entry) -> list[int]:
        return list(await self.writer.append("s", self.token, entries))

    async def read(self, after: int = 0, limit: int = PLENTY) -> Page:
        return await self.reader.read("s", after, limit)

    async def end_abandoned(self, body: bytes = b"{}") -> bool:
        return await self.reader.end_abandoned("s", entry("end", body=body, final=True))


# Opens a LogCase with these limits; it may make the times shorter, and may not change the bounds.
OpenCase = Callable[[LogLimits], AbstractAsyncContextManager[LogCase]]


def with_limits(**limits: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [LogLimits(**limits)], ids=[""], indirect=True)


def entry(key: str, revision: int = 1, body: bytes = b"{}", *, partial: bool = False, final: bool = False) -> Entry:
    return Entry(key=key, revision=revision, body=body, partial=partial, final=final)


def written(page: Page) -> list[tuple[int, str, int]]:
    return [(place(each.sequence), each.key, each.revision) for each in page.entries]


async def read_through(log: EventLog, stream: str, after: int, limit: int) -> tuple[list[SequencedEntry], int]:
    """Page after page from a cursor to the head; also how many of them were resets."""
    read: list[SequencedEntry] = []
    resets = 0
    for _ in range(PLENTY):
        page = await log.read(stream, after, limit)
        if page.reset:
            resets += 1
            read.clear()
        read += page.entries
        if not page.more:
            return read, resets
        after = page.entries[-1].sequence
    raise AssertionError("reading does not come to an end")


class EventLogContract:
    """The fixture `open_case` gives an OpenCase."""

    @pytest.fixture
    async def case(self, open_case: OpenCase, request: pytest.FixtureRequest) -> AsyncIterator[LogCase]:
        async with open_case(getattr(request, "param", LogLimits())) as case:
            case.token = await case.writer.open("s", identity="user:a", about=b"what it is")
            yield case

    async def test_entries_are_read_in_append_order_with_sequences_from_one(self, case: LogCase) -> None:
        assert await case.append(entry("a"), entry("b", 7)) == [1, 2]
        assert await case.append(entry("c", body=b"\x00\xff\r\n")) == [3]
        page = await case.read()
        assert written(page) == [(1, "a", 1), (2, "b", 7), (3, "c", 1)]
        assert page.entries[2].body == b"\x00\xff\r\n"
        assert (page.head, page.reset, page.more, page.ended, page.abandoned) == (3, False, False, False, False)
        assert (page.identity, page.about) == ("user:a", b"what it is")
        assert page.keeper == (await case.writer.read("s", 0, 1)).keeper != ""

    async def test_an_entry_is_read_back_unchanged(self, case: LogCase) -> None:
        token = await case.writer.open("ströme/{1}:\n", identity="")
        given = entry("schlüssel:\u2028 x", 2**40, "ä".encode(), partial=True)
        await case.writer.append("ströme/{1}:\n", token, [given, entry("end", 1, b"", final=True)])
        first, second = (await case.reader.read("ströme/{1}:\n", 0, PLENTY)).entries
        assert (first.key, first.revision, first.body) == (given.key, given.revision, given.body)
        assert (first.partial, first.final, second.partial, second.final) == (True, False, False, True)

    async def test_pages_have_no_gaps_and_no_duplicates(self, case: LogCase) -> None:
        await case.append(*(entry(str(number)) for number in range(7)))
        read, resets = await read_through(case.reader, "s", 0, 3)
        assert ([each.sequence for each in read], resets) == ([1, 2, 3, 4, 5, 6, 7], 0)
        assert (await case.read(4, 3)).more is False
        assert (await case.read(4, 2)).more is True
        assert (await case.read(7, 2)).entries == ()

    async def test_streams_are_independent(self, case: LogCase) -> None:
        tokens = {name: await case.writer.open(name, identity=name) for name in ("S", "s:1", "{s}", "t")}
        for name, token in tokens.items():
            assert await case.writer.append(name, token, [entry("k", body=name.encode())]) == [1]
        for name in tokens:
            page = await case.reader.read(name, 0, PLENTY)
            assert (page.identity, [each.body for each in page.entries]) == (name, [name.encode()])

    async def test_only_a_higher_revision_is_appended(self, case: LogCase) -> None:
        assert await case.append(entry("k", 2), entry("k", 2), entry("k", 1)) == [1, 0, 0]
        assert await case.append(entry("k", 2, b"other"), entry("k", 5)) == [0, 2]
        assert await case.append(entry("k", 4), entry("j", 0), entry("k", 6)) == [0, 3, 4]
        assert written(await case.read()) == [(1, "k", 2), (2, "k", 5), (3, "j", 0), (4, "k", 6)]

    async def test_appending_the_same_entries_again_changes_nothing(self, case: LogCase) -> None:
        entries = [entry("a", partial=True), entry("b"), entry("a", 2)]
        assert await case.append(*entries) == [1, 2, 3]
        before = await case.read()
        assert await case.append(*entries) == [0, 0, 0]
        assert await case.read() == before

    @pytest.mark.parametrize("after", [4, EPOCH - 1, EPOCH, EPOCH + 2, 5 * EPOCH + 1, LAST, 2**80, -1, -EPOCH])
    async def test_an_invalid_cursor_resets_to_the_beginning(self, case: LogCase, after: int) -> None:
        assert (await case.read(after, 1)).reset is True
        await case.append(entry("a"), entry("b"), entry("c"))
        page = await case.read(after, 2)
        assert (page.reset, page.more, page.head, written(page)) == (True, True, 3, [(1, "a", 1), (2, "b", 1)])

    @pytest.mark.parametrize("after", [0, 1, 2, 3])
    async def test_a_valid_cursor_continues(self, case: LogCase, after: int) -> None:
        await case.append(entry("a"), entry("a", 2), entry("b"))
        page = await case.read(after)
        assert page.reset is False
        assert [each.sequence for each in page.entries] == [1, 2, 3][after:]

    @with_limits(max_events=16)
    async def test_superseded_partials_are_trimmed_first_and_no_cursor_is_reset(self, case: LogCase) -> None:
        await case.append(entry("plain"), entry("plain", 2))
        for revision in range(1, 31):
            await case.append(entry("k", revision, partial=True))
        page = await case.read()
        assert len(page.entries) <= 16
        assert written(page)[:2] == [(1, "plain", 1), (2, "plain", 2)]
        assert written(page)[-1] == (32, "k", 30)
        for cursor in range(1, 32):
            later = await case.read(cursor)
            assert later.reset is False, cursor
            assert later.entries == tuple(each for each in page.entries if each.sequence > cursor)

    @with_limits(max_events=16)
    async def test_a_cursor_below_the_floor_resets_to_the_latest_of_every_key(self, case: LogCase) -> None:
        await case.append(entry("first"), entry("second", partial=True))
        for revision in range(1, 41):
            await case.append(entry(f"k{revision % 3}", revision))
        kept = (await case.read()).entries
        assert len(kept) <= 16
        assert {each.key: each.revision for each in kept} == {"first": 1, "second": 1, "k0": 39, "k1": 40, "k2": 38}
        for cursor in range(1, 42):
            read, resets = await read_through(case.reader, "s", cursor, PLENTY)
            assert read == [each for each in kept if resets or each.sequence > cursor], cursor
            assert resets or len(read) == 42 - cursor, cursor
        assert (await read_through(case.reader, "s", 3, PLENTY))[1] == 1
        assert (await read_through(case.reader, "s", 41, PLENTY))[1] == 0

    @pytest.mark.parametrize("limit", [1, 2, 3, 100])
    @with_limits(max_events=16)
    async def test_a_trimmed_stream_can_be_paged_through(self, case: LogCase, limit: int) -> None:
        """Entries kept below the floor have no cursor to continue from, so the first page contains all of them."""
        await case.append(*(entry(f"old{number}") for number in range(6)))
        for revision in range(1, 31):
            await case.append(entry("k", revision))
        kept = list((await case.read()).entries)
        assert await read_through(case.reader, "s", 0, limit) == (kept, 0)
        assert await read_through(case.reader, "s", 2, limit) == (kept, 1)

    @with_limits(max_events=5)
    async def test_a_full_stream_accepts_only_its_end(self, case: LogCase) -> None:
        await case.append(*(entry(str(number)) for number in range(4)))
        before = await case.read()
        with pytest.raises(StreamFull):
            await case.append(entry("4"), entry("5"))
        assert await case.read() == before
        assert await case.append(entry("4")) == [5]
        with pytest.raises(StreamFull):
            await case.append(entry("6"), entry("end", final=True))
        assert await case.append(entry("4", 2)) == [6]
        assert await case.append(entry("4")) == [0]
        assert await case.append(entry("end", final=True)) == [7]
        page = await case.read()
        assert [each.key for each in page.entries] == ["0", "1", "2", "3", "4", "end"]
        assert page.ended is True

    @with_limits(max_bytes=100_000)
    async def test_bytes_are_bounded(self, case: LogCase) -> None:
        for revision in range(1, 31):
            await case.append(entry("k", revision, bytes(10_000), partial=revision % 2 == 0))
        kept = (await case.read()).entries
        assert 50_000 < sum(len(each.body) for each in kept) <= 100_000
        assert kept[-1].revision == 30
        with pytest.raises(StreamFull):
            await case.append(entry("large", 1, bytes(90_000)))
        with pytest.raises(StreamFull):
            await case.append(entry("k", 31, bytes(100_000)))
        assert (await case.read()).entries == kept
        assert await case.append(entry("end", 1, bytes(200_000), final=True)) == [31]
        page = await case.read(30)
        assert (page.ended, [len(each.body) for each in page.entries]) == (True, [200_000])

    @with_limits(ttl_s=60, lease_s=5)
    async def test_an_ended_stream_expires_after_its_ttl(self, case: LogCase) -> None:
        await case.append(entry("a"), entry("end", final=True))
        await case.advance(case.limits.ttl_s * 0.8)
        assert (await case.read()).ended is True
        await case.advance(case.limits.ttl_s * 0.4)
        await self._assert_not_found(case, "s")
        assert await case.writer.open("s", identity="") != case.token
        assert (await case.read()).head == 0

    @with_limits(ttl_s=60, lease_s=20)
    async def test_an_abandoned_stream_expires_after_lease_and_ttl(self, case: LogCase) -> None:
        limits = case.limits
        for _ in range(4):
            await case.advance(limits.lease_s * 0.9)
            await case.append()
        await case.advance(limits.ttl_s + limits.lease_s * 0.7)
        assert (await case.read()).abandoned is True
        await case.advance(limits.lease_s * 0.6)
        await self._assert_not_found(case, "s")

    async def test_only_the_owner_can_append(self, case: LogCase) -> None:
        other = await case.writer.open("t", identity="")
        assert case.token != other
        for wrong in (other, "", "x", case.token[:-1]):
            for log, entries in product((case.writer, case.reader), ([entry("a")], [])):
                with pytest.raises(LeaseLost):
                    await log.append("s", wrong, entries)
        assert (await case.read()).head == 0
        assert await case.append(entry("a")) == [1]

    async def test_an_ended_stream_rejects_appends(self, case: LogCase) -> None:
        end = entry("end", final=True)
        assert await case.append(entry("a"), end, entry("b")) == [1, 2, 0]
        for entries in ([entry("c")], [end], [entry("end", 2, final=True)], []):
            with pytest.raises(LeaseLost):
                await case.append(*entries)
        assert await case.end_abandoned() is False
        page = await case.read()
        assert (page.ended, written(page)) == (True, [(1, "a", 1), (2, "end", 1)])

    async def test_another_worker_ends_a_stream_only_after_its_lease(self, case: LogCase) -> None:
        lease_s = case.limits.lease_s
        await case.append(entry("a"))
        await case.advance(lease_s * 0.7)
        assert (await case.read()).abandoned is False
        assert await case.end_abandoned(b"lost") is False
        await case.append()
        await case.advance(lease_s * 0.7)
        assert await case.end_abandoned(b"lost") is False
        await case.advance(lease_s * 0.7)
        assert (await case.read()).abandoned is True
        assert await case.end_abandoned(b"lost") is True
        page = await case.read()
        assert (page.ended, page.abandoned) == (True, False)
        assert [each.body for each in page.entries] == [b"{}", b"lost"]
        with pytest.raises(LeaseLost):
            await case.append(entry("b"))
        assert (await case.read()).head == 2

    async def test_a_late_owner_keeps_its_stream_until_another_worker_ends_it(self, case: LogCase) -> None:
        await case.advance(case.limits.lease_s * 1.5)
        assert (await case.read()).abandoned is True
        assert await case.append(entry("a")) == [1]
        assert (await case.read()).abandoned is False
        assert await case.end_abandoned() is False

    async def test_concurrent_end_abandoned_ends_the_stream_once(self, case: LogCase) -> None:
        await case.advance(case.limits.lease_s * 1.5)
        ends = [entry("end", body=str(number).encode(), final=True) for number in range(10)]
        logs = [case.writer, case.reader]
        done = await asyncio.gather(*(logs[number % 2].end_abandoned("s", end) for number, end in enumerate(ends)))
        assert sum(done) == 1
        assert [each.body for each in (await case.read()).entries] == [ends[done.index(True)].body]

    async def test_every_watch_is_notified_of_appends_and_of_the_end(self, case: LogCase) -> None:
        async def heads(log: EventLog) -> list[int]:
            seen = []
            async with log.watch("s") as watch:
                page = await log.read("s", 0, PLENTY)
                watching.release()
                while not page.ended:
                    await watch.changed()
                    page = await log.read("s", 0, PLENTY)
                    if page.head not in seen:
                        seen.append(page.head)
                        watching.release()
            return seen

        watching = asyncio.Semaphore(0)
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
            watchers = [tasks.create_task(heads(log)) for log in [case.writer, case.reader] * 2]
            await self._all(watching, 4)
            for number in (1, 2):
                assert await case.append(entry(str(number))) == [number]
                await self._all(watching, 4)
            await case.append(entry("end", final=True))
        assert [task.result() for task in watchers] == [[1, 2, 3]] * 4

    async def test_an_append_between_read_and_wait_is_not_missed(self, case: LogCase) -> None:
        async with case.reader.watch("s") as watch:
            assert (await case.read()).head == 0
            await case.append(entry("a"))
            async with asyncio.timeout(WAIT_S):
                while (await case.read()).head < 1:
                    await watch.changed()

    async def test_cancelling_one_watch_does_not_affect_another(self, case: LogCase) -> None:
        async with case.reader.watch("s") as stays, case.reader.watch("s") as leaves:
            staying, leaving = (asyncio.ensure_future(watch.changed()) for watch in (stays, leaves))
            await asyncio.sleep(0)
            leaving.cancel()
            await asyncio.wait([leaving])
            assert not staying.done()
            await case.append(entry("a"))
            async with asyncio.timeout(WAIT_S):
                await staying
                await leaves.changed()

    async def test_end_abandoned_notifies_watches(self, case: LogCase) -> None:
        await case.advance(case.limits.lease_s * 1.5)
        async with case.writer.watch("s") as watch:
            assert await case.end_abandoned() is True
            async with asyncio.timeout(WAIT_S):
                while not (await case.writer.read("s", 0, 1)).ended:
                    await watch.changed()

    async def test_a_missing_stream_is_not_found(self, case: LogCase) -> None:
        await self._assert_not_found(case, "never")

    async def test_opening_an_existing_stream_is_a_conflict(self, case: LogCase) -> None:
        for log in (case.writer, case.reader):
            with pytest.raises(Conflict):
                await log.open("s", identity="user:b")
        assert await case.append(entry("end", final=True)) == [1]
        for log in (case.writer, case.reader):
            with pytest.raises(Conflict):
                await log.open("s", identity="user:b")
        assert (await case.read()).identity == "user:a"

    async def test_concurrent_open_has_one_owner(self, case: LogCase) -> None:
        opening = [log.open("t", identity="") for log in [case.writer, case.reader] * 5]
        opened = await asyncio.gather(*opening, return_exceptions=True)
        assert [type(each) for each in opened if not isinstance(each, str)] == [Conflict] * 9

    @staticmethod
    async def _assert_not_found(case: LogCase, stream: str) -> None:
        for log in (case.writer, case.reader):
            for call in (
                log.read(stream, 0, 1),
                log.append(stream, "token", [entry("a")]),
                log.end_abandoned(stream, entry("end", final=True)),
            ):
                with pytest.raises(NotFound):
                    await call

    @staticmethod
    async def _all(semaphore: asyncio.Semaphore, count: int) -> None:
        for _ in range(count):
            await semaphore.acquire()
