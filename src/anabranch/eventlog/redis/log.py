"""The event log that all workers share through Redis: writes this worker's streams, reads those of all."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress

import msgspec

from anabranch.domain.contracts import Clock, Watch
from anabranch.domain.errors import Conflict, LeaseLost, StreamUnavailable
from anabranch.domain.eventlog import EPOCH, Entry, LogLimits, Page, epoch
from anabranch.eventlog.entries_and_cursors import StreamEntries
from anabranch.eventlog.redis.replica import PAGE, UNREACHABLE, Replicas
from anabranch.eventlog.redis.store import RedisLogTiming, RedisStreamStore, Verdict
from anabranch.eventlog.redis.writer import OwnedStream, StreamWriter
from anabranch.eventlog.streams import EXISTS, NOT_OWNED, StreamOwner, Streams, Watchers
from anabranch.redis.client import Redis, RedisGone
from anabranch.redis.rpc import WorkerRpc

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

    def __len__(self) -> int:
        """The number of streams in this process, owned and replicas."""
        return len(self.streams) + len(self._replicas)

    def start(self) -> None:
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
        self._writer.dropped(self.streams.make_room(owner.size))
        if not self._store.reachable or self._replicas.stable_s() < self._restore_s:
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
        first = page = await self._read(stream, after, limit)
        entries = list(page.entries)
        while page.more and (first.reset or not after) and entries[-1].sequence < page.floor:
            page = await self._read(stream, entries[-1].sequence, PAGE, onward=True)
            entries.extend(page.entries)
            if epoch(page.head) != epoch(first.head):
                return await self._read_page(stream, after, limit)
        return msgspec.structs.replace(page, entries=tuple(entries), reset=first.reset)

    async def _read(self, stream: str, after: int, limit: int, *, onward: bool = False) -> Page:
        page = await self._store.read(stream, after, limit, onward=onward)
        if page is None:
            raise self._replicas.missing()
        return page

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
            if not self._store.reachable:
                self._store.interrupted()
                await asyncio.sleep(self._timing.repair_every_s)
                continue
            self._writer.detached.clear()
            with suppress(RedisGone):
                interrupted_at = self._replicas.interrupted_at
                all_streams = interrupted_at > checked_at
                await _each(
                    list(self.streams) if all_streams else self.streams.silent(self._clock.monotonic()), self._check
                )
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
