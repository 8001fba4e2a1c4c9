"""One stream's entries in their order: numbering, bounds, trimming and what stands behind a cursor."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Self

from anabranch.domain.errors import StreamFull
from anabranch.domain.eventlog import EPOCH, Entry, SequencedEntry

# What an entry takes besides its key and its body: its record, its numbers and its places in the lists.
ENTRY_BYTES = 200
# Trimming goes over the whole tape, so it makes room for a while: this part of the bounds.
SLACK = 8

_sequence = attrgetter("sequence")


def weight(entry: Entry | SequencedEntry) -> int:
    """What an entry counts for against the bounds in bytes."""
    return ENTRY_BYTES + len(entry.key) + len(entry.body)


class Tape:
    """Pure: no clock, nobody to wait for. The latest under every key is never trimmed away, so whoever reads from the
    beginning has the whole state. `floor` is the highest sequence that was trimmed away without being a replaced
    partial: a cursor below it has lost something, one at or above it has not. `ended` is set by a final entry, and
    what comes after that changes nothing. `size` is what it counts for in bytes, `spare` the part of that which nobody
    would miss: superseded partials."""

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
    def of(
        cls, recorded: Iterable[SequencedEntry], head: int, floor: int, ended: bool, *, max_events: int, max_bytes: int
    ) -> Self:
        """A replica of one that is kept elsewhere, from all that it keeps, in order. Nothing is trimmed before it is
        extended."""
        tape = cls(max_events=max_events, max_bytes=max_bytes, epoch=head // EPOCH)
        for each in recorded:
            tape._put(each)
        tape.head = max(head, tape.head)
        tape.floor = floor
        tape.ended = ended or tape.ended
        return tape

    def __len__(self) -> int:
        return len(self._entries)

    def plan(self, entries: Sequence[Entry]) -> list[SequencedEntry | None]:
        """These as they would be written, None for one that changes nothing. StreamFull if what must be kept has no
        room then; a final entry always has. Nothing is changed here."""
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
            recorded = SequencedEntry(
                sequence=head,
                key=key,
                revision=entry.revision,
                body=entry.body,
                partial=entry.partial,
                final=ended,
            )
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
        """Put in what was planned, and make room: the sequences that were trimmed away. Superseded partials go first,
        which no cursor notices; then the oldest that are not the latest under their key, which raises the floor."""
        for each in recorded:
            self._put(each)
        if len(self._entries) <= self._max_events and self.size <= self._max_bytes:
            return ()
        return self._trimmed()

    def squeeze(self) -> tuple[int, ...]:
        """Let all superseded partials go, as if a bound were near: their sequences."""
        return tuple(self._dropped(partial=True, events=0, size=0)) if self.spare else ()

    def extend(self, recorded: Iterable[SequencedEntry]) -> None:
        """Take over what was written elsewhere since, in the same epoch; what is here already is passed over. If the
        floor there has risen above the head here, something was missed: make a new one `of` it instead."""
        self.write([each for each in recorded if each.sequence > self.head])

    def read(self, after: int, limit: int) -> tuple[tuple[SequencedEntry, ...], bool, bool]:
        """What stands behind a cursor, whether it meant nothing here (then it is all from the beginning), and whether
        there is more. A page that begins at the beginning never ends below the floor, even if that takes it over its
        limit: its last sequence would be no cursor to go on with."""
        start, reset = self._start(after)
        stop = start + max(limit, 0)
        if start < stop < len(self._entries) and self._entries[stop - 1].sequence < self.floor:
            stop = self._index(self.floor) + 1
        return tuple(self._entries[start:stop]), reset, stop < len(self._entries)

    def renumbered(self, epoch: int) -> "Tape":
        """The latest under every key, in order, counted from 1 in another epoch."""
        tape = Tape(max_events=self._max_events, max_bytes=self._max_bytes, epoch=epoch)
        for each in self._entries:
            if self._latest[each.key] is each:
                tape._put(
                    SequencedEntry(
                        sequence=tape.head + 1,
                        key=each.key,
                        revision=each.revision,
                        body=each.body,
                        partial=each.partial,
                        final=each.final,
                    )
                )
        tape.ended = self.ended
        return tape

    def _start(self, after: int) -> tuple[int, bool]:
        if after == 0:
            return 0, False
        if self.floor <= after <= self.head:
            return self._index(after), False
        return 0, True

    def _index(self, after: int) -> int:
        if after >= self.head:
            return len(self._entries)
        return bisect_right(self._entries, after, key=_sequence)

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
        """Let superseded entries of one kind go, oldest first, until no more than this is left: their sequences."""
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
