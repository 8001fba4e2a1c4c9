"""The log of one process: streams in memory, each with one owner, forgotten some time after they ended."""

import heapq
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from anabranch.domain.contracts import Clock, Watch
from anabranch.domain.errors import Conflict, LeaseLost, NotFound, StreamsFull
from anabranch.domain.eventlog import Entry, Page, SequencedEntry
from anabranch.eventlog.tape import Tape, weight
from anabranch.eventlog.watch import Watchers

# What a stream takes besides its names and its entries.
STREAM_BYTES = 2_000


class Stream:
    """One stream as its log holds it. `due` is when its lease runs out while it is live, and when it ended after."""

    __slots__ = ("about", "due", "identity", "size", "tape", "token")

    def __init__(self, tape: Tape, *, identity: str, about: bytes, due: float, size: int) -> None:
        self.tape = tape
        self.identity = identity
        self.about = about
        self.token = secrets.token_hex(16)
        self.due = due
        self.size = size


class MemoryLog:
    """An EventLog whose owners and readers are all in this process. What is over is not there any more for anybody who
    asks; `tend` also gives its memory back."""

    def __init__(
        self,
        *,
        clock: Clock,
        worker: str,
        ttl_s: float,
        lease_s: float,
        max_events: int,
        max_bytes: int,
        memory_bytes: int,
    ) -> None:
        self._clock = clock
        self._worker = worker
        self._ttl_s = ttl_s
        self._lease_s = lease_s
        self._max_events = max_events
        self._max_bytes = max_bytes
        self._memory_bytes = memory_bytes
        self._bells = Watchers()
        self._bytes = 0
        self._ended_bytes = 0
        # Those with something to spare.
        self._roomy: dict[str, Tape] = {}
        # Every lease and every ttl is equally long: those that are over first always stand first.
        self._live: OrderedDict[str, Stream] = OrderedDict()
        self._ended: OrderedDict[str, Stream] = OrderedDict()

    @property
    def bytes_held(self) -> int:
        return self._bytes

    def __len__(self) -> int:
        return len(self._live) + len(self._ended)

    async def open(self, stream: str, *, identity: str, about: bytes = b"") -> str:
        if self._known(stream) is not None:
            raise Conflict("There is a stream of that name already.")
        size = STREAM_BYTES + len(stream) + len(identity) + len(about)
        self._make_room(size)
        tape = Tape(max_events=self._max_events, max_bytes=self._max_bytes)
        due = self._clock.monotonic() + self._lease_s
        opened = Stream(tape, identity=identity, about=about, due=due, size=size)
        self._live[stream] = opened
        self._bytes += size
        self._bells.ring(stream)
        return opened.token

    async def append(self, stream: str, token: str, entries: Sequence[Entry]) -> Sequence[int]:
        found = self._found(stream)
        if found.tape.ended or token != found.token:
            raise LeaseLost("This stream has ended, or has another owner.")
        planned = found.tape.plan(entries)
        recorded = [each for each in planned if each is not None]
        if recorded:
            self._make_room(sum(weight(each) for each in recorded if not each.final))
        found.due = self._clock.monotonic() + self._lease_s
        self._live.move_to_end(stream)
        if recorded:
            self._write(stream, found, recorded)
        return [0 if each is None else each.sequence for each in planned]

    async def read(self, stream: str, after: int, limit: int) -> Page:
        found = self._found(stream)
        tape = found.tape
        entries, reset, more = tape.read(after, limit)
        return Page(
            entries=entries,
            head=tape.head,
            reset=reset,
            more=more,
            ended=tape.ended,
            identity=found.identity,
            about=found.about,
            keeper=self._worker,
            abandoned=self._abandoned(found),
        )

    def watch(self, stream: str) -> AbstractAsyncContextManager[Watch]:
        return self._bells.watch(stream)

    async def bury(self, stream: str, last: Entry) -> bool:
        found = self._found(stream)
        if not self._abandoned(found):
            return False
        recorded = [each for each in found.tape.plan([last]) if each is not None]
        self._write(stream, found, recorded)
        return found.tape.ended

    def tend(self) -> None:
        """Forget what is over; the time this takes depends on how much that is, not on how much there is."""
        now = self._clock.monotonic()
        for streams in (self._live, self._ended):
            while streams and next(iter(streams.values())).due + self._ttl_s <= now:
                self._forget(next(iter(streams)))
        for table in (self._live, self._ended, self._roomy):
            if not table:
                # It keeps the size that it once had until it is cleared.
                table.clear()

    def _abandoned(self, stream: Stream) -> bool:
        return not stream.tape.ended and stream.due <= self._clock.monotonic()

    def _known(self, stream: str) -> Stream | None:
        found = self._live.get(stream) or self._ended.get(stream)
        if found is not None and found.due + self._ttl_s <= self._clock.monotonic():
            self._forget(stream)
            return None
        return found

    def _found(self, stream: str) -> Stream:
        if (found := self._known(stream)) is None:
            raise NotFound("There is no such stream.")
        return found

    def _write(self, stream: str, found: Stream, recorded: Sequence[SequencedEntry]) -> None:
        tape = found.tape
        before = tape.size
        tape.write(recorded)
        self._bytes += tape.size - before
        if tape.spare:
            self._roomy[stream] = tape
        if tape.ended:
            found.due = self._clock.monotonic()
            self._ended[stream] = self._live.pop(stream)
            self._ended_bytes += found.size + tape.size
        self._bells.ring(stream)

    def _make_room(self, size: int) -> None:
        """First goes what nobody would miss; then whole streams that have ended, those that ended first before others,
        but not if even all of them would not be enough."""
        if not size:
            return
        while self._bytes + size > self._memory_bytes and self._roomy:
            stream, tape = self._roomy.popitem()
            before = tape.size
            tape.squeeze()
            self._bytes += tape.size - before
            if stream in self._ended:
                self._ended_bytes += tape.size - before
        if self._bytes + size > self._memory_bytes + self._ended_bytes:
            raise StreamsFull("This process holds all the streams that it may; come again later.")
        while self._bytes + size > self._memory_bytes:
            self._forget(next(iter(self._ended)))

    def _forget(self, stream: str) -> None:
        self._roomy.pop(stream, None)
        if (gone := self._live.pop(stream, None)) is None:
            gone = self._ended.pop(stream)
            self._ended_bytes -= gone.size + gone.tape.size
        self._bytes -= gone.size + gone.tape.size
        self._bells.ring(stream)


class MemorySessions:
    """Whose a session is, as long as this process knows it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._held: dict[str, tuple[str, float]] = {}
        # One a session, by when to look at it again; it may have been claimed anew by then.
        self._due: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._held)

    async def claim(self, session: str, identity: str, ttl_s: float) -> bool:
        now = self._clock.monotonic()
        held = self._held.get(session)
        if held is not None and held[0] != identity and held[1] > now:
            return False
        self._held[session] = identity, now + ttl_s
        if held is None:
            heapq.heappush(self._due, (now + ttl_s, session))
        return True

    def tend(self) -> None:
        now = self._clock.monotonic()
        while self._due and self._due[0][0] <= now:
            session = self._due[0][1]
            until = self._held[session][1]
            if until > now:
                heapq.heapreplace(self._due, (until, session))
            else:
                heapq.heappop(self._due)
                del self._held[session]
        if not self._held:
            self._held.clear()
