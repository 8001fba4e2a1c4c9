"""Tapes and the log in memory against a naive model: a list of everything that was ever written."""

from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule
from test_log_contract import memory_log

from anabranch.domain.errors import Conflict, LeaseLost, NotFound, StreamFull
from anabranch.domain.eventlog import EPOCH, Entry, LogLimits, SequencedEntry
from anabranch.eventlog.cursors import ENTRY_BYTES, StreamEntries, weight
from anabranch.testing import ManualClock
from anabranch.testing.contracts.event_log import entry
from support.examples import examples

MAX_EVENTS = 10
MAX_BYTES = 10 * (ENTRY_BYTES + 201)
KEYS = "abcdefghij"
EVERYTHING = 10_000
LONG = 25
Result = TypeVar("Result")

entries = st.builds(
    entry,
    st.sampled_from(KEYS[:4]) | st.sampled_from(KEYS),
    st.integers(0, 12),
    st.integers(0, 300).map(bytes),
    partial=st.booleans(),
)


# A key, how far above the last revision under it, how many bytes, and whether it is a partial.
steps_up = st.tuples(
    st.sampled_from(KEYS[:4]) | st.sampled_from(KEYS),
    st.sampled_from([1, 1, 1, 2, 0, -1]),
    st.integers(0, 300),
    st.booleans(),
)


def done(steps: Coroutine[Any, Any, Result]) -> Result:
    """The value of something asynchronous that never waits."""
    try:
        steps.send(None)
    except StopIteration as stopped:
        value: Result = stopped.value
        return value
    steps.close()
    raise AssertionError("it waits")


def latest_of(recorded: list[SequencedEntry]) -> dict[str, SequencedEntry]:
    return {each.key: each for each in recorded}


def through(tape: StreamEntries, after: int, limit: int) -> tuple[list[SequencedEntry], bool]:
    """Page after page to the head, and whether the first one was a reset; no other one may be."""
    page, first, more = tape.read(after, limit)
    read = list(page)
    while more:
        page, reset, more = tape.read(read[-1].sequence, limit)
        assert not reset
        assert page
        read += page
    return read, first


def check_reading(tape: StreamEntries, everything: list[SequencedEntry], after: int, limit: int) -> None:
    """What a reader at this cursor gets, against everything that was ever written in this epoch."""
    read, reset = through(tape, after, limit)
    kept = {each.sequence: each for each in through(tape, 0, EVERYTHING)[0]}
    begin = everything[0].sequence - 1 if everything else tape.head
    end = everything[-1].sequence if everything else tape.head
    lost = max((each.sequence for each in everything if each.sequence not in kept and not each.partial), default=0)
    assert reset == (after != 0 and (not begin <= after <= end or after < lost))
    written = {each.sequence: each for each in everything}
    numbers = [each.sequence for each in read]
    assert numbers == sorted(set(numbers))
    assert all(written[each.sequence] == each for each in read)
    delivered = latest_of(read)
    if reset or after == 0:
        assert read == list(kept.values())
        assert delivered == latest_of(everything)
        return
    assert all(number > after for number in numbers)
    for each in everything:
        if each.sequence > after and each.sequence not in numbers:
            assert each.partial
            assert delivered[each.key].revision > each.revision


class TapeStates(RuleBasedStateMachine):
    """One tape, and a replica that now and then takes over what came since."""

    def __init__(self) -> None:
        super().__init__()
        self.tape = StreamEntries(max_events=MAX_EVENTS, max_bytes=MAX_BYTES)
        self.everything: list[SequencedEntry] = []
        self.replica = self.copied()

    def copied(self) -> StreamEntries:
        kept = through(self.tape, 0, EVERYTHING)[0]
        page = self.tape.page(0, 0, identity="", about=b"", keeper="", abandoned=False)
        return StreamEntries.of(kept, page, max_events=MAX_EVENTS, max_bytes=MAX_BYTES)

    @rule(given=st.lists(steps_up, min_size=3, max_size=8))
    def append(self, given: list[tuple[str, int, int, bool]]) -> None:
        self.written(self.entries(given), [])

    @precondition(lambda self: len(self.everything) > LONG)
    @rule(given=st.lists(steps_up, max_size=2))
    def end(self, given: list[tuple[str, int, int, bool]]) -> None:
        self.written(self.entries(given), [entry("end", 1, bytes(400), final=True)])

    def entries(self, given: list[tuple[str, int, int, bool]]) -> list[Entry]:
        revisions = {key: each.revision for key, each in latest_of(self.everything).items()}
        entries = []
        for key, up, size, partial in given:
            entries.append(entry(key, revisions.get(key, 0) + up, bytes(size), partial=partial))
            revisions[key] = max(revisions.get(key, 0), entries[-1].revision)
        return entries

    def written(self, given: list[Entry], last: list[Entry]) -> None:
        expected, full = self.expected(given)
        if full:
            with pytest.raises(StreamFull):
                self.tape.plan(given + last)
            return
        planned = self.tape.plan(given + last)
        assert planned[: len(given)] == expected
        recorded = [each for each in planned if each is not None]
        before = through(self.tape, 0, EVERYTHING)[0]
        gone = self.tape.write(recorded)
        after = through(self.tape, 0, EVERYTHING)[0]
        assert list(gone) == [each.sequence for each in before + recorded if each not in after]
        self.everything += recorded

    def expected(self, given: list[Entry]) -> tuple[list[SequencedEntry | None], bool]:
        everything = list(self.everything)
        expected: list[SequencedEntry | None] = []
        for each in given:
            last = latest_of(everything).get(each.key)
            if self.tape.ended or (last is not None and last.revision >= each.revision):
                expected.append(None)
                continue
            fields = {name: getattr(each, name) for name in each.__struct_fields__}
            number = everything[-1].sequence if everything else self.tape.epoch * EPOCH
            everything.append(SequencedEntry(sequence=number + 1, **fields))
            expected.append(everything[-1])
        needed = latest_of(everything).values()
        full = len(needed) > MAX_EVENTS or sum(weight(each) for each in needed) > MAX_BYTES
        return expected, full and any(expected)

    @rule()
    def squeeze(self) -> None:
        latest = latest_of(self.everything)
        spare = [each for each in through(self.tape, 0, EVERYTHING)[0] if each.partial and latest[each.key] != each]
        assert self.tape.spare == sum(weight(each) for each in spare)
        assert list(self.tape.squeeze()) == [each.sequence for each in spare]
        assert self.tape.spare == 0

    @precondition(lambda self: len(self.everything) > LONG)
    @rule(epochs=st.integers(1, 3))
    def renumber(self, epochs: int) -> None:
        epoch = self.tape.epoch + epochs
        ended, latest = self.tape.ended, latest_of(self.everything)
        kept = [each for each in self.everything if latest[each.key] == each]
        self.everything = [
            msgspec.structs.replace(each, sequence=epoch * EPOCH + number) for number, each in enumerate(kept, 1)
        ]
        self.tape = self.tape.renumbered(epoch)
        assert (self.tape.epoch, self.tape.ended) == (epoch, ended)
        assert through(self.tape, 0, EVERYTHING)[0] == self.everything
        self.replica = self.copied()

    @rule()
    def copy(self) -> None:
        self.replica = self.copied()

    @rule(overlap=st.integers(0, 3))
    def follow(self, overlap: int) -> None:
        """What is here already comes again; a replica that has missed something is made anew."""
        if self.replica.head < self.tape.floor:
            self.replica = self.copied()
        kept = through(self.tape, 0, EVERYTHING)[0]
        since = sum(each.sequence <= self.replica.head for each in kept)
        self.replica.extend(kept[max(since - overlap, 0) :])
        assert (self.replica.head, self.replica.ended) == (self.tape.head, self.tape.ended)

    @rule(limit=st.integers(1, 20))
    def read(self, limit: int) -> None:
        """At every cursor that there ever was in this epoch, and at some that there never were."""
        begin = self.tape.epoch * EPOCH
        strange = [-1, begin - 1, begin + EPOCH, begin + EPOCH + 1]
        for cursor in (*range(begin, self.tape.head + 2), 0, *strange):
            check_reading(self.tape, self.everything, cursor, limit)
            written = [each for each in self.everything if each.sequence <= self.replica.head]
            check_reading(self.replica, written, cursor, limit)

    @invariant()
    def is_bounded(self) -> None:
        ends = [each for each in self.everything if each.final]
        assert len(self.tape) <= MAX_EVENTS + len(ends)
        assert self.tape.size <= MAX_BYTES + sum(weight(each) for each in ends)
        kept = through(self.tape, 0, EVERYTHING)[0]
        assert (len(self.tape), self.tape.size) == (len(kept), sum(weight(each) for each in kept))


class Kept(msgspec.Struct):
    token: str
    due: float
    entries: list[tuple[str, int, bytes]]
    ended: bool = False


class LogStates(RuleBasedStateMachine):
    """Streams that are opened, written, abandoned, buried and forgotten while time passes."""

    tokens = Bundle("tokens")
    names = st.sampled_from(["s", "t", "u"])

    def __init__(self) -> None:
        super().__init__()
        self.settings = LogLimits(ttl_s=30.0, lease_s=7.0)
        self.clock = ManualClock()
        self.log = memory_log(self.clock, self.settings)
        self.kept: dict[str, Kept] = {}

    def there(self, name: str) -> Kept | None:
        kept = self.kept.get(name)
        return kept if kept and self.clock.monotonic() < kept.due + self.settings.ttl_s else None

    def abandoned(self, kept: Kept) -> bool:
        return not kept.ended and kept.due <= self.clock.monotonic()

    @rule(target=tokens, name=names)
    def open(self, name: str) -> tuple[str, str]:
        if (kept := self.there(name)) is not None:
            with pytest.raises(Conflict):
                done(self.log.open(name, identity="x"))
            return name, kept.token
        token = done(self.log.open(name, identity=name))
        assert name not in self.kept or self.kept[name].token != token
        self.kept[name] = Kept(token=token, due=self.clock.monotonic() + self.settings.lease_s, entries=[])
        return name, token

    @rule(held=tokens, given=st.lists(entries, max_size=3), last=st.sampled_from([False, False, False, True]))
    def append(self, held: tuple[str, str], given: list[Entry], last: bool) -> None:
        name, token = held
        kept = self.there(name)
        wanted = [*given, entry("end", final=True)] if last else given
        if kept is None or kept.ended or kept.token != token:
            with pytest.raises(NotFound if kept is None else LeaseLost):
                done(self.log.append(name, token, wanted))
            return
        sequences = done(self.log.append(name, token, wanted))
        kept.due = self.clock.monotonic() + self.settings.lease_s
        for each, sequence in zip(wanted, sequences, strict=True):
            revisions = [revision for key, revision, _ in kept.entries if key == each.key]
            if revisions and max(revisions) >= each.revision:
                assert sequence == 0
            else:
                kept.entries.append((each.key, each.revision, each.body))
                assert sequence == len(kept.entries)
        self.end(kept, last)

    @rule(name=names)
    def end_abandoned(self, name: str) -> None:
        kept = self.there(name)
        last = entry("end", body=b"lost", final=True)
        if kept is None:
            with pytest.raises(NotFound):
                done(self.log.end_abandoned(name, last))
            return
        buried = self.abandoned(kept)
        assert done(self.log.end_abandoned(name, last)) is buried
        if buried:
            kept.entries.append(("end", 1, b"lost"))
        self.end(kept, buried)

    def end(self, kept: Kept, ended: bool) -> None:
        if ended:
            kept.ended = True
            kept.due = self.clock.monotonic()

    @rule(name=names)
    def read(self, name: str) -> None:
        kept = self.there(name)
        if kept is None:
            with pytest.raises(NotFound):
                done(self.log.read(name, 0, EVERYTHING))
            return
        page = done(self.log.read(name, 0, EVERYTHING))
        assert [(each.key, each.revision, each.body) for each in page.entries] == kept.entries
        assert (page.identity, page.keeper, page.head) == (name, "here", len(kept.entries))
        assert (page.ended, page.abandoned) == (kept.ended, self.abandoned(kept))

    @rule(seconds=st.sampled_from([0.5, 3.0, 6.9, 7.0, 12.0, 30.0]))
    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @precondition(lambda self: self.kept)
    @rule()
    def tend(self) -> None:
        self.log.tend()
        assert len(self.log.streams) == sum(self.there(name) is not None for name in self.kept)
        assert (self.log.streams.bytes_held == 0) == (len(self.log.streams) == 0)


TestTapeStates = TapeStates.TestCase
TestTapeStates.settings = settings(max_examples=examples(40), stateful_step_count=30, deadline=None)
TestLogStates = LogStates.TestCase
TestLogStates.settings = settings(max_examples=examples(40), stateful_step_count=40, deadline=None)
