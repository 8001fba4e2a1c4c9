"""The streams of a log in memory, and what wakes their readers."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import takewhile
from typing import Generic, TypeVar

from anabranch.domain.errors import StreamsFull
from anabranch.domain.eventlog import LogLimits, Page, SequencedEntry
from anabranch.domain.model import Value
from anabranch.eventlog.cursors import StreamEntries


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

    def drop_ended(self, before: float) -> list[S]:
        """Drop the streams that ended before a time; returns them."""
        return [stream for stream in list(self._ended.values()) if stream.due <= before and self.drop(stream)]

    def abandoned(self, now: float) -> list[S]:
        """Streams whose lease has expired."""
        return list(takewhile(lambda stream: stream.due <= now, self._live.values()))
