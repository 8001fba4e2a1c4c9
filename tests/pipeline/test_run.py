"""A Run ends in exactly one terminal event, whatever happens inside it."""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.domain.contracts import Emit
from anabranch.domain.errors import AnabranchError, Cancelled, DeadlineExceeded, InternalError, ShuttingDown
from anabranch.domain.events import TERMINAL, Answered, AnswerEvent, Failed, Token, fold, unfold
from anabranch.domain.model import (
    Answer,
    Citation,
    Context,
    Ground,
    Passage,
    Question,
    SourceReply,
    Status,
    Timings,
    Usage,
)
from anabranch.pipeline.run import PENDING_EVENTS, Listener, Run
from anabranch.testing import Recorder

QUESTION = Question(text="Why?")
ANSWER = Answer(text="Because.", ground=Ground.DOCUMENTS)

words = st.text(max_size=20)
passages = st.builds(
    Passage, source=words, title=words, text=words, score=st.floats(0, 1), document_id=st.none() | words
)
replies = st.builds(
    SourceReply,
    path=words,
    status=st.sampled_from(Status),
    passages=st.lists(passages, max_size=3).map(tuple),
    error=st.none() | words,
    latency_ms=st.integers(0, 10_000),
)
answers = st.builds(
    Answer,
    text=words,
    ground=st.sampled_from(Ground),
    replies=st.lists(replies, max_size=4).map(tuple),
    passages=st.lists(passages, max_size=4).map(tuple),
    citations=st.lists(
        st.builds(
            Citation,
            start=st.integers(0, 9),
            end=st.integers(0, 9),
            source=words,
            passage=st.integers(0, 9),
            passage_start=st.integers(0, 9),
            passage_end=st.integers(0, 9),
        ),
        max_size=2,
    ).map(tuple),
    timings=st.builds(Timings, retrieval_ms=st.integers(0), generation_ms=st.integers(0), total_ms=st.integers(0)),
    usage=st.none() | st.builds(Usage, prompt_tokens=st.integers(0)),
    model=st.none() | words,
    prompt_version=st.none() | words,
    omitted=st.integers(0, 9),
    refused=st.booleans(),
)


@given(answers)
def test_an_answer_unfolds_and_folds_to_itself(answer: Answer) -> None:
    assert fold(unfold(answer)) == answer


@given(answers)
def test_an_unfolded_answer_has_one_end_and_it_is_last(answer: Answer) -> None:
    events = unfold(answer)
    assert [isinstance(event, TERMINAL) for event in events].index(True) == len(events) - 1


def context(seconds: float = 5.0) -> Context:
    return Context(correlation_id="c", deadline=time.monotonic() + seconds)


class Scripted:
    """An Answerer that does what the test says."""

    def __init__(self, *, tokens: int = 0, fails: BaseException | None = None, hangs: bool = False) -> None:
        self.tokens = tokens
        self.fails = fails
        self.hangs = hangs
        self.emitted = 0
        self.cancelled = False

    async def answer(self, question: Question, context: Context, emit: Emit) -> Answer:
        try:
            for _ in range(self.tokens):
                await emit(Token(text="x"))
                self.emitted += 1
            if self.hangs:
                await asyncio.Event().wait()
            if self.fails is not None:
                raise self.fails
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return ANSWER


def started(answerer: Scripted, seconds: float = 5.0) -> tuple[Run, Recorder]:
    recorder = Recorder()
    return Run(answerer, QUESTION, context(seconds), recorder).start(), recorder


async def heard(listener: Listener) -> list[AnswerEvent]:
    async with listener:
        return [event async for event in listener]


@pytest.mark.parametrize(
    ("fails", "code"),
    [
        (ShuttingDown("bye"), "shutting_down"),
        (ValueError("a bug"), "internal_error"),
        (ExceptionGroup("several", [KeyError("a")]), "internal_error"),
        (TimeoutError(), "internal_error"),
        (asyncio.CancelledError(), "cancelled"),
    ],
)
async def test_whatever_fails_becomes_one_terminal_event(fails: BaseException, code: str) -> None:
    run, recorder = started(Scripted(tokens=3, fails=fails))
    events, outcome = await asyncio.gather(heard(run.listen()), asyncio.gather(run.value(), return_exceptions=True))
    assert [type(event) for event in events] == [Token, Token, Token, Failed]
    assert isinstance(events[-1], Failed)
    assert events[-1].code == code
    assert isinstance(outcome[0], AnabranchError)
    assert recorder.events == events[-1:]  # what comes before it is told where it happens
    assert len(recorder.crashes) == (code == "internal_error")


async def test_the_value_is_the_end_of_the_events() -> None:
    run, _ = started(Scripted(tokens=1))
    events, value = await asyncio.gather(heard(run.listen()), run.value())
    assert value == ANSWER
    assert events[-1] == Answered(answer=ANSWER)


async def test_one_who_comes_after_the_end_gets_the_end() -> None:
    run, _ = started(Scripted(tokens=3))
    await run.value()
    assert await heard(run.listen()) == [Answered(answer=ANSWER)]


async def test_the_deadline_ends_it() -> None:
    run, _ = started(Scripted(hangs=True), seconds=0.05)
    with pytest.raises(DeadlineExceeded):
        await run.value()


async def test_a_run_is_cancelled_when_its_last_listener_leaves() -> None:
    answerer = Scripted(tokens=1, hangs=True)
    run, recorder = started(answerer)
    async with run.listen() as first, run.listen() as second:
        await asyncio.gather(first.ready(), second.ready())
    with pytest.raises(Cancelled):
        await run.value()
    assert answerer.cancelled
    assert isinstance(recorder.events[-1], Failed)


async def test_one_who_leaves_before_it_has_begun_ends_it_too() -> None:
    ended: list[Run] = []
    recorder = Recorder()
    run = Run(Scripted(hangs=True), QUESTION, context(), recorder, ended=ended.append).start()
    async with run.listen():
        pass
    with pytest.raises(Cancelled):
        await run.value()
    assert ended == [run]
    assert [type(event) for event in recorder.events] == [Failed]


async def test_many_who_emit_at_once_are_all_held_back_and_let_go() -> None:
    class Crowd(Scripted):
        async def answer(self, question: Question, context: Context, emit: Emit) -> Answer:
            async def speak() -> None:
                for _ in range(PENDING_EVENTS):
                    await emit(Token(text="x"))

            await asyncio.gather(*(speak() for _ in range(5)))
            return ANSWER

    run, _ = started(Crowd())
    async with asyncio.timeout(5):
        assert len(await heard(run.listen())) == 5 * PENDING_EVENTS + 1


async def test_one_listener_leaving_does_not_end_it_for_the_other() -> None:
    answerer = Scripted(tokens=1, hangs=True)
    run, _ = started(answerer)
    async with run.listen() as stays:
        async with run.listen() as leaves:
            await leaves.ready()
        await stays.ready()
        assert not answerer.cancelled
        run.stop(ShuttingDown("bye"))
        assert [type(event) for event in await stays.ready()] == [Failed]


async def test_a_slow_listener_holds_the_run_back_and_loses_nothing() -> None:
    answerer = Scripted(tokens=PENDING_EVENTS * 4)
    run, _ = started(answerer)
    async with run.listen() as listener:
        first = await listener.ready()
        for _ in range(20):
            await asyncio.sleep(0)
        assert answerer.emitted <= len(first) + PENDING_EVENTS + 1
        rest = [event async for event in listener]
    assert len(first) + len(rest) == PENDING_EVENTS * 4 + 1


async def test_a_slow_listener_that_leaves_lets_the_others_go_on() -> None:
    run, _ = started(Scripted(tokens=PENDING_EVENTS * 2))
    stays = run.listen()
    async with run.listen() as slow:
        await slow.ready()
    async with stays:
        assert len([event async for event in stays]) == PENDING_EVENTS * 2 + 1


async def test_a_stopped_run_still_delivers_what_was_said() -> None:
    run, _ = started(Scripted(tokens=5, hangs=True))
    async with run.listen() as listener:
        while (events := await listener.ready()) and len(events) < 5:
            pass
        run.stop(ShuttingDown("bye"))
        run.stop(InternalError("later reasons do not count"))
        last = await listener.ready()
    assert isinstance(last[-1], Failed)
    assert last[-1].code == "shutting_down"


async def test_a_caller_who_gives_up_waiting_ends_the_run() -> None:
    answerer = Scripted(hangs=True)
    run, _ = started(answerer)
    waiting = asyncio.create_task(run.value())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert answerer.cancelled
