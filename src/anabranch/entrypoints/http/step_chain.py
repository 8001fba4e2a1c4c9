"""Reads consecutive steps as one stream: where a step's end names the next step, the stream continues there."""

import asyncio
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

import msgspec

from anabranch.app.planner import Planner
from anabranch.domain.errors import NotFound
from anabranch.domain.eventlog import Page, SequencedEntry
from anabranch.entrypoints.http.planner_wire import next_step
from anabranch.eventlog.reader import Batch, StreamReader

POLL_S = 0.25
# Owner, session and step.
Place = tuple[str, str, str]


class Arrivals:
    """Waits for steps that do not exist yet: one polling task for all that wait for the same step."""

    def __init__(self) -> None:
        self._polls: dict[Place, asyncio.Task[None]] = {}
        self._waiting: dict[Place, int] = {}

    async def wait(self, planner: Planner, place: Place, wait_s: float) -> bool:
        """Whether the step was started within this time."""
        poll = self._polls.get(place)
        if poll is None:
            poll = self._polls[place] = asyncio.create_task(_poll(planner, place))
        self._waiting[place] = self._waiting.get(place, 0) + 1
        try:
            done, _ = await asyncio.wait({poll}, timeout=wait_s)
        finally:
            self._waiting[place] -= 1
            if not self._waiting[place]:
                del self._waiting[place]
                poll.cancel()
            if (poll.done() or place not in self._waiting) and self._polls.get(place) is poll:
                del self._polls[place]
        if done:
            poll.result()
        return bool(done)


class Chain:
    """A reader of a step and of the steps that follow it. The sequences of a later step are shifted by the last one
    of the previous step, so they continue to count, and a cursor after a step's end is one of the next step. If a
    cursor is not valid, everything is read again from the first step. `over`: nothing follows the cursor."""

    def __init__(self, planner: Planner, arrivals: Arrivals, place: Place, after: int) -> None:
        self.over = False
        self._planner = planner
        self._arrivals = arrivals
        self._session = place[:2]
        self._first = self._step = place[2]
        # The cursor within the step that is read or awaited.
        self._after = after
        self._shift = 0
        self._passed: list[str] = []
        self._reader: StreamReader | None = None
        self._page: Page | None = None
        self._reset = False
        self._open_readers = AsyncExitStack()

    async def __aenter__(self) -> Self:
        reader: StreamReader | None = await self._open()
        try:
            while reader is not None and reader.page.ended and self._after >= reader.page.head:
                following = self._following(await self._final(reader.page.head))
                if following is None:
                    self.over = self._after == reader.page.head
                    break
                await self._advance(reader.page.head, following, self._after - reader.page.head)
                reader = await self._open_if_exists()
        except BaseException:
            await self._open_readers.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._open_readers.aclose()

    @property
    def page(self) -> Page:
        """The first page of the step that was opened last."""
        assert self._page is not None, "a chain is entered before it is read"
        return self._page

    @property
    def head(self) -> int:
        return self._shift + (self._reader.head if self._reader is not None else 0)

    async def next(self, wait_s: float) -> Batch | None:
        """New events, or None if there were none within this time. Raises NotFound once the step before the awaited one
        has expired."""
        reader = self._reader
        if reader is None:
            if not await self._arrivals.wait(self._planner, (*self._session, self._step), wait_s):
                await self._planner.page(*self._session, self._passed[-1], 0, 1)
                return None
            reader = await self._open()
        batch = await reader.next(wait_s)
        if batch is None:
            return None
        if batch.reset and self._shift:
            reader = await self._restart()
            batch = await reader.next(wait_s)
            if batch is None:
                return None
        shift, reset = self._shift, self._reset
        self._reset = False
        following = self._following(batch.entries[-1]) if batch.ended and batch.entries else None
        if following is not None:
            await self._advance(batch.entries[-1].sequence, following, 0)
        if not shift and not reset and following is None:
            return batch
        return Batch(
            entries=tuple(_shifted(entry, shift) for entry in batch.entries) if shift else batch.entries,
            head=batch.head + shift,
            reset=batch.reset or reset,
            ended=batch.ended and following is None,
        )

    def _following(self, final: SequencedEntry) -> str | None:
        """The next step, unless it was read already: that would be a cycle."""
        following = next_step(final)
        return None if following is None or following in (*self._passed, self._step) else following

    async def _final(self, head: int) -> SequencedEntry:
        """The last event of the current step."""
        page = await self._planner.page(*self._session, self._step, head - 1, 1)
        return page.entries[-1]

    async def _open(self) -> StreamReader:
        reader = await self._planner.reader(*self._session, self._step, self._after)
        self._reader = await self._open_readers.enter_async_context(reader)
        self._page = reader.page
        return reader

    async def _open_if_exists(self) -> StreamReader | None:
        try:
            return await self._open()
        except NotFound:
            return None

    async def _advance(self, final: int, following: str, after: int) -> None:
        await self._open_readers.aclose()
        self._reader = None
        self._passed.append(self._step)
        self._step, self._after = following, after
        self._shift += final

    async def _restart(self) -> StreamReader:
        await self._open_readers.aclose()
        self._reader = None
        self._passed.clear()
        self._step, self._after, self._shift = self._first, 0, 0
        self._reset = True
        return await self._open()


def _shifted(entry: SequencedEntry, by: int) -> SequencedEntry:
    return msgspec.structs.replace(entry, sequence=entry.sequence + by)


async def _poll(planner: Planner, place: Place) -> None:
    while True:
        try:
            await planner.page(*place, 0, 1)
        except NotFound:
            await asyncio.sleep(POLL_S)
        else:
            return
