"""The history of calls to the operator's endpoints: per minute, bounded, and nothing of what callers name by URL."""

import asyncio
import time
from contextlib import nullcontext
from typing import Any

import pytest

from anabranch.domain.errors import GenerationFailed
from anabranch.domain.model import Context, Endpoint, Prompt, Query, SourceReply, Status
from anabranch.domain.signals import EndpointCalled
from anabranch.policies.observed_calls import LATE, ObservedGenerator, ObservedSource, Observer
from anabranch.telemetry.endpoint_history import LATENCIES, MAX_ENDPOINTS, MINUTES, EndpointHistory
from anabranch.testing import FakeGenerator, FakeSource, ManualClock, Recorder

WIKI = Endpoint(slug="wiki", url="https://space.example.com", operator=True)


class Calls:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0
        self.history = EndpointHistory(lambda: self.now)

    def call(self, latency_ms: float = 10, error: str | None = None, endpoint: Endpoint = WIKI) -> None:
        self.history.called(EndpointCalled(role="source", endpoint=endpoint, latency_ms=latency_ms, error=error))


def test_calls_are_counted_per_minute_with_errors_and_percentiles() -> None:
    calls = Calls()
    for latency_ms in range(1, 21):
        calls.call(latency_ms)
    calls.now += 60
    calls.call(500, "The source replied with status 500.")
    found = calls.history.of("source", WIKI)
    first, second = found.minutes
    assert (first.calls, first.errors, first.p50_ms, first.p95_ms) == (20, 0, 10, 19)
    assert (second.minute - first.minute, second.calls, second.errors, second.p50_ms) == (60, 1, 1, 500)
    assert (found.calls, found.errors) == (21, 1)
    assert (found.last_error, found.last_error_at) == ("The source replied with status 500.", calls.now)
    assert calls.history.of("model", WIKI).minutes == ()


def test_an_hour_is_kept_and_the_last_use_stays_known() -> None:
    calls = Calls()
    for _ in range(MINUTES + 30):
        calls.call()
        calls.now += 60
    assert len(calls.history.of("source", WIKI).minutes) == MINUTES - 1
    used, calls.now = calls.now - 60, calls.now + 3_600
    found = calls.history.of("source", WIKI)
    assert (found.minutes, found.last_used) == ((), used)


def test_its_memory_is_bounded() -> None:
    calls = Calls()
    for _ in range(10 * LATENCIES):
        calls.call()
    for number in range(2 * MAX_ENDPOINTS):
        calls.call(error="x" * 10_000, endpoint=Endpoint(slug=str(number), operator=True))
    assert len(calls.history._endpoints) == MAX_ENDPOINTS
    assert calls.history.of("source", WIKI).minutes == ()
    last = calls.history.of("source", Endpoint(slug=str(2 * MAX_ENDPOINTS - 1), operator=True))
    assert len(last.last_error or "") == 500


def _observed(reply: Any, recorder: Recorder, clock: ManualClock) -> ObservedSource:
    return ObservedSource(FakeSource(reply), Observer("source", WIKI, clock, recorder))


@pytest.mark.parametrize(
    ("status", "error", "noted"),
    [
        (Status.SUCCESS, None, [None]),
        (Status.ERROR, "It broke.", ["It broke."]),
        (Status.TIMEOUT, None, ["It replied: timeout."]),
        (Status.SKIPPED, "Its circuit is open.", []),
    ],
)
async def test_a_call_is_noted_unless_the_circuit_is_open(status: Status, error: str | None, noted: list[str]) -> None:
    recorder, clock = Recorder(), ManualClock()
    source = _observed(SourceReply(path="wiki", status=status, error=error), recorder, clock)
    await source.search(Query(text="?", limit=1, similarity_threshold=0), Context(correlation_id="", deadline=9e9))
    assert [signal.error for signal in recorder.signals if isinstance(signal, EndpointCalled)] == noted


async def test_a_call_that_is_cancelled_counts_only_at_its_deadline() -> None:
    for deadline, noted in ((9e9, []), (0.0, [LATE])):
        recorder = Recorder()
        hanging = FakeSource(SourceReply(path="wiki", status=Status.SUCCESS), delay_s=60)
        source = ObservedSource(hanging, Observer("source", WIKI, ManualClock(), recorder))
        context = Context(correlation_id="", deadline=deadline)
        asking = asyncio.create_task(source.search(Query(text="?", limit=1, similarity_threshold=0), context))
        while not hanging.queries:  # noqa: ASYNC110
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
        assert [signal.error for signal in recorder.signals if isinstance(signal, EndpointCalled)] == noted


@pytest.mark.parametrize(("fail_after", "failed"), [(None, False), (1, True)])
async def test_a_models_call_is_noted_at_its_end(fail_after: int | None, failed: bool) -> None:
    recorder = Recorder()
    inner = FakeGenerator(["Two", " words"], fail_after=fail_after)
    model = ObservedGenerator(inner, Observer("model", WIKI, ManualClock(), recorder))
    prompt = Prompt(question="?", messages=(), max_tokens=1, temperature=0, passages=(), version="1")
    with pytest.raises(GenerationFailed) if failed else nullcontext():
        assert [delta.text async for delta in model.generate(prompt, Context(correlation_id="", deadline=9e9))]
    [noted] = [signal for signal in recorder.signals if isinstance(signal, EndpointCalled)]
    assert (noted.role, noted.error is not None) == ("model", failed)


def test_a_call_takes_microseconds() -> None:
    """A question takes about 2 ms: a hundredth of that is 20 µs."""
    calls, best = Calls(), 1.0
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(1_000):
            calls.call()
        best = min(best, (time.perf_counter() - began) / 1_000)
    assert best < 20e-6
