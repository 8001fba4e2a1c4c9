"""The log that all workers share: written here for the streams of this worker, and read here for those of all."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

from anabranch.domain.contracts import Clock, Watch
from anabranch.domain.errors import AnabranchError, Conflict, LeaseLost, NotFound, StreamUnavailable
from anabranch.domain.eventlog import EPOCH, Entry, Page, epoch
from anabranch.eventlog.redis.owned_streams import STREAM_BYTES, OwnedStream, OwnedStreams
from anabranch.eventlog.redis.replica import PAGE, UNREACHABLE, Replicas
from anabranch.eventlog.redis.store import HeldStream, RedisStreamStore, StreamSlice, Verdict
from anabranch.eventlog.redis.writer import StreamWriter
from anabranch.eventlog.tape import Tape
from anabranch.eventlog.watch import Watchers
from anabranch.redis.client import Redis, RedisGone
from anabranch.redis.rpc import WorkerRpc

MEND_EVERY_S = 0.25
AT_ONCE = 32
# Once Redis is back, owners have this time to bring back their streams before somebody can open one of the same name.
GATHER_S = 2.0
# Epochs that are drawn by lot: keeping.py says why. Owners count on from theirs, and never get from one to the other.
# They are small enough for the sequences of a hundred steps that follow each other to be added up (streams.LAST).
OPENED_ANEW = (2**10, 2**14)
BURIED_ANEW = (2**15, 2**16)


class RedisLog:
    """An EventLog. While Redis is gone, the streams that are written here go on for those who read them here; nothing
    can be opened, and what others write cannot be read."""

    def __init__(
        self,
        redis: Redis,
        post: WorkerRpc,
        *,
        worker: str,
        clock: Clock,
        ttl_s: float,
        lease_s: float,
        max_events: int,
        max_bytes: int,
        memory_bytes: int,
    ) -> None:
        self._post = post
        self._worker = worker
        self._clock = clock
        self._ttl_s = ttl_s
        self._lease_s = lease_s
        self._max_events = max_events
        self._max_bytes = max_bytes
        self._bells = Watchers()
        self._remote = RedisStreamStore(redis, worker=worker, clock=clock, ttl_s=ttl_s, lease_s=lease_s)
        self._mirrors = OwnedStreams(ttl_s=ttl_s, memory_bytes=memory_bytes)
        self._keeper = StreamWriter(self._remote, self._mirrors, clock=clock, lease_s=lease_s, changed=self._news)
        self._replicas = Replicas(
            self._remote,
            post,
            max_events=max_events,
            max_bytes=max_bytes,
            ours=lambda stream: self._mirrors.get(stream) is not None,
            missing=self._missing,
            resized=self._resized,
            changed=self._bells.ring,
        )
        # Streams whose opening nobody has, by their tokens: Redis did not answer, or whoever asked has gone.
        self._unwanted: dict[str, str] = {}
        self._opening: set[asyncio.Task[str]] = set()
        self._mending: asyncio.Task[None] | None = None
        self._gathered = False

    @property
    def bytes_held(self) -> int:
        return self._mirrors.bytes_held

    def __len__(self) -> int:
        """How many streams are held here, one way or the other."""
        return len(self._mirrors) + len(self._replicas)

    def start(self) -> None:
        self._mending = asyncio.create_task(self._mend())

    async def close(self) -> None:
        """What is being written is written; after that this worker's streams are left to their leases."""
        if self._mending is not None:
            self._mending.cancel()
        writing = [mirror.writing for mirror in self._mirrors if mirror.writing is not None]
        tasks = [*writing, *self._opening, *([self._mending] if self._mending else [])]
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._replicas.close()

    async def open(self, stream: str, *, identity: str, about: bytes = b"") -> str:
        if self._mine(stream) is not None:
            raise Conflict("There is a stream of that name already.")
        for given_up in self._mirrors.make_room(STREAM_BYTES + len(stream) + len(identity) + len(about)):
            self._news(given_up.held.stream)
        if not self._remote.reachable or self._calm_s() < min(GATHER_S, self._lease_s):
            raise StreamUnavailable(UNREACHABLE)
        await self._gather()
        held = HeldStream(stream=stream, token=secrets.token_hex(16), identity=identity, about=about)
        opening = asyncio.create_task(self._open(held))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(lambda _: self._unwant(held))
            raise

    async def append(self, stream: str, token: str, entries: Sequence[Entry]) -> Sequence[int]:
        mirror = self._mine(stream)
        if mirror is None:
            with suppress(RedisGone):
                if await self._remote.known(stream) is None:
                    raise self._missing()
            raise LeaseLost("This stream has another owner.")
        if token != mirror.held.token or mirror.tape.ended:
            raise LeaseLost("This stream has ended, or has another owner.")
        return await self._keeper.append(mirror, entries)

    async def read(self, stream: str, after: int, limit: int) -> Page:
        mirror = self._mine(stream)
        if mirror is None:
            await self._gather()
            try:
                page = await self._replicas.read(stream, after, limit)
                if page is not None:
                    return page
                mirror = self._mine(stream)
                if mirror is None:
                    return await self._page(stream, after, limit)
            except RedisGone as gone:
                raise StreamUnavailable(UNREACHABLE) from gone
        return mirror.page(after, limit, keeper=self._worker, now=self._clock.monotonic())

    def watch(self, stream: str) -> AbstractAsyncContextManager[Watch]:
        return self._watch(stream)

    async def bury(self, stream: str, last: Entry) -> bool:
        if (mirror := self._mine(stream)) is not None:
            return await self._bury_mine(mirror, last)
        try:
            verdict = await self._bury(stream, last)
        except RedisGone as gone:
            raise StreamUnavailable(UNREACHABLE) from gone
        if verdict == "absent":
            raise self._missing()
        return verdict == "buried"

    def tend(self) -> None:
        """Forget what is over here; Redis does so by itself."""
        for mirror in self._mirrors.over(self._clock.monotonic()):
            self._news(mirror.held.stream)

    async def _open(self, held: HeldStream) -> str:
        stream = held.stream
        first, end = OPENED_ANEW
        drawn = first + secrets.randbelow(end - first) if self._calm_s() < self._ttl_s else 0
        due = self._clock.monotonic() + self._lease_s
        try:
            verdict = await self._remote.open(held, drawn * EPOCH, self._unwanted.get(stream, ""))
        except RedisGone as gone:
            self._unwanted[stream] = held.token
            raise StreamUnavailable(UNREACHABLE) from gone
        if verdict != "ok":
            raise Conflict("There is a stream of that name already.")
        self._unwanted.pop(stream, None)
        tape = Tape(max_events=self._max_events, max_bytes=self._max_bytes, epoch=drawn)
        self._mirrors.add(OwnedStream(held, tape, due))
        self._news(stream)
        return held.token

    def _unwant(self, held: HeldStream) -> None:
        mirror = self._mirrors.get(held.stream)
        if mirror is not None and mirror.held is held:
            self._unwanted[held.stream] = held.token
            self._keeper.lost(mirror)
            self._keeper.parted.set()

    async def _bury(self, stream: str, last: Entry) -> Verdict:
        now, since = self._clock.monotonic(), self._post.since
        if since is None or min(now - since, self._calm_s()) < self._lease_s:
            # Its owner may only have been unable to say that it lives.
            return "absent" if await self._remote.known(stream) is None else "held"
        first, end = BURIED_ANEW
        return await self._remote.bury(stream, last, first + secrets.randbelow(end - first))

    async def _bury_mine(self, mirror: OwnedStream, last: Entry) -> bool:
        if mirror.writing is not None or not mirror.abandoned(self._clock.monotonic()):
            return False
        try:
            return any(await self._keeper.append(mirror, [last]))
        except LeaseLost:
            return False

    async def _page(self, stream: str, after: int, limit: int) -> Page:
        """Straight from Redis. A page that begins at the beginning never ends below the floor, as on a tape."""
        first = part = await self._part(stream, after, limit)
        entries = list(part.entries)
        beginning = part.reset or not after
        while part.more and beginning and entries[-1].sequence < part.floor:
            part = await self._part(stream, entries[-1].sequence, PAGE, onward=True)
            entries.extend(part.entries)
            if epoch(part.head) != epoch(first.head):
                return await self._page(stream, after, limit)
        return Page(
            entries=tuple(entries),
            head=part.head,
            reset=first.reset,
            more=part.more,
            ended=part.ended,
            identity=part.identity,
            about=part.about,
            keeper=part.keeper,
            abandoned=part.abandoned,
        )

    async def _part(self, stream: str, after: int, limit: int, *, onward: bool = False) -> StreamSlice:
        part = await self._remote.part(stream, after, limit, onward=onward)
        if part is None:
            raise self._missing()
        return part

    @asynccontextmanager
    async def _watch(self, stream: str) -> AsyncIterator[Watch]:
        async with self._bells.watch(stream) as listening:
            self._replicas.enter(stream)
            try:
                yield listening
            finally:
                self._replicas.leave(stream)

    def _mine(self, stream: str) -> OwnedStream | None:
        mirror = self._mirrors.get(stream)
        if mirror is not None and mirror.due + self._ttl_s <= self._clock.monotonic():
            self._keeper.lost(mirror)
            return None
        return mirror

    def _news(self, stream: str) -> None:
        self._replicas.follow(stream)
        self._bells.ring(stream)

    def _resized(self, grown: int) -> None:
        for given_up in self._mirrors.make_room(max(grown, 0)):
            self._news(given_up.held.stream)
        self._mirrors.elsewhere += grown

    @property
    def _shaken_at(self) -> float:
        return max(self._remote.shaken_at, self._post.shaken_at)

    def _calm_s(self) -> float:
        """How long it is since Redis was found to be gone."""
        return self._clock.monotonic() - self._shaken_at

    async def _gather(self) -> None:
        """A worker that starts beside a Redis which has just started, too, has not seen what was there before: it waits
        a moment, once, in which owners bring back what they have."""
        if self._gathered:
            return
        with suppress(RedisGone):
            await asyncio.sleep(max(0.0, min(GATHER_S, self._lease_s) - await self._remote.uptime_s()))
            self._gathered = True

    def _missing(self) -> AnabranchError:
        if self._calm_s() < self._lease_s:
            return StreamUnavailable("The log that the workers share was gone; its streams may still come back.")
        return NotFound("There is no such stream.")

    async def _mend(self) -> None:
        """Notices that Redis goes and comes, and brings back what belongs there."""
        checked_at = self._shaken_at
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(MEND_EVERY_S):
                    await self._keeper.parted.wait()
            if not self._remote.reachable:
                self._remote.shaken()
                await asyncio.sleep(MEND_EVERY_S)
                continue
            self._keeper.parted.clear()
            with suppress(RedisGone):
                shaken_at = self._shaken_at
                await self._each(
                    list(self._mirrors) if shaken_at > checked_at else self._mirrors.silent(self._clock.monotonic()),
                    self._check,
                )
                checked_at = shaken_at
                await self._each([mirror for mirror in self._mirrors if not mirror.shared], self._keeper.restore)
                for stream, token in list(self._unwanted.items()):
                    await self._remote.undo(stream, token)
                    if self._unwanted.get(stream) == token:
                        del self._unwanted[stream]
            if not all(mirror.shared for mirror in self._mirrors):
                await asyncio.sleep(MEND_EVERY_S)  # Redis refuses, or it is gone again: no hurry.

    async def _check(self, mirror: OwnedStream) -> None:
        """Whether a restarted Redis still has it, or another worker has buried it."""
        async with mirror.lock:
            if mirror.shared:
                mirror.shared = await self._remote.known(mirror.held.stream) == (mirror.held.token, mirror.tape.head)

    async def _each(self, mirrors: Sequence[OwnedStream], work: Callable[[OwnedStream], Awaitable[None]]) -> None:
        for at in range(0, len(mirrors), AT_ONCE):
            await asyncio.gather(*(work(mirror) for mirror in mirrors[at : at + AT_ONCE]))
