"""The entries of one stream: their sequence numbers and bounds, and those that follow a cursor. A cursor that is not
valid (of another epoch, trimmed, or beyond the head) is reset to the beginning."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Self

from anabranch.domain.errors import StreamFull
from anabranch.domain.eventlog import EPOCH, Entry, Page, SequencedEntry

# Memory of an entry besides its key and its body.
ENTRY_BYTES = 200
# Trimming walks the whole tape, so it frees one eighth of the bounds at once.
SLACK = 8

_sequence = attrgetter("sequence")


def weight(entry: Entry) -> int:
    """The bytes that an entry counts for."""
    return ENTRY_BYTES + len(entry.key) + len(entry.body)


def sequenced(entry: Entry, sequence: int) -> SequencedEntry:
    return SequencedEntry(
        sequence=sequence,
        key=entry.key,
        revision=entry.revision,
        body=entry.body,
        partial=entry.partial,
        final=entry.final,
    )


class StreamEntries:
    """Pure: no clock, no waiting. The latest entry under each key is never trimmed, so reading from the beginning gives
    the whole state. `floor` is the highest trimmed sequence that was not a superseded partial: a cursor below it has
    missed something, one at or above it has not. A final entry sets `ended`; later entries change nothing. `size` is
    the tape's bytes, `spare` the part of them that superseded partials use."""

    def __init__(self, *, max_events: int, max_bytes: int, epoch: int = 0) -> None:
        self.epoch = epoch
        self.head = epoch * EPOCH
        self.floor = self.head
        self.ended = False
        self.size = 0
        self.spare = 0
        self._max_events = max_events
        self._max_bytes = max_bytes
        self._entries: list[SequencedEntry] = []
        self._latest: dict[str, SequencedEntry] = {}
        self._latest_size = 0

    @classmethod
    def of(cls, recorded: Iterable[SequencedEntry], page: Page, *, max_events: int, max_bytes: int) -> Self:
        """A copy of another worker's tape, from all of its entries, in order, and the last page of them. Nothing is
        trimmed before `extend`."""
        tape = cls(max_events=max_events, max_bytes=max_bytes, epoch=page.head // EPOCH)
        for each in recorded:
            tape._put(each)
        tape.head = max(page.head, tape.head)
        tape.floor = page.floor
        tape.ended = page.ended or tape.ended
        return tape

    def __len__(self) -> int:
        return len(self._entries)

    def plan(self, entries: Sequence[Entry]) -> list[SequencedEntry | None]:
        """The entries with their sequences, None for a duplicate; changes nothing. StreamFull if the latest of every
        key would exceed the bounds. A final entry always fits."""
        planned: list[SequencedEntry | None] = []
        fresh: dict[str, SequencedEntry] = {}
        head = self.head
        ended = self.ended
        grown = False
        size = self._latest_size
        count = len(self._latest)
        for entry in entries:
            key = entry.key
            last = fresh.get(key) or self._latest.get(key)
            if ended or (last is not None and entry.revision <= last.revision):
                planned.append(None)
                continue
            head += 1
            ended = entry.final
            recorded = sequenced(entry, head)
            planned.append(recorded)
            fresh[key] = recorded
            if ended:
                continue
            grown = True
            size += weight(recorded)
            if last is None:
                count += 1
            else:
                size -= weight(last)
        if grown and (count > self._max_events or size > self._max_bytes):
            raise StreamFull("The stream holds all that it may.")
        return planned

    def write(self, recorded: Iterable[SequencedEntry]) -> tuple[int, ...]:
        """Append planned entries and trim to the bounds; returns the trimmed sequences. Superseded partials go first,
        which invalidates no cursor. Then the oldest superseded entries go, which raises the floor."""
        for each in recorded:
            self._put(each)
        if len(self._entries) <= self._max_events and self.size <= self._max_bytes:
            return ()
        return self._trimmed()

    def squeeze(self) -> tuple[int, ...]:
        """Trim all superseded partials; returns their sequences."""
        return tuple(self._dropped(partial=True, events=0, size=0)) if self.spare else ()

    def extend(self, recorded: Iterable[SequencedEntry]) -> None:
        """Append what another worker has written since, in the same epoch; entries that are here already are skipped.
        If the floor there is above the head here, entries were missed: make a new tape with `of` instead."""
        self.write([each for each in recorded if each.sequence > self.head])

    def read(self, after: int, limit: int) -> tuple[tuple[SequencedEntry, ...], bool, bool]:
        """The entries after a cursor, whether the cursor was reset (then they start at the beginning), and whether
        there are more. A read from the beginning never stops below the floor, even if it exceeds the limit: its last
        sequence would not be a valid cursor."""
        reset = after != 0 and not self.floor <= after <= self.head
        start = 0 if reset or not after else self._index(after)
        stop = start + max(limit, 0)
        if start < stop < len(self._entries) and self._entries[stop - 1].sequence < self.floor:
            stop = self._index(self.floor) + 1
        return tuple(self._entries[start:stop]), reset, stop < len(self._entries)

    def page(self, after: int, limit: int, *, identity: str, about: bytes, keeper: str, abandoned: bool) -> Page:
        """A read as a Page; `abandoned` says that the owner's lease has expired."""
        entries, reset, more = self.read(after, limit)
        return Page(
            entries=entries,
            head=self.head,
            reset=reset,
            more=more,
            ended=self.ended,
            identity=identity,
            about=about,
            keeper=keeper,
            abandoned=abandoned and not self.ended,
            floor=self.floor,
        )

    def renumbered(self, epoch: int) -> "StreamEntries":
        """The latest entry under each key, in order, numbered from 1 in another epoch."""
        tape = StreamEntries(max_events=self._max_events, max_bytes=self._max_bytes, epoch=epoch)
        for each in self._entries:
            if self._latest[each.key] is each:
                tape._put(sequenced(each, tape.head + 1))
        tape.ended = self.ended
        return tape

    def _index(self, after: int) -> int:
        return len(self._entries) if after >= self.head else bisect_right(self._entries, after, key=_sequence)

    def _put(self, recorded: SequencedEntry) -> None:
        size = weight(recorded)
        if (replaced := self._latest.get(recorded.key)) is not None:
            self._latest_size -= weight(replaced)
            if replaced.partial:
                self.spare += weight(replaced)
        self._latest[recorded.key] = recorded
        self._latest_size += size
        self._entries.append(recorded)
        self.size += size
        self.head = recorded.sequence
        if recorded.final:
            self.ended = True

    def _trimmed(self) -> tuple[int, ...]:
        enough_events = self._max_events - self._max_events // SLACK
        enough_bytes = self._max_bytes - self._max_bytes // SLACK
        gone = self._dropped(partial=True, events=enough_events, size=enough_bytes)
        if len(self._entries) > self._max_events or self.size > self._max_bytes:
            replaced = self._dropped(partial=False, events=enough_events, size=enough_bytes)
            self.floor = max([self.floor, *replaced])
            gone += replaced
        return tuple(sorted(gone))

    def _dropped(self, *, partial: bool, events: int, size: int) -> list[int]:
        """Trim superseded entries, either partials or others, oldest first, until the bounds hold; returns their
        sequences."""
        gone: list[int] = []
        kept: list[SequencedEntry] = []
        count = len(self._entries)
        for index, each in enumerate(self._entries):
            if count <= events and self.size <= size:
                kept += self._entries[index:]
                break
            if each.partial is not partial or self._latest[each.key] is each:
                kept.append(each)
                continue
            gone.append(each.sequence)
            count -= 1
            self.size -= weight(each)
            if partial:
                self.spare -= weight(each)
        if gone:
            self._entries = kept
        return gone
