"""One reader of a stream: it pulls from the log as fast as its client takes, and is cut off when it is too slow."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

import msgspec

from anabranch.domain.contracts import EventLog, Telemetry, Watch
from anabranch.domain.eventlog import Entry, Page, SequencedEntry
from anabranch.domain.model import Value
from anabranch.domain.signals import Reading

BATCH = 100
ALL = 2**31 - 1


class Batch(Value):
    """What is new. `reset` says that it begins a snapshot, and what the client had so far is void; `ended` that nothing
    comes after it."""

    entries: tuple[SequencedEntry, ...]
    head: int
    reset: bool = False
    ended: bool = False


class TooSlow(Exception):
    """A client takes less than the stream brings. It may come back with its cursor."""


class StreamReaders:
    """How many there are in this process, for telemetry."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._count = 0

    def add(self, more: int) -> None:
        self._count += more
        self._telemetry.noted(Reading(clients=self._count))


class StreamReader:
    """`sequence` is the cursor after what was handed out, `head` the latest that is known of. It always asks for what
    stands behind its cursor, so there is neither gap nor double between what was and what is new. Once it has been
    level with the head it counts as live: if it then falls more than `cap_bytes` behind, superseded partials are left
    out, and if that is not enough twice in a row, it is cut. While it is catching up it never is. What it has fetched
    and not handed out yet is either one page of the log or no more than the cap, and the bodies are the log's own.

    A `whole` one hands out nothing before the stream has ended, and then all of it without superseded partials."""

    def __init__(
        self,
        log: EventLog,
        stream: str,
        after: int,
        *,
        cap_bytes: int,
        lost: Callable[[Page], Entry],
        readers: StreamReaders | None = None,
        whole: bool = False,
    ) -> None:
        self.sequence = after
        self.head = 0
        self._log = log
        self._stream = stream
        self._cap_bytes = cap_bytes
        self._lost = lost
        self._readers = readers
        self._whole = whole
        self._leaving = AsyncExitStack()
        self._watch: Watch | None = None
        self._page: Page | None = None
        # The page that was read and not taken over yet, then what of it is still to be handed out, from `_next` on.
        self._fetched: Page | None = None
        self._queue: Sequence[SequencedEntry] = ()
        self._next = 0
        self._reset = False
        self._more = True
        self._ended = False
        self._live = False
        self._strained = False

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as leaving:
            self._watch = await leaving.enter_async_context(self._log.watch(self._stream))
            self._fetched = await self._read(BATCH)
            self._page = self._fetched
            if self._readers is not None:
                self._readers.add(1)
                leaving.callback(self._readers.add, -1)
            self._leaving = leaving.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leaving.aclose()

    @property
    def page(self) -> Page:
        """The first one, as it was on entering; its entries are there until the first batch was taken."""
        assert self._page is not None, "a reader is entered before it is asked"
        return self._page

    async def next(self, wait_s: float) -> Batch | None:
        """What is new, or None if nothing came in this time. At the end that is an empty batch, as often as asked."""
        assert self._watch is not None, "a reader is entered before it is asked"
        until = asyncio.get_running_loop().time() + wait_s
        # After a page with nothing behind it, the watch knows best whether there is more by now.
        if self._behind and (batch := await self._taken()) is not None:
            return batch
        while True:
            try:
                async with asyncio.timeout_at(until):
                    await self._watch.changed()
            except TimeoutError:
                # No bell is rung for an owner that has fallen silent.
                return await self._taken()
            if (batch := await self._taken()) is not None:
                return batch

    @property
    def _behind(self) -> bool:
        return self._fetched is not None or self._reset or self._next < len(self._queue) or self._more or self._ended

    async def _taken(self) -> Batch | None:
        """Everything that changes here changes after the last wait, so whoever is cancelled has lost nothing."""
        if self._next >= len(self._queue) and not self._reset and not self._ended:
            await self._fill()
        batch = tuple(self._queue[self._next : self._next + BATCH])
        if not batch and not self._reset and not self._ended:
            self._live = True
            return None
        self._next += len(batch)
        drained = self._next >= len(self._queue)
        if drained:
            self._queue, self._next = (), 0
        if batch:
            self.sequence = batch[-1].sequence
        elif self._reset:
            self.sequence = 0
        reset, self._reset = self._reset, False
        if drained and not self._more:
            self._live = True
        return Batch(entries=batch, head=self.head, reset=reset, ended=drained and self._ended)

    async def _fill(self) -> None:
        page = self._fetched or await self._read(BATCH)
        if self._whole:
            if not page.ended:
                self._settle(page, ())
                return
            page = await self._read(ALL)
            self._settle(page, coalesced(page.entries))
            return
        entries: Sequence[SequencedEntry] = page.entries
        if self._live and not page.reset:
            page, entries = await self._held_to_its_cap(page)
        self._settle(page, entries)

    async def _held_to_its_cap(self, page: Page) -> tuple[Page, Sequence[SequencedEntry]]:
        """One burst is not the client's fault: it goes on page by page then, as one that is catching up. If the next
        that it gets when it is level again is too much as well, it is cut."""
        if page.more or _bytes(page.entries) > self._cap_bytes:
            behind = await self._read(ALL)
            if behind.reset:
                behind = await self._read(BATCH)
                return behind, behind.entries
            fewer = self._within_cap(behind.entries)
            if fewer is None and self._strained:
                raise TooSlow(f"More than {self._cap_bytes} bytes behind.")
            if fewer is None:
                self._strained, self._live = True, False
                return page, page.entries
            page = behind
        else:
            fewer = page.entries
        self._strained = False
        return page, fewer

    def _settle(self, page: Page, entries: Sequence[SequencedEntry]) -> None:
        if self._fetched is not None:
            self._page = msgspec.structs.replace(self._fetched, entries=())
            self._fetched = None
        self._queue = entries
        if self._whole and not page.ended:
            self._more = False
            return
        self._reset = page.reset
        self._more = page.more
        self._ended = page.ended and not page.more
        if page.reset:
            self._live = False

    def _within_cap(self, entries: Sequence[SequencedEntry]) -> Sequence[SequencedEntry] | None:
        """What of these is within the cap, if need be without superseded partials. One that is level may always have
        the next entry, however large."""
        if _bytes(entries) <= self._cap_bytes or len(entries) == 1:
            return entries
        fewer = coalesced(entries)
        return fewer if len(fewer) == 1 or _bytes(fewer) <= self._cap_bytes else None

    async def _read(self, limit: int) -> Page:
        page = await self._log.read(self._stream, self.sequence, limit)
        if page.abandoned and await self._log.end_abandoned(self._stream, self._lost(page)):
            page = await self._log.read(self._stream, self.sequence, limit)
        self.head = page.head
        return page


def coalesced(entries: Sequence[SequencedEntry]) -> list[SequencedEntry]:
    """Without the partials that a later one of these replaces."""
    replaced: set[str] = set()
    kept = []
    for each in reversed(entries):
        if not (each.partial and each.key in replaced):
            kept.append(each)
        replaced.add(each.key)
    kept.reverse()
    return kept


def _bytes(entries: Sequence[SequencedEntry]) -> int:
    return sum(len(each.body) for each in entries)
