"""The event log that all workers share through Redis: writes this worker's streams, and reads those of all workers
through replicas."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress

import msgspec

from anabranch.domain.contracts import Clock, Watch
from anabranch.domain.errors import AnabranchError, Conflict, LeaseLost, NotFound, StreamFull, StreamUnavailable
from anabranch.domain.eventlog import EPOCH, Entry, LogLimits, Page, epoch
from anabranch.domain.shares import claimant
from anabranch.eventlog.cursors import StreamEntries
from anabranch.eventlog.redis.store import RedisLogTiming, RedisStreamStore, Verdict, channel
from anabranch.eventlog.redis.writer import OwnedStream, StreamWriter
from anabranch.eventlog.streams import EXISTS, NOT_OWNED, StreamOwner, Streams, Watchers
from anabranch.redis.client import Redis, RedisGone
from anabranch.redis.rpc import WorkerRpc

PAGE = 1_000
# The reply of the worker that owns a lost stream.
OWNED = b"owned"
UNREACHABLE = "Redis (AGGREGATOR_REDIS_URL), which holds the streams of all workers, cannot be reached."


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
        facts = replica.facts
        return replica.tape.page(
            after, limit, identity=facts.identity, about=facts.about, keeper=facts.keeper, abandoned=facts.abandoned
        )

    async def close(self) -> None:
        for replica in self._replicas.values():
            self._end(replica)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def page(self, stream: str, after: int, limit: int, *, onward: bool = False) -> Page:
        """From Redis. It may have lost the stream without losing a connection: it was emptied, has evicted or expired
        keys. So all workers are asked before a stream counts as missing, and its owner restores it."""
        page = await self._store.read(stream, after, limit, onward=onward)
        if page is None:
            owned = self._rpc.up and OWNED in await self._rpc.ask_all(stream.encode("utf-8", "surrogatepass"))
            page = await self._store.read(stream, after, limit, onward=onward) if owned else None
            if page is None:
                raise StreamUnavailable("The stream is being restored. Try again.") if owned else self.missing()
        return page

    def missing(self) -> AnabranchError:
        """The error for a stream that neither Redis nor another worker has."""
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
        page = await self.page(stream, after, PAGE, onward=onward)
        if replica.task is None:
            raise StreamUnavailable(UNREACHABLE)  # Nobody needs it any more.
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


AT_ONCE = 32
# Ranges of random epochs; writer.py says why. Owners count up from theirs and never get from one range to the next. The
# epochs are small enough for the sequences of a hundred consecutive steps to be added up below LAST.
REOPENED_EPOCHS = range(2**10, 2**14)
ENDED_EPOCHS = range(2**15, 2**16)


class RedisLog:
    """An EventLog. While Redis is unreachable, this worker's streams continue for readers in this process. No stream
    can be opened then, and those of other workers cannot be read."""

    def __init__(
        self,
        redis: Redis,
        rpc: WorkerRpc,
        *,
        worker: str,
        clock: Clock,
        limits: LogLimits,
        timing: RedisLogTiming = RedisLogTiming(),
    ) -> None:
        self._rpc = rpc
        self._worker = worker
        self._clock = clock
        self._limits = limits
        self._timing = timing
        self._restore_s = min(timing.restore_s, limits.lease_s)
        self._watchers = Watchers()
        self._store = RedisStreamStore(redis, worker=worker, clock=clock, limits=limits)
        self.streams: Streams[OwnedStream] = Streams(limits)
        self._writer = StreamWriter(self._store, self.streams, clock=clock, limits=limits, changed=self._notify)
        self._replicas = Replicas(
            self._store,
            rpc,
            self.streams,
            self._writer,
            limits=limits,
            timing=timing,
            changed=self._watchers.notify,
        )
        # Tokens of streams whose opening has no owner: Redis did not answer, or the caller was cancelled.
        self._to_undo: dict[str, str] = {}
        self._opening: set[asyncio.Task[str]] = set()
        self._repairing: asyncio.Task[None] | None = None
        self._waited_for_restores = False

    def start(self) -> None:
        self._rpc.handle_all(self._restore)
        self._repairing = asyncio.create_task(self._repair())

    async def close(self) -> None:
        """Finish the writes in progress. After that the leases of this worker's streams expire."""
        if self._repairing is not None:
            self._repairing.cancel()
        tasks = [*(stream.writing for stream in self.streams), *self._opening, self._repairing]
        await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)
        await self._replicas.close()

    async def open(self, stream: str, *, identity: str, about: bytes = b"") -> str:
        if self._own(stream) is not None:
            raise Conflict(EXISTS)
        owner = StreamOwner(stream=stream, token=secrets.token_hex(16), identity=identity, about=about)
        self._writer.dropped(self.streams.make_room(owner.size, claimant.get()))
        if not self._store.redis.reachable or self._replicas.stable_s() < self._restore_s:
            raise StreamUnavailable(UNREACHABLE)
        await self._wait_for_restores()
        opening = asyncio.create_task(self._open(owner))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(lambda _: self._undo(owner))
            raise

    async def append(self, stream: str, token: str, entries: Sequence[Entry]) -> Sequence[int]:
        owned = self._own(stream)
        if owned is None:
            with suppress(RedisGone):
                if await self._store.known(stream) is None:
                    raise self._replicas.missing()
        if owned is None or token != owned.owner.token or owned.tape.ended:
            raise LeaseLost(NOT_OWNED)
        return await self._writer.append(owned, entries)

    async def read(self, stream: str, after: int, limit: int) -> Page:
        owned = self._own(stream)
        if owned is None:
            await self._wait_for_restores()
            try:
                if (page := await self._replicas.read(stream, after, limit)) is not None:
                    return page
                if (owned := self._own(stream)) is None:
                    return await self._read_page(stream, after, limit)
            except RedisGone as gone:
                raise StreamUnavailable(UNREACHABLE) from gone
        return owned.page(after, limit, keeper=self._worker, now=self._clock.monotonic())

    @asynccontextmanager
    async def watch(self, stream: str) -> AsyncIterator[Watch]:
        async with self._watchers.watch(stream) as watch:
            self._replicas.enter(stream)
            try:
                yield watch
            finally:
                self._replicas.leave(stream)

    async def end_abandoned(self, stream: str, last: Entry) -> bool:
        if (owned := self._own(stream)) is not None:
            with suppress(LeaseLost):
                abandoned = owned.writing is None and owned.abandoned(self._clock.monotonic())
                return abandoned and any(await self._writer.append(owned, [last]))
            return False
        try:
            verdict = await self._end_other(stream, last)
        except RedisGone as gone:
            raise StreamUnavailable(UNREACHABLE) from gone
        if verdict == "absent":
            raise self._replicas.missing()
        return verdict == "buried"

    def tend(self) -> None:
        """Free the memory of expired streams. Redis expires them by itself."""
        self._writer.dropped(self.streams.drop_expired(self._clock.monotonic()))

    def forget_ended(self, ended_for_s: float) -> int:
        """Drop this worker's copies of streams that ended at least that long ago; returns how many. Those in Redis are
        dropped with `store.forget_ended`."""
        gone = self.streams.drop_ended(self._clock.monotonic() - ended_for_s)
        self._writer.dropped(gone)
        return len(gone)

    async def forget(self, stream: str) -> None:
        """Drop a stream of this worker, also one that is in progress. StreamUnavailable if Redis cannot be reached."""
        found = self.streams.get(stream)
        async with nullcontext() if found is None else found.lock:
            try:
                await self._store.delete(stream)
            except RedisGone as gone:
                raise StreamUnavailable(UNREACHABLE) from gone
            if found is not None and self.streams.drop(found):
                self._writer.dropped([found])

    async def _open(self, owner: StreamOwner) -> str:
        stream = owner.stream
        first_epoch = secrets.choice(REOPENED_EPOCHS) if self._replicas.stable_s() < self._limits.ttl_s else 0
        due = self._clock.monotonic() + self._limits.lease_s
        try:
            verdict = await self._store.open(owner, first_epoch * EPOCH, self._to_undo.get(stream, ""))
        except RedisGone as gone:
            self._to_undo[stream] = owner.token
            raise StreamUnavailable(UNREACHABLE) from gone
        if verdict != "ok":
            raise Conflict(EXISTS)
        self._to_undo.pop(stream, None)
        tape = StreamEntries(max_events=self._limits.max_events, max_bytes=self._limits.max_bytes, epoch=first_epoch)
        self.streams.add(OwnedStream(owner, tape, due))
        self._notify(stream)
        return owner.token

    def _undo(self, owner: StreamOwner) -> None:
        owned = self.streams.get(owner.stream)
        if owned is not None and owned.owner is owner:
            self._to_undo[owner.stream] = owner.token
            self._writer.drop(owned)
            self._writer.detached.set()

    async def _end_other(self, stream: str, last: Entry) -> Verdict:
        since = self._rpc.since
        connected_s = 0.0 if since is None else self._clock.monotonic() - since
        if since is None or min(connected_s, self._replicas.stable_s()) < self._limits.lease_s:
            # The owner may only have been unable to renew its lease.
            return "absent" if await self._store.known(stream) is None else "held"
        return await self._store.end_abandoned(stream, last, secrets.choice(ENDED_EPOCHS))

    async def _read_page(self, stream: str, after: int, limit: int) -> Page:
        """Straight from Redis. As on a tape, a page from the beginning never stops below the floor."""
        first = page = await self._replicas.page(stream, after, limit)
        entries = list(page.entries)
        while page.more and (first.reset or not after) and entries[-1].sequence < page.floor:
            page = await self._replicas.page(stream, entries[-1].sequence, PAGE, onward=True)
            entries.extend(page.entries)
            if epoch(page.head) != epoch(first.head):
                return await self._read_page(stream, after, limit)
        return msgspec.structs.replace(page, entries=tuple(entries), reset=first.reset)

    async def _restore(self, body: bytes) -> bytes:
        """Restore a stream that another worker does not find in Redis, if this worker owns it."""
        stream = body.decode("utf-8", "surrogatepass")
        if (owned := self._own(stream)) is not None:
            await self._writer.restore_lost(owned)
        # It may have learned that another worker owns the stream, or that it was erased.
        return b"" if self._own(stream) is None else OWNED

    def _own(self, stream: str) -> OwnedStream | None:
        owned = self.streams.get(stream)
        if owned is not None and self.streams.expired(owned, self._clock.monotonic()):
            self._writer.drop(owned)
            return None
        return owned

    def _notify(self, stream: str) -> None:
        self._replicas.follow(stream)
        self._watchers.notify(stream)

    async def _wait_for_restores(self) -> None:
        """A worker that starts together with Redis does not know which streams there were. It waits once, while their
        owners restore them."""
        if self._waited_for_restores:
            return
        with suppress(RedisGone):
            await asyncio.sleep(max(0.0, self._restore_s - await self._store.uptime_s()))
            self._waited_for_restores = True

    async def _repair(self) -> None:
        """Notices that Redis is lost or back, and restores this worker's streams there."""
        checked_at = self._replicas.interrupted_at
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._timing.repair_every_s):
                    await self._writer.detached.wait()
            if not self._store.redis.reachable:
                self._store.interrupted()
                await asyncio.sleep(self._timing.repair_every_s)
                continue
            self._writer.detached.clear()
            with suppress(RedisGone):
                interrupted_at = self._replicas.interrupted_at
                abandoned = self.streams.abandoned(self._clock.monotonic())
                await _each(list(self.streams) if interrupted_at > checked_at else abandoned, self._check)
                checked_at = interrupted_at
                await _each([stream for stream in self.streams if not stream.shared], self._writer.restore)
                for stream, token in list(self._to_undo.items()):
                    await self._store.undo(stream, token)
                    if self._to_undo.get(stream) == token:
                        del self._to_undo[stream]
            if not all(stream.shared for stream in self.streams):
                await asyncio.sleep(self._timing.repair_every_s)  # Redis refuses, or is lost again.

    async def _check(self, owned: OwnedStream) -> None:
        """Whether a restarted Redis still has the stream, and this worker still owns it."""
        async with owned.lock:
            if owned.shared:
                owned.shared = await self._store.known(owned.owner.stream) == (owned.owner.token, owned.tape.head)


async def _each(streams: Sequence[OwnedStream], work: Callable[[OwnedStream], Awaitable[None]]) -> None:
    for at in range(0, len(streams), AT_ONCE):
        await asyncio.gather(*(work(stream) for stream in streams[at : at + AT_ONCE]))
