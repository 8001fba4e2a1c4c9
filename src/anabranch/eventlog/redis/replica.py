"""Copies of the streams that other workers write: one per stream, for all of its readers in this process."""

import asyncio
from collections.abc import Callable

from anabranch.domain.errors import AnabranchError, NotFound, StreamFull, StreamUnavailable
from anabranch.domain.eventlog import LogLimits, Page, epoch
from anabranch.eventlog.entries_and_cursors import StreamEntries
from anabranch.eventlog.redis.store import RedisLogTiming, RedisStreamStore, channel
from anabranch.eventlog.redis.writer import OwnedStream, StreamWriter
from anabranch.eventlog.streams import Streams
from anabranch.redis.client import RedisGone
from anabranch.redis.rpc import WorkerRpc

PAGE = 1_000
UNREACHABLE = "The log that the workers share cannot be reached."


class Replica:
    """One stream. Before the first read it is neither present nor missing."""

    __slots__ = ("error", "facts", "loaded", "lock", "reads", "size", "tape", "task", "watches")

    def __init__(self) -> None:
        self.watches = 0
        self.task: asyncio.Task[None] | None = None
        self.tape: StreamEntries | None = None
        self.facts: Page | None = None
        self.error: AnabranchError | None = None
        self.size = 0
        self.reads = 0
        self.loaded = asyncio.Event()
        self.lock = asyncio.Lock()

    def state(self) -> tuple[int, bool, bool, type | None]:
        """What readers are notified of when it changes."""
        head, abandoned = (self.tape.head, bool(self.facts and self.facts.abandoned)) if self.tape else (-1, False)
        return head, bool(self.tape and self.tape.ended), abandoned, type(self.error) if self.error else None


class Replicas:
    """A replica exists while anybody watches a stream that this worker does not write. One task updates it when the
    stream's channel notifies it, and at intervals. Replicas share the memory bound of the `owned` streams."""

    def __init__(
        self,
        store: RedisStreamStore,
        rpc: WorkerRpc,
        owned: Streams[OwnedStream],
        writer: StreamWriter,
        *,
        limits: LogLimits,
        timing: RedisLogTiming,
        changed: Callable[[str], None],
    ) -> None:
        self._store = store
        self._rpc = rpc
        self._owned = owned
        self._writer = writer
        self._limits = limits
        self._timing = timing
        self._changed = changed
        self._replicas: dict[str, Replica] = {}
        self._tasks: set[asyncio.Task[None]] = set()

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
        """Update a replica if the stream is watched and not written here; stop otherwise."""
        replica = self._replicas.get(stream)
        if replica is None:
            return
        if self._owned.get(stream) is not None:
            self._end(replica)
        elif replica.task is None:
            replica.loaded.clear()
            replica.task = asyncio.create_task(self._update(stream, replica))

    async def read(self, stream: str, after: int, limit: int) -> Page | None:
        """None if there is no replica. If the stream is missing or the cursor is not valid here, Redis is read first:
        the reader may come from a worker that is further ahead."""
        replica = self._replicas.get(stream)
        if replica is None or replica.task is None:
            return None
        await replica.loaded.wait()
        tape = replica.tape
        if replica.error or (tape is not None and after and not tape.floor <= after <= tape.head):
            # One read for all who ask at the same time. A caller that is cancelled does not cancel it.
            await asyncio.shield(self._track(asyncio.create_task(self._refresh(stream, replica, replica.reads))))
        if replica.error is not None:
            raise replica.error.__class__(replica.error.message)
        if replica.tape is None or replica.facts is None:
            return None  # This worker owns the stream now, or nobody watches it any more.
        return replica.tape.page(after, limit, replica.facts)

    async def close(self) -> None:
        for replica in self._replicas.values():
            self._end(replica)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def missing(self) -> AnabranchError:
        """The error for a stream that Redis does not have."""
        if self.stable_s() < self._limits.lease_s:
            return StreamUnavailable("Redis was unreachable; the stream may still be restored. Try again.")
        return NotFound("There is no such stream.")

    def stable_s(self) -> float:
        """Seconds since Redis was last found unreachable."""
        return self._store.now() - self.interrupted_at

    @property
    def interrupted_at(self) -> float:
        return max(self._store.interrupted_at, self._rpc.interrupted_at)

    def _end(self, replica: Replica) -> None:
        if replica.task is not None:
            replica.task.cancel()
            self._track(replica.task)
            replica.task = None
            replica.loaded.set()  # Waiting readers read the owned stream, or Redis.
            self._clear(replica, None)

    def _track(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _update(self, stream: str, replica: Replica) -> None:
        with self._rpc.listen(channel(stream)) as notified:
            while True:
                await self._refresh(stream, replica)
                replica.loaded.set()
                ended = replica.tape is not None and replica.tape.ended
                await notified.wait(self._timing.recheck_ended_s if ended else self._timing.recheck_s)

    async def _refresh(self, stream: str, replica: Replica, reads: int | None = None) -> None:
        """Read what is new, unless another read has begun since there were `reads`."""
        async with replica.lock:
            if replica.task is None or (reads is not None and replica.reads > reads):
                return
            replica.reads += 1
            before = replica.state()
            try:
                await self._catch_up(stream, replica)
            except RedisGone:
                replica.error = StreamUnavailable(UNREACHABLE)
            except StreamFull as full:
                self._clear(replica, StreamUnavailable(full.message))
            except (NotFound, StreamUnavailable) as error:
                self._clear(replica, error)
            if replica.state() != before:
                self._changed(stream)

    async def _catch_up(self, stream: str, replica: Replica) -> None:
        tape = replica.tape
        if tape is not None:
            page = await self._read(stream, replica, tape.head)
            while not page.reset and epoch(page.head) == tape.epoch:
                tape.extend(page.entries)
                self._account(replica, tape)
                replica.facts, replica.error = page, None
                if not page.more:
                    return
                page = await self._read(stream, replica, tape.head)
        await self._load(stream, replica)

    async def _load(self, stream: str, replica: Replica) -> None:
        page = await self._read(stream, replica, 0)
        entries = list(page.entries)
        while page.more:
            before = epoch(page.head)
            page = await self._read(stream, replica, entries[-1].sequence, onward=True)
            if epoch(page.head) != before:
                page, entries = await self._read(stream, replica, 0), []
            entries.extend(page.entries)
        tape = StreamEntries.of(entries, page, max_events=self._limits.max_events, max_bytes=self._limits.max_bytes)
        self._account(replica, tape)
        replica.tape, replica.facts, replica.error = tape, page, None

    async def _read(self, stream: str, replica: Replica, after: int, *, onward: bool = False) -> Page:
        page = await self._store.read(stream, after, PAGE, onward=onward)
        if replica.task is None:
            raise StreamUnavailable(UNREACHABLE)  # Nobody needs it any more.
        if page is None:
            raise self.missing()
        return page

    def _clear(self, replica: Replica, error: AnabranchError | None) -> None:
        replica.tape = replica.facts = None
        replica.error = error
        self._account(replica, None)

    def _account(self, replica: Replica, tape: StreamEntries | None) -> None:
        """Count the replica's memory. StreamsFull if it does not fit."""
        size = tape.size if tape is not None else 0
        self._writer.dropped(self._owned.make_room(max(size - replica.size, 0)))
        self._owned.replica_bytes += size - replica.size
        replica.size = size
