"""The streams of a log in memory, and what wakes their readers."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import takewhile
from typing import Generic, NoReturn, TypeVar

from anabranch.domain.errors import StreamsFull
from anabranch.domain.eventlog import LogLimits, Page, SequencedEntry
from anabranch.domain.model import Value
from anabranch.domain.shares import Claimant, claimant
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
    """One stream in this process, of the caller whose request opens it. `due` is when its lease expires; once it has
    ended, when it ended. Only a stream that is `shared` may be evicted before its time."""

    __slots__ = ("caller", "due", "owner", "shared", "size", "tape")

    def __init__(self, owner: StreamOwner, tape: StreamEntries, due: float) -> None:
        self.caller = claimant.get()
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
T = TypeVar("T")


class CallerStreams(Generic[S]):
    """What one caller's streams use, and those that have ended, the oldest first."""

    __slots__ = ("bytes_held", "ended", "live")

    def __init__(self) -> None:
        self.bytes_held = self.live = 0
        self.ended: OrderedDict[str, S] = OrderedDict()


class Streams(Generic[S]):
    """Streams by name, within what all of them and those of one caller may use. `replica_bytes` is memory that replicas
    use of the first bound."""

    def __init__(self, limits: LogLimits) -> None:
        self._ttl_s = limits.ttl_s
        self._memory_bytes = limits.memory_bytes
        self._limit = limits.of_caller
        self._bytes = 0
        self._callers: dict[str, CallerStreams[S]] = {}
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

    def held_by(self, caller: Claimant) -> int:
        """The bytes of this caller's streams."""
        callers = self._callers.get(caller.name)
        return callers.bytes_held if callers is not None else 0

    def add(self, stream: S) -> None:
        self._live[stream.owner.stream] = stream
        self._callers.setdefault(stream.caller.name, CallerStreams()).live += 1
        self._count(stream, stream.size)

    def drop(self, stream: S) -> bool:
        """Whether it was still there."""
        name = stream.owner.stream
        if self.get(name) is not stream:
            return False
        callers = self._callers[stream.caller.name]
        if name in self._live:
            _remove(self._live, name)
            callers.live -= 1
        else:
            _remove(self._ended, name)
            _remove(callers.ended, name)
        self._count(stream, -stream.size)
        if not callers.live and not callers.ended:
            _remove(self._callers, stream.caller.name)
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
            callers = self._callers[stream.caller.name]
            callers.live -= 1
            self._ended[stream.owner.stream] = callers.ended[stream.owner.stream] = stream
        return trimmed

    def resized(self, stream: S) -> None:
        grown = stream.owner.size + stream.tape.size - stream.size
        stream.size += grown
        if self.get(stream.owner.stream) is stream:
            self._count(stream, grown)

    def missing(self, size: int, caller: Claimant | None) -> float:
        """How many bytes must be freed before `size` more fit, of this caller if there is one."""
        return max(self._missing(size), self._missing_of(caller, size)) if size else 0

    def make_room(self, size: int, caller: Claimant | None = None) -> list[S]:
        """Evict ended streams, the oldest first, until `size` fits: the caller's own if it is over its limit, then
        anyone's. Returns them. StreamsFull if all would not do."""
        if self.missing(size, caller) <= 0:
            return []
        evicted: list[S] = []
        if caller is not None and (missing := self._missing_of(caller, size)) > 0:
            own = self._callers.get(caller.name)
            evicted, missing = _oldest(own.ended.values() if own is not None else (), missing)
            if missing > 0:
                self._refuse(caller)
        freed = sum(stream.size for stream in evicted)
        others = (stream for stream in self._ended.values() if stream not in evicted)
        found, missing = _oldest(others, self._missing(size) - freed)
        if missing > 0:
            raise StreamsFull("This process holds all the streams that it may; come again later.")
        return [stream for stream in (*evicted, *found) if self.drop(stream)]

    def _missing(self, size: int) -> int:
        return self.bytes_held + size - self._memory_bytes

    def _missing_of(self, caller: Claimant | None, size: int) -> float:
        return self.held_by(caller) + size - self._limit.of(caller) if caller is not None else 0

    def _refuse(self, caller: Claimant) -> NoReturn:
        limit, bound = self._limit, self._limit.of(caller)
        raise StreamsFull(
            f"You have reached your limit of {bound:,.0f} {limit.unit} of {limit.description} ({limit.setting}). Try "
            "again when some of your answers and steps have ended.",
            limit=limit.name,
            allowed=round(bound),
        )

    def _count(self, stream: S, size: int) -> None:
        self._bytes += size
        self._callers[stream.caller.name].bytes_held += size

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


def _oldest(ended: Iterable[S], missing: float) -> tuple[list[S], float]:
    """The oldest streams that free so many bytes, and how many they do not free."""
    found = []
    for stream in ended:
        if missing <= 0:
            break
        if stream.shared:
            found.append(stream)
            missing -= stream.size
    return found, missing


def _remove(table: dict[str, T], name: str) -> None:
    del table[name]
    if not table:
        table.clear()  # A dict keeps the size that it once had until it is cleared.
