"""Streams that other workers write, as this one's readers see them: one copy of each, however many read it."""

import asyncio
from collections.abc import Callable

from anabranch.domain.errors import AnabranchError, NotFound, StreamFull, StreamUnavailable
from anabranch.domain.eventlog import Page, SequencedEntry, epoch
from anabranch.eventlog.redis.store import RedisStreamStore, StreamSlice, channel
from anabranch.eventlog.tape import Tape
from anabranch.redis.client import RedisGone
from anabranch.redis.rpc import WorkerRpc

# A message can get lost, and that a worker has died is told by nobody.
LOOK_EVERY_S = 1.0
LOOK_AFTER_END_S = 15.0
PAGE = 1_000

UNREACHABLE = "The log that the workers share cannot be reached."


class Replica:
    """One stream. Until the first look it is neither there nor missing."""

    __slots__ = ("facts", "lock", "looked", "looks", "size", "tape", "task", "trouble", "watches")

    def __init__(self) -> None:
        self.watches = 0
        self.task: asyncio.Task[None] | None = None
        self.tape: Tape | None = None
        self.facts: StreamSlice | None = None
        self.trouble: AnabranchError | None = None
        self.size = 0
        self.looks = 0
        self.looked = asyncio.Event()
        self.lock = asyncio.Lock()

    def shown(self) -> tuple[int, bool, bool, type | None]:
        """What readers would want to know of if it changes."""
        head, abandoned = (self.tape.head, bool(self.facts and self.facts.abandoned)) if self.tape else (-1, False)
        return head, bool(self.tape and self.tape.ended), abandoned, type(self.trouble) if self.trouble else None


class Replicas:
    """A replica is there while somebody watches a stream that is not written here. One task keeps it: it is woken by
    the stream's channel, and looks by itself now and then."""

    def __init__(
        self,
        remote: RedisStreamStore,
        post: WorkerRpc,
        *,
        max_events: int,
        max_bytes: int,
        ours: Callable[[str], bool],
        missing: Callable[[], AnabranchError],
        resized: Callable[[int], None],
        changed: Callable[[str], None],
    ) -> None:
        self._remote = remote
        self._post = post
        self._max_events = max_events
        self._max_bytes = max_bytes
        self._ours = ours
        self._missing = missing
        self._resized = resized
        self._changed = changed
        self._replicas: dict[str, Replica] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._replicas)

    def enter(self, stream: str) -> None:
        self._replicas.setdefault(stream, Replica()).watches += 1
        self.follow(stream)

    def leave(self, stream: str) -> None:
        replica = self._replicas[stream]
        replica.watches -= 1
        if not replica.watches:
            del self._replicas[stream]
            self._end(replica)

    def follow(self, stream: str) -> None:
        """Keep a replica if it is watched and not written here, and none otherwise."""
        replica = self._replicas.get(stream)
        if replica is None:
            return
        if self._ours(stream):
            self._end(replica)
        elif replica.task is None:
            replica.looked.clear()
            replica.task = asyncio.create_task(self._keep(stream, replica))

    async def read(self, stream: str, after: int, limit: int) -> Page | None:
        """None if no replica is kept. A stream that is missing here and a cursor that means nothing here may mean
        something to Redis: the reader may come from a worker that knows more already."""
        replica = self._replicas.get(stream)
        if replica is None or replica.task is None:
            return None
        await replica.looked.wait()
        tape = replica.tape
        if replica.trouble or (tape is not None and after and not tape.floor <= after <= tape.head):
            await self._look_again(stream, replica)
        if replica.trouble is not None:
            raise replica.trouble.__class__(replica.trouble.message)
        tape, facts = replica.tape, replica.facts
        if tape is None or facts is None:
            return None  # It has just become ours, or nobody watches it any more.
        entries, reset, more = tape.read(after, limit)
        return Page(
            entries=entries,
            head=tape.head,
            reset=reset,
            more=more,
            ended=tape.ended,
            identity=facts.identity,
            about=facts.about,
            keeper=facts.keeper,
            abandoned=facts.abandoned and not tape.ended,
        )

    async def close(self) -> None:
        for replica in self._replicas.values():
            self._end(replica)
        await asyncio.gather(*self._leaving, return_exceptions=True)

    def _end(self, replica: Replica) -> None:
        if replica.task is not None:
            replica.task.cancel()
            self._leaving.add(replica.task)
            replica.task.add_done_callback(self._leaving.discard)
            replica.task = None
            replica.looked.set()  # Whoever still waits reads elsewhere.
            self._forget(replica, None)

    async def _keep(self, stream: str, replica: Replica) -> None:
        with self._post.listen(channel(stream)) as chime:
            while True:
                await self._look(stream, replica)
                replica.looked.set()
                ended = replica.tape is not None and replica.tape.ended
                await chime.wait(LOOK_AFTER_END_S if ended else LOOK_EVERY_S)

    async def _look_again(self, stream: str, replica: Replica) -> None:
        """Once for all who ask at the same time, and whoever stops waiting stops nobody else's look."""
        look = asyncio.create_task(self._look(stream, replica, replica.looks))
        self._leaving.add(look)
        look.add_done_callback(self._leaving.discard)
        await asyncio.shield(look)

    async def _look(self, stream: str, replica: Replica, looks: int | None = None) -> None:
        """Unless another look has begun since there were so many."""
        async with replica.lock:
            if replica.task is None or (looks is not None and replica.looks > looks):
                return
            replica.looks += 1
            before = replica.shown()
            try:
                await self._caught_up(stream, replica)
            except RedisGone:
                replica.trouble = StreamUnavailable(UNREACHABLE)
            except StreamFull as full:
                self._forget(replica, StreamUnavailable(full.message))
            except (NotFound, StreamUnavailable) as trouble:
                self._forget(replica, trouble)
            if replica.shown() != before:
                self._changed(stream)

    async def _caught_up(self, stream: str, replica: Replica) -> None:
        tape = replica.tape
        if tape is None:
            await self._load(stream, replica)
            return
        part = await self._part(stream, replica, tape.head)
        while not part.reset and epoch(part.head) == tape.epoch:
            tape.extend(part.entries)
            replica.facts, replica.trouble = part, None
            self._fit(replica, tape)
            if not part.more:
                return
            part = await self._part(stream, replica, tape.head)
        await self._load(stream, replica)

    async def _load(self, stream: str, replica: Replica) -> None:
        entries: list[SequencedEntry] = []
        part = await self._part(stream, replica, 0)
        entries.extend(part.entries)
        while part.more:
            before = epoch(part.head)
            part = await self._part(stream, replica, entries[-1].sequence, onward=True)
            if epoch(part.head) != before:
                part, entries = await self._part(stream, replica, 0), []
            entries.extend(part.entries)
        tape = Tape.of(
            entries, part.head, part.floor, part.ended, max_events=self._max_events, max_bytes=self._max_bytes
        )
        self._fit(replica, tape)
        replica.tape, replica.facts, replica.trouble = tape, part, None

    async def _part(self, stream: str, replica: Replica, after: int, *, onward: bool = False) -> StreamSlice:
        part = await self._remote.part(stream, after, PAGE, onward=onward)
        if replica.task is None:
            raise StreamUnavailable(UNREACHABLE)  # Nobody needs it any more.
        if part is None:
            raise self._missing()
        return part

    def _forget(self, replica: Replica, trouble: AnabranchError | None) -> None:
        replica.tape = replica.facts = None
        replica.trouble = trouble
        self._fit(replica, None)

    def _fit(self, replica: Replica, tape: Tape | None) -> None:
        size = tape.size if tape is not None else 0
        self._resized(size - replica.size)
        replica.size = size
