"""The event log of a single process: streams in memory."""

import secrets
from collections.abc import Sequence

from anabranch.domain.contracts import Clock
from anabranch.domain.errors import Conflict, LeaseLost, NotFound
from anabranch.domain.eventlog import Entry, LogLimits, Page, SequencedEntry
from anabranch.domain.shares import Claimant, claimant
from anabranch.eventlog.cursors import StreamEntries, weight
from anabranch.eventlog.streams import EXISTS, NOT_FOUND, NOT_OWNED, Stream, StreamOwner, Streams, Watchers


class MemoryLog:
    """An EventLog whose owners and readers are all in this process. An expired stream is not found any more; `tend`
    also frees its memory."""

    def __init__(self, *, clock: Clock, worker: str, limits: LogLimits) -> None:
        self._clock = clock
        self._worker = worker
        self._limits = limits
        self._watchers = Watchers()
        self.watch = self._watchers.watch
        self.streams: Streams[Stream] = Streams(limits)
        # Streams with superseded partials, which are the first to go when memory is short.
        self._spare: dict[str, Stream] = {}

    async def open(self, stream: str, *, identity: str, about: bytes = b"") -> str:
        if self._known(stream) is not None:
            raise Conflict(EXISTS)
        owner = StreamOwner(stream=stream, token=secrets.token_hex(16), identity=identity, about=about)
        self._make_room(owner.size, claimant.get())
        tape = StreamEntries(max_events=self._limits.max_events, max_bytes=self._limits.max_bytes)
        self.streams.add(Stream(owner, tape, self._clock.monotonic() + self._limits.lease_s))
        self._watchers.notify(stream)
        return owner.token

    async def append(self, stream: str, token: str, entries: Sequence[Entry]) -> Sequence[int]:
        found = self._found(stream)
        if found.tape.ended or token != found.owner.token:
            raise LeaseLost(NOT_OWNED)
        planned = found.tape.plan(entries)
        recorded = [each for each in planned if each is not None]
        self._make_room(sum(weight(each) for each in recorded if not each.final), found.caller)
        self.streams.renew(found, self._clock.monotonic() + self._limits.lease_s)
        if recorded:
            self._write(found, recorded)
        return [0 if each is None else each.sequence for each in planned]

    async def read(self, stream: str, after: int, limit: int) -> Page:
        return self._found(stream).page(after, limit, keeper=self._worker, now=self._clock.monotonic())

    async def end_abandoned(self, stream: str, last: Entry) -> bool:
        found = self._found(stream)
        if not found.abandoned(self._clock.monotonic()):
            return False
        self._write(found, [each for each in found.tape.plan([last]) if each is not None])
        return found.tape.ended

    def tend(self) -> None:
        """Free the memory of expired streams."""
        self._forgotten(self.streams.drop_expired(self._clock.monotonic()))

    def forget_ended(self, ended_for_s: float) -> int:
        """Drop the streams that ended at least that long ago; returns how many."""
        gone = self.streams.drop_ended(self._clock.monotonic() - ended_for_s)
        self._forgotten(gone)
        return len(gone)

    async def forget(self, stream: str) -> None:
        """Drop a stream, also one that is in progress."""
        if (found := self.streams.get(stream)) is not None and self.streams.drop(found):
            self._forgotten([found])

    def _known(self, stream: str) -> Stream | None:
        found = self.streams.get(stream)
        if found is not None and self.streams.expired(found, self._clock.monotonic()):
            self.streams.drop(found)
            self._forgotten([found])
            return None
        return found

    def _found(self, stream: str) -> Stream:
        if (found := self._known(stream)) is None:
            raise NotFound(NOT_FOUND)
        return found

    def _write(self, stream: Stream, recorded: Sequence[SequencedEntry]) -> None:
        self.streams.write(stream, recorded, self._clock.monotonic())
        if stream.tape.spare:
            self._spare[stream.owner.stream] = stream
        self._watchers.notify(stream.owner.stream)

    def _make_room(self, size: int, caller: Claimant) -> None:
        """Superseded partials go first, then whole streams that have ended."""
        while self._spare and self.streams.missing(size, caller) > 0:
            _, stream = self._spare.popitem()
            stream.tape.squeeze()
            self.streams.resized(stream)
        self._forgotten(self.streams.make_room(size, caller))

    def _forgotten(self, streams: Sequence[Stream]) -> None:
        for stream in streams:
            self._spare.pop(stream.owner.stream, None)
            self._watchers.notify(stream.owner.stream)
        if not self._spare:
            self._spare.clear()  # A dict keeps the size that it once had until it is cleared.
