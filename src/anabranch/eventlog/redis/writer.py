"""How this worker writes its streams: through Redis while it is reachable, locally while it is not, and back again.

Two workers must never publish two different bodies under one sequence. This is why they do not:

- Redis accepts an append only from the holder of the stream's token, and only directly after the head that the writer
  knows (token and whole sequence are compared, epoch included). The writer shows an entry to its readers only once
  Redis has acknowledged it, or in an epoch that Redis has never seen: `OwnedStream.sent_epoch` is the highest epoch
  that Redis may have seen, and local writes use a higher one. So whatever happens to a command whose reply never came,
  even if it runs long afterwards, its sequences are not used for anything else.
- A restore replaces what Redis has only if that has our token and no higher head, so a late restore changes nothing. A
  restore that is not acknowledged counts as sent. If the restored epoch is one that Redis knew before, then everything
  that was ever acknowledged in it is in our copy, under the same sequences.
- Ending an abandoned stream clears the token, so later appends and restores are refused; earlier ones have renewed the
  lease, and then the stream is not abandoned. It writes one sequence, the next after Redis' head. If Redis was
  restarted since that epoch began (its run_id is not the stored one), it may have lost sequences that readers have
  received. Then the entries are renumbered in a random epoch from 2**15 on, which no owner ever reaches.
- A worker that was paused for longer than its lease writes nothing locally before Redis has confirmed that it still
  owns the stream: another worker may have ended it.
- A stream that Redis has lost altogether can be opened again by another worker. If that worker has seen Redis
  unreachable within the time that streams are kept, it starts in a random epoch, too (2**10 to 2**14). The old owner is
  refused, because the token differs.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice

from anabranch.domain.contracts import Clock
from anabranch.domain.errors import LeaseLost, StreamFull, StreamUnavailable
from anabranch.domain.eventlog import Entry, LogLimits, SequencedEntry
from anabranch.domain.model import Value
from anabranch.eventlog.cursors import StreamEntries, weight
from anabranch.eventlog.redis.store import CHUNK_BYTES, RedisStreamStore, Verdict
from anabranch.eventlog.streams import NOT_OWNED, Stream, StreamOwner, Streams
from anabranch.redis.client import RedisGone

# The most entries that one command appends; the rest goes in the next.
MAX_ENTRIES = 500


class PendingAppend(Value):
    """Entries to append, and the future of their sequences."""

    entries: Sequence[Entry]
    done: asyncio.Future[list[int]]


class OwnedStream(Stream):
    """A stream that this worker writes. `sent_epoch` is the highest epoch that Redis may have seen. While the stream is
    `shared`, Redis has acknowledged exactly what is on the tape. `untrimmed` are the sequences that were trimmed here
    and not yet in Redis. The holder of the `lock` is the only one to change the stream in Redis."""

    __slots__ = ("appends", "lock", "sent_epoch", "untrimmed", "writing")

    def __init__(self, owner: StreamOwner, tape: StreamEntries, due: float) -> None:
        super().__init__(owner, tape, due)
        self.sent_epoch = tape.epoch
        self.untrimmed: list[int] = []
        self.appends: deque[PendingAppend] = deque()
        self.writing: asyncio.Task[None] | None = None
        self.lock = asyncio.Lock()


class StreamWriter:
    """Appends to one stream never overlap: appends that wait while one is in progress go together in the next. A caller
    that is cancelled does not cancel a write. `changed` is called for each stream that readers should read again;
    `detached` is set when a stream continues without Redis."""

    def __init__(
        self,
        store: RedisStreamStore,
        streams: Streams[OwnedStream],
        *,
        clock: Clock,
        limits: LogLimits,
        changed: Callable[[str], None],
    ) -> None:
        self._store = store
        self._streams = streams
        self._clock = clock
        self._limits = limits
        self._changed = changed
        self.detached = asyncio.Event()

    async def append(self, stream: OwnedStream, entries: Sequence[Entry]) -> list[int]:
        done: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        stream.appends.append(PendingAppend(entries=entries, done=done))
        if stream.writing is None:
            stream.writing = asyncio.create_task(self._drain(stream))
        return await done

    async def restore(self, stream: OwnedStream) -> None:
        """Replace what Redis has by our copy. It is staged while appends continue; only the rest is sent under the
        lock. If Redis refuses while staging, it has not seen the epoch."""
        tape, attempt, staged = stream.tape, "", 0
        with suppress(RedisGone):
            while True:
                entries, reset, _ = tape.read(staged, len(tape))
                if reset:
                    return  # Staged entries were trimmed meanwhile. The next attempt starts again.
                chunk = _chunk(entries)
                if not chunk or (attempt and len(chunk) == len(entries)):
                    break
                attempt = attempt or secrets.token_hex(8)
                await self._store.stage(stream.owner.stream, attempt, chunk)
                staged = chunk[-1].sequence
            async with stream.lock:
                entries, reset, _ = tape.read(staged, len(tape))
                unchanged = stream.tape is tape and not reset and len(_chunk(entries)) == len(entries)
                if unchanged and not stream.shared and self._streams.get(stream.owner.stream) is stream:
                    await self._commit(stream, entries, attempt)

    async def restore_lost(self, stream: OwnedStream) -> None:
        """Restore a stream that Redis has lost without an interruption. Its epoch is the same if one command carries
        it."""
        async with stream.lock:
            entries, _, _ = stream.tape.read(0, len(stream.tape))
            if self._streams.get(stream.owner.stream) is not stream:
                return
            if len(_chunk(entries)) == len(entries):
                with suppress(RedisGone):
                    await self._commit(stream, entries, "")
                return
            stream.shared = False
        await self.restore(stream)

    async def _commit(self, stream: OwnedStream, entries: Sequence[SequencedEntry], attempt: str) -> None:
        tape, now = stream.tape, self._clock.monotonic()
        stream.sent_epoch = max(stream.sent_epoch, tape.epoch)
        verdict = await self._store.restore(
            stream.owner,
            entries,
            head=tape.head,
            floor=tape.floor,
            ended=tape.ended,
            left_s=stream.due + self._limits.ttl_s - now,
            ended_for_s=now - stream.due if tape.ended else 0.0,
            attempt=attempt,
        )
        if verdict == "ok":
            stream.shared = True
            stream.untrimmed.clear()
            if not tape.ended:
                self._streams.renew(stream, now + self._limits.lease_s)
        elif verdict == "lost":
            self.drop(stream)
        elif verdict == "ahead":
            self._renumber(stream)
            self._changed(stream.owner.stream)

    def drop(self, stream: OwnedStream) -> None:
        """This worker no longer owns the stream: readers continue with what Redis has."""
        if self._streams.drop(stream):
            self.dropped([stream])

    def dropped(self, streams: Sequence[OwnedStream]) -> None:
        for stream in streams:
            _fail(stream.appends, LeaseLost(NOT_OWNED))
            stream.appends.clear()
            self._changed(stream.owner.stream)

    async def _drain(self, stream: OwnedStream) -> None:
        calls: list[PendingAppend] = []
        try:
            while stream.appends:
                async with stream.lock:
                    calls = _next_appends(stream)
                    await self._write(stream, calls)
        except BaseException as error:
            # The process is closing, or this is a bug: fail every caller, and treat what Redis has as unknown.
            stream.shared = False
            failure = error if isinstance(error, Exception) else LeaseLost("This worker is closing.")
            _fail([*calls, *stream.appends], failure)
            stream.appends.clear()
            raise
        finally:
            stream.writing = None

    async def _write(self, stream: OwnedStream, calls: Sequence[PendingAppend]) -> None:
        try:
            planned = await self._append(stream, [entry for call in calls for entry in call.entries])
        except StreamFull as full:
            if len(calls) == 1:
                _fail(calls, full)
            else:
                for call in calls:
                    await self._write(stream, [call])
        except (LeaseLost, StreamUnavailable) as error:
            _fail(calls, error)
        else:
            sequences = (0 if each is None else each.sequence for each in planned)
            for call in calls:
                own = list(islice(sequences, len(call.entries)))
                if not call.done.done():
                    call.done.set_result(own)
            if any(planned):
                self._changed(stream.owner.stream)

    async def _append(self, stream: OwnedStream, entries: Sequence[Entry]) -> list[SequencedEntry | None]:
        """The entries as they were written, None for a duplicate."""
        if stream.tape.ended or self._streams.get(stream.owner.stream) is not stream:
            raise LeaseLost(NOT_OWNED)
        planned = stream.tape.plan(entries)
        recorded = [each for each in planned if each is not None]
        self.dropped(self._streams.make_room(sum(weight(each) for each in recorded if not each.final), stream.caller))
        now = self._clock.monotonic()
        expired = stream.abandoned(now)
        verdict = await self._append_shared(stream, recorded) if stream.shared else None
        if verdict == "lost":
            self.drop(stream)
            raise LeaseLost(NOT_OWNED)
        if verdict != "ok":
            stream.shared = False
            self.detached.set()
            if expired:
                # This worker was paused for longer than its lease. Another may have ended the stream, and only Redis
                # knows. Nothing is written locally before Redis has confirmed the owner.
                raise StreamUnavailable("Redis must confirm the owner of this stream first; try again.")
            if recorded and stream.tape.epoch <= stream.sent_epoch:
                self._renumber(stream)
                planned = stream.tape.plan(entries)
                recorded = [each for each in planned if each is not None]
        self._streams.renew(stream, now + self._limits.lease_s)
        if recorded:
            stream.untrimmed.extend(self._streams.write(stream, recorded, self._clock.monotonic()))
            await self._trim(stream)
        return planned

    def _renumber(self, stream: OwnedStream) -> None:
        """Move to an epoch that Redis has never seen."""
        stream.tape = stream.tape.renumbered(stream.sent_epoch + 1)
        stream.untrimmed.clear()
        self._streams.resized(stream)

    async def _append_shared(self, stream: OwnedStream, recorded: Sequence[SequencedEntry]) -> Verdict | None:
        """None if Redis is unreachable."""
        with suppress(RedisGone):
            verdict = await self._store.append(stream.owner, stream.tape.head, recorded)
            return await self._replace(stream, recorded) if verdict == "behind" else verdict
        return None

    async def _trim(self, stream: OwnedStream) -> None:
        """Trim in Redis what the tape has trimmed. That is rare, and may fail until the next time."""
        if stream.shared and stream.untrimmed:
            with suppress(RedisGone):
                await self._store.trim(stream.owner, stream.tape.head, stream.tape.floor, stream.untrimmed)
                stream.untrimmed.clear()

    async def _replace(self, stream: OwnedStream, recorded: Sequence[SequencedEntry]) -> Verdict:
        """Redis was restarted and has lost entries. If the stream fits into one command, send all of it."""
        tape = stream.tape
        entries = (*tape.read(0, len(tape))[0], *recorded)
        if len(_chunk(entries)) < len(entries):
            return "behind"
        return await self._store.restore(
            stream.owner,
            entries,
            head=entries[-1].sequence if entries else tape.head,
            floor=tape.floor,
            ended=bool(recorded) and recorded[-1].final,
            left_s=self._limits.ttl_s,
        )


def _next_appends(stream: OwnedStream) -> list[PendingAppend]:
    """The next appends that fit into one command. One that ends the stream is the last."""
    calls: list[PendingAppend] = []
    count = size = 0
    while stream.appends:
        entries = stream.appends[0].entries
        count += len(entries)
        size += sum(len(entry.body) for entry in entries)
        if calls and (count > MAX_ENTRIES or size > CHUNK_BYTES):
            break
        calls.append(stream.appends.popleft())
        if any(entry.final for entry in entries):
            break
    return calls


def _chunk(entries: Sequence[SequencedEntry]) -> Sequence[SequencedEntry]:
    """The first entries, as many as one command carries."""
    size = 0
    for count, each in enumerate(entries):
        size += weight(each)
        if count and size > CHUNK_BYTES:
            return entries[:count]
    return entries


def _fail(calls: Sequence[PendingAppend], error: Exception) -> None:
    for call in calls:
        if not call.done.done():
            call.done.set_exception(error)
