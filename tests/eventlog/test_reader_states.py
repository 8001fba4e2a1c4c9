"""Several readers of one stream, in any interleaving: nobody loses, doubles or reorders anything, and all agree."""

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from test_log_contract import memory_log

from anabranch.domain.errors import StreamFull
from anabranch.domain.eventlog import EPOCH, Entry, LogLimits, Page, SequencedEntry, epoch
from anabranch.eventlog.reader import StreamReader, TooSlow
from anabranch.eventlog.streams import Stream
from anabranch.testing import ManualClock
from anabranch.testing.contracts.event_log import entry
from support.examples import examples

SMALL_BATCH = 3  # so that the ends of pages, batches and tapes are reached often
KEYS = "abcd"
LONG_S = 1_000.0
PLENTY = 1_000


def lost(page: Page) -> Entry:
    return entry("end", body=b"lost", final=True)


class Client:
    """What one client has applied since its last reset, over all of its connections."""

    def __init__(self, cap_bytes: int) -> None:
        self.cap_bytes = cap_bytes
        self.cursor = 0
        self.reader: StreamReader | None = None
        self.applied: list[SequencedEntry] = []
        self.floor = 0
        self.ended = False

    def apply(self, batch: Page, floor: int) -> None:
        """Below the floor of a log that it began to read at the beginning, a client cannot know what there was."""
        assert self.reader is not None
        assert len(batch.entries) <= SMALL_BATCH
        assert batch.entries or batch.reset or batch.ended
        if batch.reset:
            self.applied.clear()
            self.cursor = 0
        if not self.applied:
            self.floor = floor
        for each in batch.entries:
            assert each.sequence > self.cursor
            self.cursor = each.sequence
            self.applied.append(each)
        assert self.reader.sequence == self.cursor
        assert self.reader.head >= batch.head
        assert not self.ended or not batch.entries
        self.ended = batch.ended

    def check(self, everything: list[SequencedEntry]) -> None:
        """Each number that it did not get is a partial that a later one, which it got, replaced."""
        got = {each.sequence for each in self.applied}
        latest = {each.key: each.revision for each in self.applied}
        for each in everything:
            if self.floor < each.sequence <= self.cursor and each.sequence not in got:
                assert each.partial, each
                assert self.cursor < everything[-1].sequence or latest[each.key] > each.revision


class MuxStates(RuleBasedStateMachine):
    indexes = st.integers(0, 4)

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.clock = ManualClock()
        self.log = memory_log(self.clock, LogLimits(max_events=24, lease_s=10.0))
        self.token = self.runner.run(self.log.open("s", identity=""))
        self.everything: list[SequencedEntry] = []
        self.revisions = dict.fromkeys(KEYS, 0)
        self.ended = False
        self.clients = [Client(cap) for cap in (30, 60, 120, 10_000)]
        self.clients.append(Client(0))

    @property
    def stream(self) -> Stream:
        found = self.log.streams.get("s")
        assert found is not None
        return found

    @property
    def tape_floor(self) -> int:
        return self.stream.tape.floor

    @property
    def now_epoch(self) -> int:
        return self.stream.tape.epoch

    def next_entry(self, key: str, size: int, partial: bool) -> Entry:
        self.revisions[key] += 1
        return entry(key, self.revisions[key], bytes(size), partial=partial)

    async def write(self, entries: list[Entry]) -> None:
        try:
            sequences = await self.log.append("s", self.token, entries)
        except StreamFull:
            pytest.fail("four keys always have room")
        for each, sequence in zip(entries, sequences, strict=True):
            fields = {name: getattr(each, name) for name in each.__struct_fields__}
            self.everything.append(SequencedEntry(sequence=sequence, **fields))

    @precondition(lambda self: not self.ended)
    @rule(given=st.lists(st.tuples(st.sampled_from(KEYS), st.integers(0, 20), st.booleans()), min_size=1, max_size=12))
    def append(self, given: list[tuple[str, int, bool]]) -> None:
        self.runner.run(self.write([self.next_entry(*each) for each in given]))

    @precondition(lambda self: not self.ended)
    @rule(key=st.sampled_from(KEYS), count=st.integers(1, 20))
    def append_partials(self, key: str, count: int) -> None:
        self.runner.run(self.write([self.next_entry(key, 10, True) for _ in range(count)]))

    @precondition(lambda self: not self.ended)
    @rule(
        index=indexes,
        given=st.lists(
            st.tuples(st.sampled_from(KEYS[:2]), st.integers(0, 20), st.booleans()), min_size=SMALL_BATCH, max_size=20
        ),
    )
    def burst(self, index: int, given: list[tuple[str, int, bool]]) -> None:
        """More at once for one that is level than it may be behind."""
        client = self.clients[index]
        self.runner.run(self.pulled(client, PLENTY))
        self.append(given)
        self.runner.run(self.pulled(client, 1))

    @precondition(lambda self: not self.ended and self.everything)
    @rule(epochs=st.integers(1, 2))
    def renumber(self, epochs: int) -> None:
        """As a log does that has lost touch with the others."""
        stream = self.stream
        stream.tape = stream.tape.renumbered(stream.tape.epoch + epochs)
        self.everything = list(stream.tape.read(0, PLENTY)[0])
        self.log._watchers.notify("s")

    @rule(index=indexes, pulls=st.sampled_from([1, 2, 4, PLENTY]))
    def pull(self, index: int, pulls: int) -> None:
        self.runner.run(self.pulled(self.clients[index], pulls))

    async def pulled(self, client: Client, pulls: int) -> None:
        for _ in range(pulls):
            if client.reader is None:
                client.reader = await StreamReader(
                    self.log, "s", client.cursor, cap_bytes=client.cap_bytes, lost=lost, batch=SMALL_BATCH
                ).__aenter__()
            try:
                batch = await client.reader.next(0)
            except TooSlow:
                behind = [each for each in self.everything if each.sequence > client.cursor]
                assert sum(len(each.body) for each in behind) > client.cap_bytes
                await self.left(client)
                continue
            if batch is None or client.ended:
                assert client.cursor == (self.everything[-1].sequence if self.everything else 0)
                return
            client.apply(batch, self.tape_floor)
            client.check(self.everything)

    async def left(self, client: Client) -> None:
        if client.reader is not None:
            await client.reader.__aexit__(None, None, None)
            client.reader = None

    @rule(index=indexes, forget=st.sampled_from([0, 0, 0, 1, 3, PLENTY, PLENTY * EPOCH]))
    def cut(self, index: int, forget: int) -> None:
        """The connection goes; the client comes back with its cursor, an older one, or one that was never given."""
        client = self.clients[index]
        self.runner.run(self.left(client))
        if forget >= PLENTY and client.cursor:
            client.cursor += forget
        elif forget:
            del client.applied[-forget:]
            client.cursor = client.applied[-1].sequence if client.applied else 0
        client.ended = False

    @precondition(lambda self: not self.ended)
    @rule(
        index=indexes, given=st.tuples(st.sampled_from(KEYS), st.integers(0, 40), st.booleans()), give_up=st.booleans()
    )
    def wait(self, index: int, given: tuple[str, int, bool], give_up: bool) -> None:
        self.runner.run(self.waited(self.clients[index], self.next_entry(*given), give_up))

    async def waited(self, client: Client, news: Entry, give_up: bool) -> None:
        """One that is level waits; what comes then wakes it, and one that gives up has lost nothing."""
        await self.pulled(client, PLENTY)
        assert client.reader is not None
        waiting = asyncio.create_task(client.reader.next(LONG_S))
        for _ in range(3):
            await asyncio.sleep(0)
        assert not waiting.done()
        if give_up:
            waiting.cancel()
        await self.write([news])
        await asyncio.wait([waiting])
        if give_up:
            assert waiting.cancelled()
            return
        batch = waiting.result()
        assert batch is not None
        assert [each.body for each in batch.entries] == [news.body]
        client.apply(batch, self.tape_floor)

    @precondition(lambda self: not self.ended)
    @rule(buried=st.booleans())
    def end(self, buried: bool) -> None:
        self.ended = True
        last = entry("end", final=True)
        if not buried:
            self.runner.run(self.write([last]))
            return
        self.clock.advance(10.0)
        last = lost(self.runner.run(self.log.read("s", 0, 1)))
        passing = Client(PLENTY)
        self.runner.run(self.pulled(passing, 1))
        self.runner.run(self.left(passing))
        head = self.runner.run(self.log.read("s", 0, 1)).head
        self.everything.append(SequencedEntry(sequence=head, key="end", revision=1, body=last.body, final=True))

    def teardown(self) -> None:
        try:
            if not self.ended:
                self.end(buried=False)
            self.runner.run(self.finished())
            assert not self.log._watchers._watches
        finally:
            self.runner.close()

    async def finished(self) -> None:
        latest = {each.key: each for each in self.everything}
        for client in self.clients:
            for _ in range(PLENTY):
                await self.pulled(client, 1)
                if client.ended:
                    break
            assert client.ended
            assert all(epoch(each.sequence) == self.now_epoch for each in client.applied)
            assert {each.key: each for each in client.applied} == latest
            client.check(self.everything)
            await self.left(client)


TestMuxStates = MuxStates.TestCase
TestMuxStates.settings = settings(max_examples=examples(40), stateful_step_count=40, deadline=None)
