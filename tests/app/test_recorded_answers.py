"""A Run is written into the log as it goes, whoever listens, and whatever becomes of the log."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import pytest

from anabranch.app.resumable_answers import PREFIX, RecordingTiming, ResumableAnswers, merged, split
from anabranch.domain.contracts import Emit
from anabranch.domain.errors import StreamFull, StreamUnavailable
from anabranch.domain.eventlog import Entry, LogLimits, Page
from anabranch.domain.events import Answered, AnswerEvent, Failed, RetrievalStarted, Token
from anabranch.domain.model import Answer, Context, Ground, Question
from anabranch.eventlog.memory import MemoryLog
from anabranch.pipeline.run import Run
from anabranch.testing import ManualClock, Recorder

ANSWER = Answer(text="", ground=Ground.DOCUMENTS)
PATIENCE_S = 10.0
LEASE_S = 30.0


class Counting(MemoryLog):
    """Counts how often the lease alone was renewed, and is out of reach as often as it is told to."""

    def __init__(self, **bounds: int) -> None:
        usual: Any = {"max_events": 1_000, "max_bytes": 2**20, "memory_bytes": 2**24}
        self.time = ManualClock()
        limits = LogLimits(ttl_s=1_000, lease_s=LEASE_S, **{**usual, **bounds})
        super().__init__(clock=self.time, worker="here", limits=limits)
        self.renewals = 0
        self.away = 0

    async def append(self, stream: str, token: str, entries: Sequence[Entry]) -> Sequence[int]:
        if self.away:
            self.away -= 1
            raise StreamUnavailable("away")
        self.renewals += not entries
        return await super().append(stream, token, entries)


class Told:
    """An answerer that says what it is told."""

    def __init__(self, tell: Callable[[Emit], Awaitable[None]]) -> None:
        self._tell = tell
        self.given_up = False

    async def answer(self, question: Question, context: Context, emit: Emit) -> Answer:
        try:
            await self._tell(emit)
        except asyncio.CancelledError:
            self.given_up = True
            raise
        return ANSWER


class Taped(NamedTuple):
    stream: str
    run: Run
    answerer: Told
    recordings: ResumableAnswers
    telemetry: Recorder


def frame(event: AnswerEvent) -> bytes:
    """A dialect that has words, and two frames for a good end."""
    match event:
        case Token():
            return b"token %b\n\n" % event.text.encode()
        case Answered():
            return b"sources\n\ndone\n\n"
        case Failed():
            return b"error %b\n\n" % event.code.encode()
        case _:
            return b""


async def record(
    log: MemoryLog,
    tell: Callable[[Emit], Awaitable[None]],
    *,
    frame: Callable[[AnswerEvent], bytes] = frame,
    lease_s: float = LEASE_S,
    max_events: int = 1_000,
    within_s: float = 60.0,
    timing: RecordingTiming = RecordingTiming(),
) -> Taped:
    telemetry, answerer = Recorder(), Told(tell)
    recordings = ResumableAnswers(
        log, telemetry=telemetry, lease_s=lease_s, max_events=max_events, max_bytes=2**20, timing=timing
    )
    context = Context(correlation_id="c", deadline=asyncio.get_running_loop().time() + within_s)
    run = Run(answerer, Question(text="Why?"), context, telemetry).start()
    stream = await recordings.record(run, run.listen(), frame, identity="user:alice", about=b"!", context=context)
    return Taped(stream, run, answerer, recordings, telemetry)


async def ended(log: MemoryLog, stream: str) -> list[bytes]:
    """The bodies of a stream, once it has its end."""
    async with asyncio.timeout(PATIENCE_S), log.watch(PREFIX + stream) as watch:
        while not (page := await log.read(PREFIX + stream, 0, 100_000)).ended:
            await watch.changed()
    assert [entry.final for entry in page.entries] == [False] * (len(page.entries) - 1) + [True]
    assert len({entry.key for entry in page.entries}) == len(page.entries)
    return [entry.body for entry in page.entries]


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110 (a condition may look at anything, so nothing can announce it)
            await asyncio.sleep(0.001)


async def silence(_: Emit) -> None:
    await asyncio.Event().wait()


async def test_each_frame_is_an_entry_and_the_last_one_ends_the_stream() -> None:
    async def tell(emit: Emit) -> None:
        await emit(RetrievalStarted(sources=("a",)))
        await emit(Token(text="Be"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    log = Counting()
    taped = await record(log, tell)
    assert await ended(log, taped.stream) == [b"token Be\n\n", b"sources\n\n", b"done\n\n"]
    page = await log.read(PREFIX + taped.stream, 0, 1)
    assert (page.identity, page.about) == ("user:alice", b"!")
    assert len(taped.stream) >= 22
    assert taped.stream.replace("-", "").replace("_", "").isalnum()
    await taped.recordings.settled()
    assert not taped.recordings.holds(taped.stream)


async def test_tokens_that_arrive_together_are_recorded_as_one() -> None:
    async def tell(emit: Emit) -> None:
        for number in range(100):
            await emit(Token(text=f"{number} "))

    log = Counting()
    taped = await record(log, tell)
    words, *rest = await ended(log, taped.stream)
    assert words == b"token " + b"".join(b"%d " % number for number in range(100)) + b"\n\n"
    assert rest == [b"sources\n\n", b"done\n\n"]


def test_only_tokens_are_merged_and_the_order_stays() -> None:
    found = RetrievalStarted(sources=())
    events: list[AnswerEvent] = [Token(text="a"), Token(text="b"), found, Token(text="c"), Answered(answer=ANSWER)]
    assert list(merged(events)) == [Token(text="ab"), found, Token(text="c"), Answered(answer=ANSWER)]
    assert list(merged([])) == []
    assert list(split(b"")) == []
    assert list(split(b"event: a\ndata: 1\n\ndata: 2\n\n")) == [b"event: a\ndata: 1\n\n", b"data: 2\n\n"]


@pytest.mark.parametrize(("turns", "written"), [(0, [b"word\n\n"]), (9, [b"word\n\n", b""])])
async def test_an_end_without_a_frame_ends_the_recording(turns: int, written: list[bytes]) -> None:
    async def tell(emit: Emit) -> None:
        await emit(Token(text="a"))
        for _ in range(turns):
            await asyncio.sleep(0)

    log = Counting()
    taped = await record(log, tell, frame=lambda event: b"word\n\n" if isinstance(event, Token) else b"")
    assert await ended(log, taped.stream) == written


async def test_a_recording_renews_its_lease_without_events() -> None:
    log = Counting()
    taped = await record(log, silence, lease_s=0.003)
    await until(lambda: log.renewals >= 3)
    log.time.advance(LEASE_S - 1)
    before = log.renewals
    await until(lambda: log.renewals > before)
    log.time.advance(LEASE_S - 1)
    assert not (await log.read(PREFIX + taped.stream, 0, 1)).abandoned
    assert taped.recordings.holds(taped.stream)
    await taped.recordings.settled(within_s=0)
    await until(lambda: taped.answerer.given_up)


async def test_a_recorded_run_ends_at_its_deadline_without_clients() -> None:
    async def tell(emit: Emit) -> None:
        await emit(Token(text="a"))
        await silence(emit)

    log = Counting()
    taped = await record(log, tell, within_s=0.05, timing=RecordingTiming(rewrite_s=0.001, last_events_s=0.0))
    assert await ended(log, taped.stream) == [b"token a\n\n", b"error deadline_exceeded\n\n"]
    assert taped.answerer.given_up


async def test_an_answer_that_does_not_fit_ends_in_an_error_that_says_so() -> None:
    async def tell(emit: Emit) -> None:
        await emit(Token(text="a"))
        for _ in range(5):
            await asyncio.sleep(0)
        await emit(Token(text="b" * 5_000))
        await silence(emit)

    log = Counting(max_bytes=2_000)
    taped = await record(log, tell)
    assert await ended(log, taped.stream) == [b"token a\n\n", b"error stream_full\n\n"]
    await until(lambda: taped.answerer.given_up)
    assert isinstance(taped.telemetry.events[-1], Failed)
    assert taped.telemetry.events[-1].code == "stream_full"


async def test_an_answer_without_room_for_its_last_tokens_ends_in_an_error() -> None:
    async def tell(emit: Emit) -> None:
        await emit(Token(text="b" * 5_000))

    log = Counting(max_bytes=2_000)
    taped = await record(log, tell)
    assert await ended(log, taped.stream) == [b"error stream_full\n\n"]


async def test_a_recording_stops_if_another_worker_has_ended_its_stream() -> None:
    go = asyncio.Event()

    async def tell(emit: Emit) -> None:
        await go.wait()
        await emit(Token(text="late"))
        await silence(emit)

    log = Counting()
    taped = await record(log, tell)
    log.time.advance(LEASE_S)
    assert await log.end_abandoned(PREFIX + taped.stream, Entry(key="lost", revision=1, body=b"lost", final=True))
    go.set()
    await until(lambda: taped.answerer.given_up and not taped.recordings.holds(taped.stream))
    assert await ended(log, taped.stream) == [b"lost"]
    assert taped.telemetry.crashes == []


async def test_a_recording_continues_when_the_log_is_unreachable_for_a_moment() -> None:
    async def tell(emit: Emit) -> None:
        await emit(Token(text="a"))

    log = Counting()
    log.away = 3
    taped = await record(log, tell, timing=RecordingTiming(rewrite_s=0.001))
    assert await ended(log, taped.stream) == [b"token a\n\n", b"sources\n\n", b"done\n\n"]


async def test_a_log_that_stays_unreachable_ends_the_run() -> None:
    async def tell(emit: Emit) -> None:
        await emit(Token(text="a"))
        await silence(emit)

    log = Counting()
    log.away = 1_000_000
    taped = await record(log, tell, within_s=0.05, timing=RecordingTiming(rewrite_s=0.001, last_events_s=0.0))
    await until(lambda: taped.answerer.given_up and not taped.recordings.holds(taped.stream))
    assert taped.telemetry.crashes == []


async def test_a_frame_that_cannot_be_encoded_ends_the_recording_with_an_internal_error() -> None:
    def broken(event: AnswerEvent) -> bytes:
        if isinstance(event, Token):
            raise UnicodeError("cannot be written")
        return frame(event)

    async def tell(emit: Emit) -> None:
        await emit(Token(text="a"))
        await silence(emit)

    log = Counting()
    taped = await record(log, tell, frame=broken)
    assert await ended(log, taped.stream) == [b"error internal_error\n\n"]
    assert [str(crash) for crash in taped.telemetry.crashes] == ["cannot be written"]


async def test_the_second_half_of_a_recording_lasts_until_the_deadline() -> None:
    async def tell(emit: Emit) -> None:
        for number in range(3_000):
            await emit(Token(text=f"{number} "))
            await asyncio.sleep(0)

    log = Counting(max_events=100)
    taped = await record(log, tell, max_events=100, within_s=3.0)
    *words, sources, done = await ended(log, taped.stream)
    assert b"".join(word.removeprefix(b"token ").removesuffix(b"\n\n") for word in words) == b"".join(
        b"%d " % number for number in range(3_000)
    )
    assert 50 < len(words) <= 98
    assert (sources, done) == (b"sources\n\n", b"done\n\n")


async def test_if_no_stream_can_be_opened_the_caller_keeps_the_listener() -> None:
    async def tell(emit: Emit) -> None:
        await emit(Token(text="a"))

    telemetry, log = Recorder(), Counting(memory_bytes=10)
    recordings = ResumableAnswers(log, telemetry=telemetry, lease_s=LEASE_S, max_events=100, max_bytes=2**20)
    context = Context(correlation_id="c", deadline=asyncio.get_running_loop().time() + 60)
    run = Run(Told(tell), Question(text="Why?"), context, telemetry).start()
    listener = run.listen()
    with pytest.raises(StreamFull):
        await recordings.record(run, listener, frame, identity="", about=b"", context=context)
    async with asyncio.timeout(PATIENCE_S), listener:
        assert [type(event) async for event in listener] == [Token, Answered]


async def test_the_end_of_a_recording_is_written_before_shutdown() -> None:
    log = Counting()
    taped = await record(log, silence)
    await asyncio.sleep(0)
    taped.run.stop(StreamUnavailable("going"))
    await taped.recordings.settled()
    page: Page = await log.read(PREFIX + taped.stream, 0, 10)
    assert [entry.body for entry in page.entries] == [b"error stream_unavailable\n\n"]
