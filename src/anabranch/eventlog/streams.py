"""The streams of a log in memory: their entries, sequence numbers, bounds and cursors, and what wakes their readers."""

import asyncio
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import takewhile
from operator import attrgetter
from typing import Generic, Self, TypeVar

from anabranch.domain.errors import StreamFull, StreamsFull
from anabranch.domain.eventlog import EPOCH, Entry, LogLimits, Page, SequencedEntry
from anabranch.domain.model import Value

# Memory of an entry besides its key and its body.
ENTRY_BYTES = 200
# Trimming walks the whole tape, so it frees one eighth of the bounds at once.
SLACK = 8

_sequence = attrgetter("sequence")


def weight(entry: Entry) -> int:
    """The bytes that an entry counts for."""
    return ENTRY_BYTES + len(entry.key) + len(entry.body)


def sequenced(entry: Entry, sequence: int) -> SequencedEntry:
    return SequencedEntry(
        sequence=sequence,
        key=entry.key,
        revision=entry.revision,
        body=entry.body,
        partial=entry.partial,
        final=entry.final,
    )


class StreamEntries:
    """Pure: no clock, no waiting. The latest entry under each key is never trimmed, so reading from the beginning gives
    the whole state. `floor` is the highest trimmed sequence that was not a superseded partial: a cursor below it has
    missed something, one at or above it has not. A final entry sets `ended`; later entries change nothing. `size` is
    the tape's bytes, `spare` the part of them that superseded partials use."""

    def __init__(self, *, max_events: int, max_bytes: int, epoch: int = 0) -> None:
        self.epoch = epoch
        self.head = epoch * EPOCH
        self.floor = self.head
        self.ended = False
        self.size = 0
        self.spare = 0
        self._max_events = max_events
        self._max_bytes = max_bytes
        self._entries: list[SequencedEntry] = []
        self._latest: dict[str, SequencedEntry] = {}
        self._latest_size = 0

    @classmethod
    def of(cls, recorded: Iterable[SequencedEntry], page: Page, *, max_events: int, max_bytes: int) -> Self:
        """A copy of another worker's tape, from all of its entries, in order, and the last page of them. Nothing is
        trimmed before `extend`."""
        tape = cls(max_events=max_events, max_bytes=max_bytes, epoch=page.head // EPOCH)
        for each in recorded:
            tape._put(each)
        tape.head = max(page.head, tape.head)
        tape.floor = page.floor
        tape.ended = page.ended or tape.ended
        return tape

    def __len__(self) -> int:
        return len(self._entries)

    def plan(self, entries: Sequence[Entry]) -> list[SequencedEntry | None]:
        """The entries with their sequences, None for a duplicate; changes nothing. StreamFull if the latest of every
        key would exceed the bounds. A final entry always fits."""
        planned: list[SequencedEntry | None] = []
        fresh: dict[str, SequencedEntry] = {}
        head = self.head
        ended = self.ended
        grown = False
        size = self._latest_size
        count = len(self._latest)
        for entry in entries:
            key = entry.key
            last = fresh.get(key) or self._latest.get(key)
            if ended or (last is not None and entry.revision <= last.revision):
                planned.append(None)
                continue
            head += 1
            ended = entry.final
            recorded = sequenced(entry, head)
            planned.append(recorded)
            fresh[key] = recorded
            if ended:
                continue
            grown = True
            size += weight(recorded)
            if last is None:
                count += 1
            else:
                size -= weight(last)
        if grown and (count > self._max_events or size > self._max_bytes):
            raise StreamFull("The stream holds all that it may.")
        return planned

    def write(self, recorded: Iterable[SequencedEntry]) -> tuple[int, ...]:
        """Append planned entries and trim to the bounds; returns the trimmed sequences. Superseded partials go first,
        which invalidates no cursor. Then the oldest superseded entries go, which raises the floor."""
        for each in recorded:
            self._put(each)
        if len(self._entries) <= self._max_events and self.size <= self._max_bytes:
            return ()
        return self._trimmed()

    def squeeze(self) -> tuple[int, ...]:
        """Trim all superseded partials; returns their sequences."""
        return tuple(self._dropped(partial=True, events=0, size=0)) if self.spare else ()

    def extend(self, recorded: Iterable[SequencedEntry]) -> None:
        """Append what another worker has written since, in the same epoch; entries that are here already are skipped.
        If the floor there is above the head here, entries were missed: make a new tape with `of` instead."""
        self.write([each for each in recorded if each.sequence > self.head])

    def read(self, after: int, limit: int) -> tuple[tuple[SequencedEntry, ...], bool, bool]:
        """The entries after a cursor, whether the cursor was reset (then they start at the beginning), and whether
        there are more. A read from the beginning never stops below the floor, even if it exceeds the limit: its last
        sequence would not be a valid cursor."""
        reset = after != 0 and not self.floor <= after <= self.head
        start = 0 if reset or not after else self._index(after)
        stop = start + max(limit, 0)
        if start < stop < len(self._entries) and self._entries[stop - 1].sequence < self.floor:
            stop = self._index(self.floor) + 1
        return tuple(self._entries[start:stop]), reset, stop < len(self._entries)

    def page(self, after: int, limit: int, *, identity: str, about: bytes, keeper: str, abandoned: bool) -> Page:
        """A read as a Page; `abandoned` says that the owner's lease has expired."""
        entries, reset, more = self.read(after, limit)
        return Page(
            entries=entries,
            head=self.head,
            reset=reset,
            more=more,
            ended=self.ended,
            identity=identity,
            about=about,
            keeper=keeper,
            abandoned=abandoned and not self.ended,
            floor=self.floor,
        )

    def renumbered(self, epoch: int) -> "StreamEntries":
        """The latest entry under each key, in order, numbered from 1 in another epoch."""
        tape = StreamEntries(max_events=self._max_events, max_bytes=self._max_bytes, epoch=epoch)
        for each in self._entries:
            if self._latest[each.key] is each:
                tape._put(sequenced(each, tape.head + 1))
        tape.ended = self.ended
        return tape

    def _index(self, after: int) -> int:
        return len(self._entries) if after >= self.head else bisect_right(self._entries, after, key=_sequence)

    def _put(self, recorded: SequencedEntry) -> None:
        size = weight(recorded)
        if (replaced := self._latest.get(recorded.key)) is not None:
            self._latest_size -= weight(replaced)
            if replaced.partial:
                self.spare += weight(replaced)
        self._latest[recorded.key] = recorded
        self._latest_size += size
        self._entries.append(recorded)
        self.size += size
        self.head = recorded.sequence
        if recorded.final:
            self.ended = True

    def _trimmed(self) -> tuple[int, ...]:
        enough_events = self._max_events - self._max_events // SLACK
        enough_bytes = self._max_bytes - self._max_bytes // SLACK
        gone = self._dropped(partial=True, events=enough_events, size=enough_bytes)
        if len(self._entries) > self._max_events or self.size > self._max_bytes:
            replaced = self._dropped(partial=False, events=enough_events, size=enough_bytes)
            self.floor = max([self.floor, *replaced])
            gone += replaced
        return tuple(sorted(gone))

    def _dropped(self, *, partial: bool, events: int, size: int) -> list[int]:
        """Trim superseded entries, either partials or others, oldest first, until the bounds hold; returns their
        sequences."""
        gone: list[int] = []
        kept: list[SequencedEntry] = []
        count = len(self._entries)
        for index, each in enumerate(self._entries):
            if count <= events and self.size <= size:
                kept += self._entries[index:]
                break
            if each.partial is not partial or self._latest[each.key] is each:
                kept.append(each)
                continue
            gone.append(each.sequence)
            count -= 1
            self.size -= weight(each)
            if partial:
                self.spare -= weight(each)
        if gone:
            self._entries = kept
        return gone


class StreamWatch:
    """A Watch. It misses no change while nobody waits for one."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.notify = self._event.set

    async def changed(self) -> None:
        await self._event.wait()
        self._event.clear()


class Watchers:
    """Watches by stream name, whether or not the stream exists."""

    def __init__(self) -> None:
        self._watches: dict[str, set[StreamWatch]] = {}

    @asynccontextmanager
    async def watch(self, stream: str) -> AsyncIterator[StreamWatch]:
        watch, watches = StreamWatch(), self._watches.setdefault(stream, set())
        watches.add(watch)
        try:
            yield watch
        finally:
            watches.discard(watch)
            if not watches:
                del self._watches[stream]

    def notify(self, stream: str) -> None:
        for watch in self._watches.get(stream, ()):
            watch.notify()


# Memory of a stream besides its names and its entries.
STREAM_BYTES = 2_000

NOT_OWNED = "This stream has ended, or has another owner."
EXISTS = "There is a stream of that name already."
NOT_FOUND = "There is no such stream."


class StreamOwner(Value):
    """What is known of a stream from its opening on: the owner's `token`, the `identity` that may read it, and `about`,
    which is stored for its readers."""

    stream: str
    token: str
    identity: str
    about: bytes

    @property
    def size(self) -> int:
        return STREAM_BYTES + len(self.stream) + len(self.identity) + len(self.about)


class Stream:
    """One stream in this process. `due` is when its lease expires; once it has ended, when it ended. Only a stream that
    is `shared` may be evicted before its time."""

    __slots__ = ("due", "owner", "shared", "size", "tape")

    def __init__(self, owner: StreamOwner, tape: StreamEntries, due: float) -> None:
        self.owner = owner
        self.tape = tape
        self.due = due
        self.shared = True
        self.size = owner.size + tape.size

    def page(self, after: int, limit: int, *, keeper: str, now: float) -> Page:
        owner = self.owner
        return self.tape.page(
            after, limit, identity=owner.identity, about=owner.about, keeper=keeper, abandoned=self.due <= now
        )

    def abandoned(self, now: float) -> bool:
        return not self.tape.ended and self.due <= now


S = TypeVar("S", bound=Stream)


class Streams(Generic[S]):
    """Streams by name, within `memory_bytes`. `replica_bytes` is memory that replicas use of the same bound."""

    def __init__(self, limits: LogLimits) -> None:
        self._ttl_s = limits.ttl_s
        self._memory_bytes = limits.memory_bytes
        self._bytes = 0
        self.replica_bytes = 0
        # Leases and times to live are equally long for all streams, so each table is ordered by expiry.
        self._live: OrderedDict[str, S] = OrderedDict()
        self._ended: OrderedDict[str, S] = OrderedDict()

    @property
    def bytes_held(self) -> int:
        return self._bytes + self.replica_bytes

    def __len__(self) -> int:
        return len(self._live) + len(self._ended)

    def __iter__(self) -> Iterator[S]:
        return iter([*self._live.values(), *self._ended.values()])

    def get(self, stream: str) -> S | None:
        return self._live.get(stream) or self._ended.get(stream)

    def add(self, stream: S) -> None:
        self._live[stream.owner.stream] = stream
        self._bytes += stream.size

    def drop(self, stream: S) -> bool:
        """Whether it was still there."""
        name = stream.owner.stream
        if self.get(name) is not stream:
            return False
        streams = self._live if name in self._live else self._ended
        del streams[name]
        if not streams:
            streams.clear()  # A dict keeps the size that it once had until it is cleared.
        self._bytes -= stream.size
        return True

    def renew(self, stream: S, due: float) -> None:
        stream.due = due
        if stream.owner.stream in self._live:
            self._live.move_to_end(stream.owner.stream)

    def write(self, stream: S, recorded: Sequence[SequencedEntry], now: float) -> tuple[int, ...]:
        """Append to the tape; returns the sequences that were trimmed."""
        trimmed = stream.tape.write(recorded)
        self.resized(stream)
        if stream.tape.ended and self._live.pop(stream.owner.stream, None) is not None:
            stream.due = now
            self._ended[stream.owner.stream] = stream
        return trimmed

    def resized(self, stream: S) -> None:
        grown = stream.owner.size + stream.tape.size - stream.size
        stream.size += grown
        if self.get(stream.owner.stream) is stream:
            self._bytes += grown

    def missing(self, size: int) -> int:
        """How many bytes must be freed before `size` more fit."""
        return self.bytes_held + size - self._memory_bytes if size else 0

    def make_room(self, size: int) -> list[S]:
        """Evict ended streams, the oldest first, until `size` fits; returns them. StreamsFull if all would not do."""
        missing = self.missing(size)
        evicted = []
        for stream in self._ended.values():
            if missing <= 0:
                break
            if stream.shared:
                evicted.append(stream)
                missing -= stream.size
        if missing > 0:
            raise StreamsFull("This process holds all the streams that it may; come again later.")
        return [stream for stream in evicted if self.drop(stream)]

    def expired(self, stream: S, now: float) -> bool:
        return stream.due + self._ttl_s <= now

    def drop_expired(self, now: float) -> list[S]:
        """The time this takes depends on how many have expired, not on how many there are."""
        gone = [
            stream
            for streams in (self._live, self._ended)
            for stream in takewhile(lambda stream: self.expired(stream, now), streams.values())
        ]
        return [stream for stream in gone if self.drop(stream)]

    def abandoned(self, now: float) -> list[S]:
        """Streams whose lease has expired."""
        return list(takewhile(lambda stream: stream.due <= now, self._live.values()))
