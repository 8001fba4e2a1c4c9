"""Model calls are retried if that can help, within deadline and budget, and never after the first text."""

import asyncio
import random
from contextlib import aclosing
from email.utils import formatdate
from functools import partial

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.domain.contracts import Generator
from anabranch.domain.errors import FailureKind, GenerationFailed, GenerationTimedOut, UpstreamError
from anabranch.domain.model import Context, Endpoint
from anabranch.domain.signals import Retried
from anabranch.models.remote import ModelServer, OpenAIModel, SpaceModel
from anabranch.policies.breaker import Policy, RetryBudget
from anabranch.policies.resilience import backoff_s, retry_after_s
from anabranch.testing import Failure, Space
from support.examples import examples
from support.scripted_source import PROMPT, Bench, Scripted, Step, answering, down, reaching_out, until

MODEL = Endpoint(slug="writer", owner="mia", url="http://first.example", operator=True)


async def said(generator: Generator, context: Context, heard: list[str] | None = None) -> str:
    heard = [] if heard is None else heard
    async with aclosing(generator.generate(PROMPT, context)) as deltas:
        async for delta in deltas:
            heard.append(delta.text)
    return "".join(heard)


async def test_transient_model_failures_are_retried_after_one_and_two_seconds() -> None:
    bench = Bench()
    inner = Scripted([down()], [down()], ["Because."])
    assert await said(bench.resilience.generator(MODEL, inner), bench.context()) == "Because."
    assert bench.slept == [1.0, 2.0]
    assert bench.telemetry.signals == [Retried(upstream="mia/writer")] * 2
    assert [span.ended for span in bench.telemetry.spans] == [True] * 3


async def test_the_last_failure_is_raised_after_all_retries() -> None:
    bench = Bench()
    inner = Scripted([down()])
    with pytest.raises(GenerationFailed, match="503") as failed:
        await said(bench.resilience.generator(MODEL, inner), bench.context())
    assert len(inner.contexts) == 3
    assert failed.value.details == {"upstream_status": 503}


@given(st.floats(0, 1, exclude_max=True), st.integers(0, 9))
def test_backoff_has_jitter_between_half_and_all(chance: float, attempt: int) -> None:
    assert 0.5 * 2**attempt <= backoff_s(1.0, attempt, lambda: chance) <= 2**attempt


async def test_retries_wait_with_jitter() -> None:
    bench = Bench(chance=0.0)
    await said(bench.resilience.generator(MODEL, Scripted([down()], [down()], ["x"])), bench.context())
    assert bench.slept == [0.5, 1.0]
    assert 0.5 <= backoff_s(1.0, 0, random.random) <= 1.0


@pytest.mark.parametrize("script", [["One ", down()], ["", "One ", down()]], ids=["at once", "after a blank"])
async def test_a_model_that_has_produced_text_is_not_retried(script: list[Step]) -> None:
    bench = Bench()
    inner = Scripted(script)
    heard: list[str] = []
    with pytest.raises(GenerationFailed):
        await said(bench.resilience.generator(MODEL, inner), bench.context(), heard)
    assert "".join(heard) == "One "
    assert len(inner.contexts) == 1


async def test_a_model_that_has_produced_empty_text_is_retried() -> None:
    bench = Bench()
    assert await said(bench.resilience.generator(MODEL, Scripted(["", down()], ["x"])), bench.context()) == "x"


@pytest.mark.parametrize("failure_kind", [FailureKind.REQUEST, FailureKind.UNUSABLE])
async def test_permanent_model_failures_are_not_retried(failure_kind: FailureKind) -> None:
    bench = Bench()
    inner = Scripted([GenerationFailed("No.", failure_kind)])
    with pytest.raises(GenerationFailed):
        await said(bench.resilience.generator(MODEL, inner), bench.context())
    assert len(inner.contexts) == 1


async def test_retry_after_is_respected_within_the_deadline() -> None:
    bench = Bench()
    busy = GenerationFailed("Too often.", FailureKind.BUSY, 7.0)
    assert await said(bench.resilience.generator(MODEL, Scripted([busy], ["x"])), bench.context()) == "x"
    assert bench.slept == [7.0]
    inner = Scripted([busy], ["x"])
    with pytest.raises(GenerationFailed):
        await said(bench.resilience.generator(MODEL, inner), bench.context(left_s=7.0))
    assert (len(inner.contexts), bench.slept) == (1, [7.0])


@given(st.floats(0.1, 4.0), st.floats(0, 0.999))
@settings(max_examples=examples(50), deadline=None)
def test_no_retry_waits_beyond_the_deadline(left_s: float, chance: float) -> None:
    async def asked() -> None:
        bench = Bench(chance=chance)
        context = bench.context(left_s)
        with pytest.raises(GenerationFailed):
            await said(bench.resilience.generator(MODEL, Scripted([down()])), context)
        assert bench.clock.monotonic() < context.deadline

    asyncio.run(asked())


@pytest.mark.parametrize(
    ("header", "wait_s"),
    [("7", 7.0), (" 0 ", 0.0), (formatdate(1_030, usegmt=True), 30.0), (formatdate(900, usegmt=True), 0.0)]
    + [(junk, None) for junk in ("", "soon", "-3", "1.5", "٣", "Mon, 99 Foo 2020", "9" * 5 + "x")],
)
def test_retry_after_in_seconds_or_as_a_date(header: str, wait_s: float | None) -> None:
    assert retry_after_s(header, lambda: 1_000.0) == wait_s


# --- the breaker


async def test_a_model_that_fails_too_often_is_not_called() -> None:
    bench = Bench(Policy(min_calls=3, model_retries=2))
    with pytest.raises(GenerationFailed, match="503"):
        await said(bench.resilience.generator(MODEL, Scripted([down()])), bench.context())
    inner = Scripted(["x"])
    with pytest.raises(GenerationFailed, match="failed too often: its circuit is open for 10 more seconds"):
        await said(bench.resilience.generator(MODEL, inner), bench.context())
    assert inner.contexts == []
    bench.clock.advance(10)
    assert await said(bench.resilience.generator(MODEL, inner), bench.context()) == "x"
    assert bench.resilience.upstreams.states() == {"mia/writer": "closed"}


async def test_a_failure_that_opens_the_breaker_is_not_retried() -> None:
    bench = Bench(Policy(min_calls=1))
    with pytest.raises(GenerationFailed, match="503"):
        await said(bench.resilience.generator(MODEL, Scripted([down()])), bench.context())
    assert bench.slept == []


async def test_refused_requests_do_not_open_the_breaker_of_a_model() -> None:
    bench = Bench(Policy(min_calls=1, model_retries=0))
    for failure_kind in (FailureKind.REQUEST, FailureKind.BUSY):
        with pytest.raises(GenerationFailed):
            await said(
                bench.resilience.generator(MODEL, Scripted([GenerationFailed("No.", failure_kind)])), bench.context()
            )
    assert bench.resilience.upstreams.states() == {"mia/writer": "closed"}


async def test_the_first_text_of_a_trial_call_closes_the_breaker_and_a_cancelled_one_allows_another() -> None:
    bench = Bench(Policy(min_calls=1, model_retries=0))
    with pytest.raises(GenerationFailed):
        await said(bench.resilience.generator(MODEL, Scripted([down()])), bench.context())
    bench.clock.advance(10)
    async with aclosing(bench.resilience.generator(MODEL, Scripted(["", "x"])).generate(PROMPT, bench.context())) as it:
        assert (await anext(it)).text == ""
        assert bench.resilience.upstreams.states() == {"mia/writer": "half_open"}
        with pytest.raises(GenerationFailed, match="half open until the trial call ends"):
            await said(bench.resilience.generator(MODEL, Scripted(["y"])), bench.context())
    async with aclosing(
        bench.resilience.generator(MODEL, Scripted(["x", "y"])).generate(PROMPT, bench.context())
    ) as it:
        assert (await anext(it)).text == "x"
        assert bench.resilience.upstreams.states() == {"mia/writer": "closed"}


@pytest.mark.parametrize(("passes_s", "state"), [(0.0, "closed"), (30.0, "open")])
async def test_a_model_timeout_counts_as_a_failure_and_a_disconnected_client_does_not(
    passes_s: float, state: str
) -> None:
    bench = Bench(Policy(min_calls=1))
    async with Space() as space, reaching_out() as outbound:
        space.fails("hang", Failure.HANG)
        endpoint = Endpoint(slug="hang", url=space.url, operator=True)
        inner = SpaceModel(endpoint, outbound, streaming=False)
        task = asyncio.create_task(said(bench.resilience.generator(endpoint, inner), bench.context(left_s=30)))
        await until(lambda: space.requests)
        bench.clock.advance(passes_s)
        task.cancel()
        await asyncio.wait([task])
        assert bench.resilience.upstreams.states() == {"hang": state}
        await until(lambda: space.requests[0].disconnected)


# --- the budget


async def test_the_retry_budget_allows_twenty_retries_for_a_hundred_calls() -> None:
    bench = Bench(Policy(min_calls=1_000))
    inner = Scripted([down(wait_s=0.0)])
    for _ in range(100):
        with pytest.raises(GenerationFailed):
            await said(bench.resilience.generator(MODEL, inner), bench.context())
    assert len(inner.contexts) <= 120
    assert len(inner.contexts) >= 119
    assert bench.count(Retried) == len(inner.contexts) - 100


@given(
    st.lists(st.tuples(st.floats(0, 20), st.booleans()), max_size=200),
    st.sampled_from([0.0, 0.1, 0.2, 1.0]),
)
@settings(deadline=None)
def test_no_window_has_more_retries_than_its_share(steps: list[tuple[float, bool]], share: float) -> None:
    budget, now = RetryBudget(share, 30.0), 500.0
    calls: list[float] = []
    spent: list[float] = []
    for passes_s, again in steps:
        now += passes_s
        if again and budget.take(now):
            spent.append(now)
            recent = [when for when in spent if when > now - 30.0]
            assert len(recent) <= max(2, share * sum(when > now - 30.0 for when in calls))
        elif not again:
            budget.called(now)
            calls.append(now)


# --- which failures of a real model are which


@pytest.mark.parametrize(
    ("failure", "failure_kind"),
    [
        (Failure.STATUS_401, FailureKind.REQUEST),
        (Failure.STATUS_404, FailureKind.REQUEST),
        (Failure.POLICY_VIOLATION, FailureKind.REQUEST),
        (Failure.REDIRECT, FailureKind.REQUEST),
        (Failure.STATUS_429, FailureKind.BUSY),
        (Failure.STATUS_503, FailureKind.DOWN),
        (Failure.HTML_500, FailureKind.DOWN),
        (Failure.RESET, FailureKind.DOWN),
        (Failure.CUT, FailureKind.DOWN),
        (Failure.HTML, FailureKind.UNUSABLE),
        (Failure.BAD_JSON, FailureKind.UNUSABLE),
        (Failure.WRONG_SHAPE, FailureKind.UNUSABLE),
        (Failure.HUGE, FailureKind.UNUSABLE),
    ],
)
async def test_each_failure_of_a_model_has_its_kind(failure: Failure, failure_kind: FailureKind) -> None:
    async with Space(everything=True) as space, reaching_out() as outbound:
        endpoint = Endpoint(slug=failure.value, url=space.url, operator=True)
        with pytest.raises(GenerationFailed) as failed:
            await said(SpaceModel(endpoint, outbound, streaming=False), Bench().context())
    assert failed.value.failure_kind is failure_kind
    assert failed.value.wait_s == (1.0 if failure is Failure.STATUS_429 else None)


@pytest.mark.parametrize("url", ["", "ftp://x", "http://10.0.0.1:1", "http://127.0.0.1:9/?q"])
async def test_a_blocked_address_is_a_failure_of_the_request(url: str) -> None:
    async with reaching_out() as outbound:
        endpoint = Endpoint(slug="m", url=url)
        for model in (SpaceModel(endpoint, outbound, streaming=False), OpenAIModel(endpoint, outbound)):
            with pytest.raises(GenerationFailed) as failed:
                await said(model, Bench().context())
            assert failed.value.failure_kind is FailureKind.REQUEST


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
async def test_a_model_that_answers_with_a_transient_status_is_asked_again(status: int) -> None:
    good = {"choices": [{"message": {"content": "Because."}, "finish_reason": "stop"}]}
    replies = iter([web.Response(status=status), web.json_response(good)])
    bench = Bench()
    async with answering(lambda: next(replies)) as url, reaching_out() as outbound:
        endpoint = Endpoint(slug="m", url=url, operator=True)
        assert await said(bench.resilience.generator(endpoint, OpenAIModel(endpoint, outbound)), bench.context()) == (
            "Because."
        )
    assert len(bench.slept) == 1


async def test_a_refused_connection_is_a_transient_failure() -> None:
    async with reaching_out() as outbound:
        endpoint = Endpoint(slug="m", url="http://127.0.0.1:9", operator=True)
        with pytest.raises(GenerationFailed) as failed:
            await said(OpenAIModel(endpoint, outbound), Bench().context())
    assert failed.value.failure_kind is FailureKind.DOWN


@pytest.mark.parametrize(
    ("code", "failure_kind"), [("500", FailureKind.DOWN), ("400", FailureKind.REQUEST), ("null", FailureKind.REQUEST)]
)
async def test_the_code_of_an_error_in_a_stream_decides_its_kind(code: str, failure_kind: FailureKind) -> None:
    body = f'data: {{"error": {{"message": "No", "code": {code}}}}}\n\n'.encode()
    reply = partial(web.Response, body=body, content_type="text/event-stream")
    async with answering(reply) as url, reaching_out() as outbound:
        with pytest.raises(GenerationFailed) as failed:
            await said(OpenAIModel(Endpoint(slug="m", url=url, operator=True), outbound), Bench().context())
    assert failed.value.failure_kind is failure_kind


@pytest.mark.parametrize(
    ("failure", "waits"),
    [(Failure.HUGE, 0), (Failure.STATUS_404, 0), (Failure.STATUS_503, 3), (Failure.RESET, 3), (Failure.STATUS_429, 3)],
)
async def test_embedding_and_rerank_calls_are_retried_only_for_transient_failures(failure: Failure, waits: int) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async with Space(everything=True) as space, reaching_out() as outbound:
        server = ModelServer(f"{space.url}/api/v1/endpoints/{failure.value}/query", outbound, sleep=sleep)
        with pytest.raises(UpstreamError):
            await server.post({})
        assert len(space.requests) == waits + 1
    assert len(slept) == waits
    if failure is Failure.STATUS_429:
        assert slept == [1.0] * 3, "as long as it asks"


def test_a_generation_timeout_has_a_failure_kind() -> None:
    assert GenerationTimedOut("Slow.", FailureKind.DOWN).failure_kind.temporary
    assert GenerationFailed("Why?").failure_kind is FailureKind.REQUEST
