"""The fakes keep the contracts of the domain."""

import asyncio

import pytest

from anabranch.domain.contracts import Clock, Directory, Generator, Source, Telemetry
from anabranch.domain.errors import GenerationFailed
from anabranch.domain.events import Token
from anabranch.domain.model import Context, Delta, Endpoint, Prompt, Query, Question, SourceReply, Status, Usage
from anabranch.testing import FakeDirectory, FakeGenerator, FakeSource, ManualClock, Recorder

CONTEXT = Context(correlation_id="c", deadline=1.0)
PROMPT = Prompt(question="", messages=(), max_tokens=1, temperature=0, passages=(), version="1")
QUERY = Query(text="?", limit=1, similarity_threshold=0)
REPLY = SourceReply(path="alice/docs", status=Status.SUCCESS)


async def collect(generator: Generator) -> list[Delta]:
    return [delta async for delta in generator.generate(PROMPT, CONTEXT)]


async def test_a_directory_finds_by_path() -> None:
    source: Source = FakeSource(REPLY)
    generator: Generator = FakeGenerator(["a"])
    directory: Directory = FakeDirectory({"alice/docs": source}, {"scribe": generator})
    assert directory.source(Endpoint(slug="docs", owner="alice")) is source
    assert directory.generator(Endpoint(slug="scribe")) is generator


async def test_a_source_replies_or_computes_its_reply() -> None:
    source = FakeSource(REPLY)
    assert await source.search(QUERY, CONTEXT) is REPLY
    assert source.queries == [QUERY]
    computed = FakeSource(lambda query, context: SourceReply(path=query.text, status=Status.ERROR))
    assert (await computed.search(QUERY, CONTEXT)).path == "?"


async def test_a_delayed_source_can_be_cancelled() -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(FakeSource(REPLY, delay_s=60).search(QUERY, CONTEXT), timeout=0.01)


async def test_fake_generator_yields_words_and_fails_on_demand() -> None:
    usage = Usage(total_tokens=2)
    whole = await collect(FakeGenerator(["a ", "b"], usage=usage))
    assert whole == [Delta(text="a "), Delta(text="b"), Delta(text="", usage=usage)]
    broken = FakeGenerator(["a ", "b"], fail_after=1).generate(PROMPT, CONTEXT)
    assert await anext(broken) == Delta(text="a ")
    with pytest.raises(GenerationFailed):
        await anext(broken)


def test_recorder_records_telemetry_calls() -> None:
    recorder = Recorder()
    telemetry: Telemetry = recorder
    crash = ValueError()
    telemetry.asked(Question(text="?"), CONTEXT)
    telemetry.happened(Token(text="a"), CONTEXT)
    telemetry.crashed(crash, CONTEXT)
    assert recorder.questions == [Question(text="?")]
    assert (recorder.events, recorder.crashes) == ([Token(text="a")], [crash])


def test_manual_clock_moves_only_by_advance() -> None:
    clock = ManualClock(5)
    timer: Clock = clock
    clock.advance(1.5)
    assert timer.monotonic() == 6.5
