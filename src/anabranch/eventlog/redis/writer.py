"""How this worker writes its streams: through Redis while it is there, alone while it is not, and back again.

Two workers must never hand out one sequence with two bodies. This is why they do not:

- Redis takes an append only from whoever has the stream's token, and only behind exactly the head that the writer knows
  (token and whole sequence are compared, epoch included). The writer shows an entry to its readers only once Redis has
  acknowledged it, or in an epoch of which Redis has never heard: `Mirror.told` is the highest that it may know, and
  whatever is written alone is written above it. So whatever became of a command whose reply never came, even if it runs
  long afterwards, its numbers are not used for anything else.
- A restore replaces what Redis has only if that has our token and no higher head, so an old one that comes late changes
  nothing. One that is not acknowledged counts as told. If the epoch that is restored is one that Redis knew before,
  then everything that was ever acknowledged in it stands in the mirror, under the same numbers.
- A burial takes the token away, so after it neither append nor restore is taken; before it they have renewed the lease,
  and it is not. It writes one number, the next behind Redis' head. If Redis was restarted since that epoch began (its
  run_id is not the one that is kept with the stream) it may have forgotten numbers that readers have had, so the burial
  counts anew in an epoch of its own: they lie from 2**15 on and are drawn by lot, where no owner ever comes.
- Whoever was stopped for longer than its lease writes nothing alone before Redis has told it that the stream is still
  its own: another may have buried it.
- A stream that Redis has forgotten altogether can be opened anew by another worker. If that worker has seen Redis go
  within the time that streams are kept, it begins in an epoch drawn by lot, too (2**10 to 2**14), and the old owner is
  refused, because the token is another.
"""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal

from anabranch.domain.contracts import Clock
from anabranch.domain.errors import LeaseLost, StreamFull, StreamUnavailable
from anabranch.domain.eventlog import Entry, SequencedEntry
from anabranch.eventlog.redis.owned_streams import OwnedStream, OwnedStreams, PendingAppend
from anabranch.eventlog.redis.store import CHUNK_BYTES, RedisStreamStore, Verdict
from anabranch.eventlog.tape import weight
from anabranch.redis.client import RedisGone

# What is written together at most; what waits beyond that goes next.
MAX_ENTRIES = 500

Outcome = Literal["shared", "alone", "lost"]


class StreamWriter:
    """Appends of one stream never overlap: what waits while one is under way goes together in the next. Nobody who
    waits can cancel a write. `changed` is called for every stream of which readers should look again."""

    def __init__(
        self,
        remote: RedisStreamStore,
        mirrors: OwnedStreams,
        *,
        clock: Clock,
        lease_s: float,
        changed: Callable[[str], None],
    ) -> None:
        self._remote = remote
        self._mirrors = mirrors
        self._clock = clock
        self._lease_s = lease_s
        self._changed = changed
        self.parted = asyncio.Event()

    async def append(self, mirror: OwnedStream, entries: Sequence[Entry]) -> list[int]:
        done: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        mirror.calls.append(PendingAppend(entries=entries, done=done))
        if mirror.writing is None:
            mirror.writing = asyncio.create_task(self._drain(mirror))
        return await done

    async def restore(self, mirror: OwnedStream) -> None:
        """Put the mirror in the place of what Redis has. It is handed over beside its appends, all but what they bring
        meanwhile: if Redis refuses already that, it has not heard of the epoch."""
        tape, attempt, staged = mirror.tape, "", 0
        try:
            while True:
                entries, reset, _ = tape.read(staged, len(tape))
                if reset:
                    return  # It was trimmed meanwhile beyond what was handed over. The next time it will do.
                chunk = _chunk(entries)
                if not chunk or (attempt and len(chunk) == len(entries)):
                    break
                attempt = attempt or secrets.token_hex(8)
                await self._remote.stage(mirror.held.stream, attempt, chunk)
                staged = chunk[-1].sequence
            async with mirror.lock:
                entries, reset, _ = tape.read(staged, len(tape))
                as_before = mirror.tape is tape and not reset and len(_chunk(entries)) == len(entries)
                if as_before and not mirror.shared and self._mirrors.get(mirror.held.stream) is mirror:
                    await self._commit(mirror, entries, attempt)
        except RedisGone:
            return

    async def _commit(self, mirror: OwnedStream, entries: Sequence[SequencedEntry], attempt: str) -> None:
        tape, now = mirror.tape, self._clock.monotonic()
        mirror.told = max(mirror.told, tape.epoch)
        verdict = await self._remote.restore(
            mirror.held,
            entries,
            head=tape.head,
            floor=tape.floor,
            ended=tape.ended,
            left_s=self._mirrors.left_s(mirror, now),
            attempt=attempt,
        )
        if verdict == "ok":
            mirror.shared = True
            mirror.drops.clear()
            if not tape.ended:
                self._mirrors.renew(mirror, now + self._lease_s)
        elif verdict == "lost":
            self.lost(mirror)
        elif verdict == "ahead":
            self._mirrors.renumber(mirror)
            self._changed(mirror.held.stream)

    def lost(self, mirror: OwnedStream) -> None:
        """It is not ours any more: readers go on with what Redis has."""
        if self._mirrors.drop(mirror):
            self._changed(mirror.held.stream)

    async def _drain(self, mirror: OwnedStream) -> None:
        calls: list[PendingAppend] = []
        try:
            while mirror.calls:
                async with mirror.lock:
                    calls = _together(mirror)
                    await self._write(mirror, calls)
        except BaseException as error:
            # The process is closing, or this is our own fault: nobody is left waiting, and what Redis has is not known.
            mirror.shared = False
            mirror.calls.extendleft(reversed(calls))
            mirror.fail(error if isinstance(error, Exception) else LeaseLost("This worker is closing."))
            raise
        finally:
            mirror.writing = None

    async def _write(self, mirror: OwnedStream, calls: Sequence[PendingAppend]) -> None:
        if mirror.tape.ended or self._mirrors.get(mirror.held.stream) is not mirror:
            _fail(calls, LeaseLost("This stream has ended, or has another owner."))
            return
        entries = [entry for call in calls for entry in call.entries]
        try:
            planned = mirror.tape.plan(entries)
            recorded = [each for each in planned if each is not None]
            given_up = self._mirrors.make_room(sum(weight(each) for each in recorded if not each.final))
        except StreamFull as full:
            if len(calls) == 1:
                _fail(calls, full)
                return
            for call in calls:
                await self._write(mirror, [call])
            return
        for each in given_up:
            self._changed(each.held.stream)
        now = self._clock.monotonic()
        away = mirror.abandoned(now)
        outcome = await self._shared(mirror, recorded) if mirror.shared else "alone"
        if outcome == "lost":
            _fail(calls, LeaseLost("This stream has ended, or has another owner."))
            self.lost(mirror)
            return
        if outcome == "alone" and away:
            # We were stopped for longer than our lease: somebody may have ended the stream in our place, and only Redis
            # can tell. Until it has, nothing is written alone.
            mirror.shared = False
            self.parted.set()
            _fail(calls, StreamUnavailable("The log that the workers share has to be asked first; try again."))
            return
        if outcome == "alone":
            planned = self._part(mirror, entries)
            recorded = [each for each in planned if each is not None]
        self._mirrors.renew(mirror, now + self._lease_s)
        if recorded:
            self._mirrors.write(mirror, recorded, self._clock.monotonic())
            await self._trim(mirror)
        _deliver(calls, planned)
        if recorded:
            self._changed(mirror.held.stream)

    def _part(self, mirror: OwnedStream, entries: Sequence[Entry]) -> list[SequencedEntry | None]:
        """Go on without Redis: only in an epoch of which it has not heard is anything written."""
        mirror.shared = False
        self.parted.set()
        planned = mirror.tape.plan(entries)
        if mirror.tape.epoch > mirror.told or not any(planned):
            return planned
        self._mirrors.renumber(mirror)
        return mirror.tape.plan(entries)

    async def _shared(self, mirror: OwnedStream, recorded: Sequence[SequencedEntry]) -> Outcome:
        try:
            verdict = await self._remote.append(mirror.held, mirror.tape.head, recorded)
            if verdict == "behind":
                verdict = await self._replaced(mirror, recorded)
        except RedisGone:
            return "alone"
        if verdict == "ok":
            return "shared"
        return "lost" if verdict == "lost" else "alone"

    async def _trim(self, mirror: OwnedStream) -> None:
        """Redis forgets what the tape has trimmed. That is seldom, and if it fails, it can wait."""
        if mirror.shared and mirror.drops:
            with suppress(RedisGone):
                await self._remote.trim(mirror.held, mirror.tape.head, mirror.tape.floor, mirror.drops)
                mirror.drops.clear()

    async def _replaced(self, mirror: OwnedStream, recorded: Sequence[SequencedEntry]) -> Verdict:
        """Redis was restarted, and has forgotten something. If it is little, it gets all of it at once, and nobody
        notices."""
        tape = mirror.tape
        entries = (*tape.read(0, len(tape))[0], *recorded)
        if len(_chunk(entries)) < len(entries):
            return "behind"
        ended = bool(recorded) and recorded[-1].final
        return await self._remote.restore(
            mirror.held,
            entries,
            head=entries[-1].sequence if entries else tape.head,
            floor=tape.floor,
            ended=ended,
            left_s=self._mirrors.left_s(mirror, mirror.due),
        )


def _together(mirror: OwnedStream) -> list[PendingAppend]:
    """The next calls that can go in one command. One that ends the stream is the last."""
    calls: list[PendingAppend] = []
    count = size = 0
    while mirror.calls:
        entries = mirror.calls[0].entries
        count += len(entries)
        size += sum(len(entry.body) for entry in entries)
        if calls and (count > MAX_ENTRIES or size > CHUNK_BYTES):
            break
        calls.append(mirror.calls.popleft())
        if any(entry.final for entry in entries):
            break
    return calls


def _chunk(entries: Sequence[SequencedEntry]) -> Sequence[SequencedEntry]:
    """As many of them as one command carries."""
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


def _deliver(calls: Sequence[PendingAppend], planned: Sequence[SequencedEntry | None]) -> None:
    at = 0
    for call in calls:
        mine = planned[at : at + len(call.entries)]
        at += len(mine)
        if not call.done.done():
            call.done.set_result([0 if each is None else each.sequence for each in mine])
