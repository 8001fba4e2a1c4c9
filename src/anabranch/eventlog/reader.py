"""A reader of a stream: reads from the log as fast as its client takes, and disconnects a client that is too slow."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Self

import msgspec

from anabranch.domain.contracts import EventLog, Telemetry, Watch
from anabranch.domain.eventlog import Entry, Page, SequencedEntry
from anabranch.domain.signals import StreamClients

BATCH = 100
ALL = 2**31 - 1


class TooSlow(Exception):
    """A client reads more slowly than the stream grows. It may reconnect with its cursor."""


class StreamReaders:
    """Counts the readers of this process for telemetry."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._count = 0

    def add(self, more: int) -> None:
        self._count += more
        self._telemetry.noted(StreamClients(clients=self._count))


class StreamReader:
    """`sequence` is the cursor after what was returned, `head` the latest known sequence. It always reads after its
    cursor, so there are neither gaps nor duplicates. Once it has reached the head it is live. If a live reader falls
    more than `cap_bytes` behind, superseded partials are skipped; if that is not enough twice in a row, it raises
    TooSlow. A reader that is catching up never does. What it has read and not returned is one page of the log or at
    most the cap.

    `held` says whether this process writes the stream: then an expired lease only means that the process is busy.

    With `whole` it returns nothing before the stream has ended, and then all of it without superseded partials.

    `page` is the first page, as it was on entering; without its entries once the first of them were returned."""

    page: Page
    _watch: Watch
    _leaving: AsyncExitStack

    def __init__(
        self,
        log: EventLog,
        stream: str,
        after: int,
        *,
        cap_bytes: int,
        lost: Callable[[Page], Entry],
        held: Callable[[], bool] = lambda: False,
        readers: StreamReaders | None = None,
        whole: bool = False,
        batch: int = BATCH,
    ) -> None:
        self.sequence = after
        self.head = 0
        self._log = log
        self._stream = stream
        self._cap_bytes = cap_bytes
        self._lost = lost
        self._held = held
        self._readers = readers
        self._whole = whole
        self._batch = batch
        # The page that was read but not queued yet; then the queue, of which entries from `_next` on are not returned
        # yet.
        self._fetched: Page | None = None
        self._queue: Sequence[SequencedEntry] = ()
        self._next = 0
        self._reset = False
        self._more = True
        self._ended = False
        self._live = False
        self._exceeded = False

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as leaving:
            self._watch = await leaving.enter_async_context(self._log.watch(self._stream))
            self._fetched = self.page = await self._read(self._batch)
            if self._readers is not None:
                self._readers.add(1)
                leaving.callback(self._readers.add, -1)
            self._leaving = leaving.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._leaving.aclose()

    async def next(self, wait_s: float) -> Page | None:
        """New entries, or None if there are none within `wait_s`. With `reset` they start a snapshot and the client
        discards what it had; with `ended` they are the last. After the end always an empty page."""
        until = asyncio.get_running_loop().time() + wait_s
        # If the last page was not the end of what is known, read before waiting.
        behind = self._fetched is not None or self._reset or self._next < len(self._queue) or self._more or self._ended
        if behind and (batch := await self._next_batch()) is not None:
            return batch
        while True:
            try:
                async with asyncio.timeout_at(until):
                    await self._watch.changed()
            except TimeoutError:
                # An expired lease notifies nobody, so read after the wait, too.
                return await self._next_batch()
            if (batch := await self._next_batch()) is not None:
                return batch

    async def _next_batch(self) -> Page | None:
        """State changes only after the last await, so a cancelled call loses nothing."""
        if self._next >= len(self._queue) and not self._reset and not self._ended:
            await self._fill()
        batch = tuple(self._queue[self._next : self._next + self._batch])
        if not batch and not self._reset and not self._ended:
            self._live = True
            return None
        self._next += len(batch)
        drained = self._next >= len(self._queue)
        if drained:
            self._queue, self._next = (), 0
            self._live = self._live or not self._more
        if batch or self._reset:
            self.sequence = batch[-1].sequence if batch else 0
        reset, self._reset = self._reset, False
        return Page(entries=batch, head=self.head, reset=reset, ended=drained and self._ended)

    async def _fill(self) -> None:
        page = self._fetched or await self._read(self._batch)
        entries: Sequence[SequencedEntry] = page.entries
        if self._whole:
            page = await self._read(ALL) if page.ended else page
            entries = coalesced(page.entries) if page.ended else ()
        elif self._live and not page.reset:
            page, entries = await self._apply_cap(page)
        if self._fetched is not None:
            self.page = msgspec.structs.replace(self._fetched, entries=())
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

    async def _apply_cap(self, page: Page) -> tuple[Page, Sequence[SequencedEntry]]:
        """After one burst the reader catches up page by page. If it exceeds the cap again once it is live, TooSlow."""
        if page.more or _bytes(page.entries) > self._cap_bytes:
            behind = await self._read(ALL)
            if behind.reset:
                behind = await self._read(self._batch)
                return behind, behind.entries
            fewer = self._within_cap(behind.entries)
            if fewer is None and self._exceeded:
                raise TooSlow(f"More than {self._cap_bytes} bytes behind.")
            if fewer is None:
                self._exceeded, self._live = True, False
                return page, page.entries
            page = behind
        else:
            fewer = page.entries
        self._exceeded = False
        return page, fewer

    def _within_cap(self, entries: Sequence[SequencedEntry]) -> Sequence[SequencedEntry] | None:
        """The entries within the cap, without superseded partials if necessary; None if they exceed it. A single entry
        is always allowed."""
        if _bytes(entries) <= self._cap_bytes or len(entries) == 1:
            return entries
        fewer = coalesced(entries)
        return fewer if len(fewer) == 1 or _bytes(fewer) <= self._cap_bytes else None

    async def _read(self, limit: int) -> Page:
        page = await self._log.read(self._stream, self.sequence, limit)
        ended = page.abandoned and not self._held() and await self._log.end_abandoned(self._stream, self._lost(page))
        if ended:
            page = await self._log.read(self._stream, self.sequence, limit)
        self.head = page.head
        return page


def coalesced(entries: Sequence[SequencedEntry]) -> list[SequencedEntry]:
    """The entries without partials that a later entry supersedes."""
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
