"""The streams that this worker writes, as it holds them itself, and the memory that they take."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from itertools import takewhile

from anabranch.domain.errors import LeaseLost, StreamsFull
from anabranch.domain.eventlog import Entry, Page, SequencedEntry
from anabranch.domain.model import Value
from anabranch.eventlog.redis.store import HeldStream
from anabranch.eventlog.tape import Tape

# What a stream takes besides its names and its entries.
STREAM_BYTES = 2_000


class PendingAppend(Value):
    """Entries that somebody waits for, or waited for."""

    entries: Sequence[Entry]
    done: asyncio.Future[list[int]]


class OwnedStream:
    """One stream. `told` is the highest epoch that Redis may have heard of; while the mirror is `shared`, Redis has
    acknowledged exactly what stands here. `due` is when the lease runs out while it is live, and when it ended after.
    `drops` were trimmed here and not yet there. Whoever has the `lock` talks to Redis about it."""

    __slots__ = ("calls", "drops", "due", "held", "lock", "shared", "size", "tape", "told", "writing")

    def __init__(self, held: HeldStream, tape: Tape, due: float) -> None:
        self.held = held
        self.tape = tape
        self.due = due
        self.told = tape.epoch
        self.shared = True
        self.drops: list[int] = []
        self.calls: deque[PendingAppend] = deque()
        self.writing: asyncio.Task[None] | None = None
        self.lock = asyncio.Lock()
        self.size = STREAM_BYTES + len(held.stream) + len(held.identity) + len(held.about) + tape.size

    def page(self, after: int, limit: int, *, keeper: str, now: float) -> Page:
        entries, reset, more = self.tape.read(after, limit)
        return Page(
            entries=entries,
            head=self.tape.head,
            reset=reset,
            more=more,
            ended=self.tape.ended,
            identity=self.held.identity,
            about=self.held.about,
            keeper=keeper,
            abandoned=self.abandoned(now),
        )

    def abandoned(self, now: float) -> bool:
        return not self.tape.ended and self.due <= now

    def fail(self, error: Exception) -> None:
        while self.calls:
            call = self.calls.popleft()
            if not call.done.done():
                call.done.set_exception(error)


class OwnedStreams:
    """By name. Those that have ended make room for others: Redis still has them. One that is not shared is not given
    up for that. `elsewhere` is what replicas take of the same memory."""

    def __init__(self, *, ttl_s: float, memory_bytes: int) -> None:
        self._ttl_s = ttl_s
        self._memory_bytes = memory_bytes
        self._bytes = 0
        self.elsewhere = 0
        # Every lease and every ttl is equally long: those that are over first always stand first.
        self._live: OrderedDict[str, OwnedStream] = OrderedDict()
        self._ended: OrderedDict[str, OwnedStream] = OrderedDict()

    @property
    def bytes_held(self) -> int:
        return self._bytes + self.elsewhere

    def __len__(self) -> int:
        return len(self._live) + len(self._ended)

    def __iter__(self) -> Iterator[OwnedStream]:
        return iter([*self._live.values(), *self._ended.values()])

    def get(self, stream: str) -> OwnedStream | None:
        return self._live.get(stream) or self._ended.get(stream)

    def add(self, mirror: OwnedStream) -> None:
        self._live[mirror.held.stream] = mirror
        self._bytes += mirror.size

    def drop(self, mirror: OwnedStream) -> bool:
        """Whether it was still there. Nobody appends to it any more."""
        stream = mirror.held.stream
        if self.get(stream) is not mirror:
            return False
        del (self._live if stream in self._live else self._ended)[stream]
        self._bytes -= mirror.size
        mirror.fail(LeaseLost("This stream has ended, or has another owner."))
        return True

    def renew(self, mirror: OwnedStream, due: float) -> None:
        mirror.due = due
        if mirror.held.stream in self._live:
            self._live.move_to_end(mirror.held.stream)

    def write(self, mirror: OwnedStream, recorded: Sequence[SequencedEntry], now: float) -> None:
        before = mirror.tape.size
        mirror.drops.extend(mirror.tape.write(recorded))
        self._resized(mirror, mirror.tape.size - before)
        if mirror.tape.ended and self._live.pop(mirror.held.stream, None) is not None:
            mirror.due = now
            self._ended[mirror.held.stream] = mirror

    def renumber(self, mirror: OwnedStream) -> None:
        """Into an epoch that Redis has never heard of."""
        before = mirror.tape.size
        mirror.tape = mirror.tape.renumbered(mirror.told + 1)
        mirror.drops.clear()
        self._resized(mirror, mirror.tape.size - before)

    def make_room(self, size: int) -> list[OwnedStream]:
        """Which are given up so that there is room; nothing is if not even all of them would be enough."""
        missing = self.bytes_held + size - self._memory_bytes
        if missing <= 0 or not size:
            return []
        going = []
        for mirror in self._ended.values():
            if missing <= 0:
                break
            if mirror.shared:
                going.append(mirror)
                missing -= mirror.size
        if missing > 0:
            raise StreamsFull("This process holds all the streams that it may; come again later.")
        return [mirror for mirror in going if self.drop(mirror)]

    def over(self, now: float) -> list[OwnedStream]:
        """Forget those whose time is over, and say which."""
        gone = []
        for streams in (self._live, self._ended):
            while streams and (first := next(iter(streams.values()))).due + self._ttl_s <= now:
                self.drop(first)
                gone.append(first)
        return gone

    def silent(self, now: float) -> list[OwnedStream]:
        """Those that have let their lease run out."""
        return list(takewhile(lambda mirror: mirror.due <= now, self._live.values()))

    def left_s(self, mirror: OwnedStream, now: float) -> float:
        """For how long one that has ended is still kept."""
        return mirror.due + self._ttl_s - now

    def _resized(self, mirror: OwnedStream, grown: int) -> None:
        mirror.size += grown
        if self.get(mirror.held.stream) is mirror:
            self._bytes += grown
