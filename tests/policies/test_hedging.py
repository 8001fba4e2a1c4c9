"""Hedging: a source's alternate is called beside it when it is slow, and instead of it when it fails."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from anabranch.configuration.settings import load
from anabranch.domain.contracts import Source, SystemClock
from anabranch.domain.errors import ConfigurationError
from anabranch.domain.model import Context, Endpoint, Passage, Query, SourceReply, Status
from anabranch.domain.signals import Hedged
from anabranch.network.outbound import AiohttpOutbound
from anabranch.policies.breaker import LATENCIES, MIN_LATENCIES, Policy, Upstream
from anabranch.policies.resilience import Resilience
from anabranch.sources.space import SpaceSource
from anabranch.testing import Document, Failure, FakeSource, ManualClock, Recorder, Space
from support.scripted_source import (
    BROKEN,
    DOUBLE,
    ENDPOINT,
    GOOD,
    QUERY,
    REFUSED,
    Bench,
    Held,
    reaching_out,
    turns,
    until,
)

OTHER = SourceReply(
    path="alice/docs",
    status=Status.SUCCESS,
    passages=(Passage(source="alice/docs", title="T", text="From the alternate.", score=1.0),),
)
WORSE = SourceReply(path="alice/docs", status=Status.ERROR, error="It broke, too.", fault=True)


def double(bench: Bench, first: Source, second: Source) -> Source:
    return bench.resilience.source(DOUBLE, lambda endpoint: first if endpoint.url == DOUBLE.url else second)


async def accustomed(bench: Bench, times: int = MIN_LATENCIES, usual_s: float = 0.0) -> None:
    """The first has answered in the usual time often enough for its p95 to be known. By default it took no time: then
    its alternate is asked as soon as it does not answer in the same breath."""

    def usual(query: Query, context: Context) -> SourceReply:
        bench.clock.advance(usual_s)
        return GOOD

    source = double(bench, FakeSource(usual), Held())
    for _ in range(times):
        assert await source.search(QUERY, bench.context()) == GOOD


async def is_asked_alone(bench: Bench) -> None:
    """However slow the first is, its alternate is not asked."""
    slow, other = Held(), Held()
    search = asyncio.create_task(double(bench, slow, other).search(QUERY, bench.context()))
    await until(lambda: slow.asked)
    await turns()
    assert not other.asked
    slow.reply(GOOD)
    assert await search == GOOD


def hedges(bench: Bench) -> list[bool]:
    return [signal.won for signal in bench.telemetry.signals if isinstance(signal, Hedged)]


async def test_a_source_slower_than_its_p95_is_hedged_and_cancelled() -> None:
    bench = Bench()
    await accustomed(bench)
    slow = Held()
    assert await double(bench, slow, FakeSource(OTHER)).search(QUERY, bench.context()) == OTHER
    assert (slow.asked, slow.cancelled) == (1, 1)
    assert hedges(bench) == [True]


async def test_a_slow_source_that_replies_first_wins_over_its_alternate() -> None:
    bench = Bench()
    await accustomed(bench)
    slow, other = Held(), Held()
    search = asyncio.create_task(double(bench, slow, other).search(QUERY, bench.context()))
    await until(lambda: other.asked)
    slow.reply(GOOD)
    assert await search == GOOD
    assert (slow.cancelled, other.cancelled) == (0, 1)
    assert hedges(bench) == [False]


@pytest.mark.parametrize("first_fails_first", [True, False])
async def test_if_source_and_alternate_fail_the_reply_of_the_source_counts(first_fails_first: bool) -> None:
    bench = Bench()
    await accustomed(bench)
    slow, other = Held(), Held()
    search = asyncio.create_task(double(bench, slow, other).search(QUERY, bench.context()))
    await until(lambda: other.asked)
    steps: list[Callable[[], None]] = [lambda: slow.reply(BROKEN), lambda: other.reply(WORSE)]
    for step in steps if first_fails_first else reversed(steps):
        step()
        await asyncio.sleep(0)
    assert await search == BROKEN


async def test_a_failed_alternate_is_ignored_and_a_failed_source_is_replaced() -> None:
    for first, second, expected in ((GOOD, WORSE, GOOD), (BROKEN, OTHER, OTHER)):
        bench = Bench()
        await accustomed(bench)
        slow, other = Held(), Held()
        search = asyncio.create_task(double(bench, slow, other).search(QUERY, bench.context()))
        await until(lambda other=other: other.asked)  # type: ignore[misc]
        if first is BROKEN:
            slow.reply(first)
            await asyncio.sleep(0)
            other.reply(second)
        else:
            other.reply(second)
            await asyncio.sleep(0)
            slow.reply(first)
        assert await search == expected


@pytest.mark.parametrize(
    ("known", "usual_s"), [(MIN_LATENCIES - 1, 0.0), (MIN_LATENCIES, 1_000.0)], ids=["too few", "not yet slow"]
)
async def test_the_alternate_is_not_called_before_the_p95_nor_without_one(known: int, usual_s: float) -> None:
    bench = Bench(Policy(window_s=100_000))
    await accustomed(bench, known, usual_s)
    await is_asked_alone(bench)


@pytest.mark.parametrize("known", [0, MIN_LATENCIES], ids=["p95 unknown", "p95 known"])
async def test_a_failed_source_is_replaced_by_its_alternate_and_a_refusal_is_not(known: int) -> None:
    bench = Bench(Policy(retry_budget=0.0, min_calls=1_000))
    await accustomed(bench, known)
    for _ in range(10):
        assert await double(bench, FakeSource(BROKEN), FakeSource(OTHER)).search(QUERY, bench.context()) == OTHER
    assert hedges(bench) == [True] * 10, "a failover is not charged to the budget"
    other = FakeSource(OTHER)
    assert await double(bench, FakeSource(REFUSED), other).search(QUERY, bench.context()) == REFUSED
    assert other.queries == []
    assert await double(bench, FakeSource(BROKEN), FakeSource(WORSE)).search(QUERY, bench.context()) == BROKEN


async def test_a_source_with_an_open_circuit_is_replaced_by_its_alternate() -> None:
    bench = Bench(Policy(min_calls=1))
    await double(bench, FakeSource(BROKEN), FakeSource(OTHER)).search(QUERY, bench.context())
    first = FakeSource(GOOD)
    assert await double(bench, first, FakeSource(OTHER)).search(QUERY, bench.context()) == OTHER
    assert first.queries == []
    assert bench.resilience.upstreams.states() == {"alice/docs": "open", "alice/docs (alternate)": "closed"}
    for _ in range(2):
        await double(bench, first, FakeSource(BROKEN)).search(QUERY, bench.context())
    reply = await double(bench, first, FakeSource(OTHER)).search(QUERY, bench.context())
    assert reply.status is Status.SKIPPED
    assert bench.resilience.upstreams.states() == {"alice/docs": "open", "alice/docs (alternate)": "open"}


async def test_hedged_calls_stay_within_the_retry_budget() -> None:
    bench = Bench(Policy(retry_budget=0.1))
    await accustomed(bench, MIN_LATENCIES)
    bench.clock.advance(60)
    for _ in range(2):
        assert await double(bench, Held(), FakeSource(OTHER)).search(QUERY, bench.context()) == OTHER
    await is_asked_alone(bench)


async def test_cancelling_a_hedged_search_cancels_both_calls() -> None:
    bench = Bench()
    await accustomed(bench)
    slow, other = Held(), Held()
    search = asyncio.create_task(double(bench, slow, other).search(QUERY, bench.context()))
    await until(lambda: other.asked)
    search.cancel()
    await asyncio.wait([search])
    assert search.cancelled()
    assert (slow.cancelled, other.cancelled) == (1, 1)
    assert set(bench.resilience.upstreams.states().values()) == {"closed"}


def test_the_p95_is_that_of_the_last_100_latencies() -> None:
    upstream = Upstream("docs", "node.example", Policy(), ManualClock(), Recorder())
    for number in range(MIN_LATENCIES - 1):
        upstream.latencies.append(number)
        assert upstream.slow_s is None
    upstream.latencies.append(MIN_LATENCIES - 1)
    assert upstream.slow_s == 18
    upstream.latencies.extend(range(LATENCIES))
    assert upstream.slow_s == 94


# --- two real Spaces


@pytest.fixture
async def outbound() -> AsyncIterator[AiohttpOutbound]:
    async with reaching_out() as out:
        yield out


def between(
    first: str, second: str, outbound: AiohttpOutbound, policy: Policy | None = None
) -> tuple[Callable[[], Source], Recorder]:
    telemetry = Recorder()
    resilience = Resilience(policy or Policy(), SystemClock(), telemetry)
    endpoint = Endpoint(slug="docs", owner="alice", url=first, alternate=second, operator=True, token="t")
    return lambda: resilience.source(endpoint, lambda each: SpaceSource(each, outbound)), telemetry


def now() -> Context:
    return Context(correlation_id="c", deadline=time.monotonic() + 20)


async def test_the_connection_of_a_source_that_loses_to_its_alternate_is_closed(outbound: AiohttpOutbound) -> None:
    async with Space() as first, Space() as second:
        for space, text in ((first, "first"), (second, "second")):
            space.source("docs", documents=[Document(title="T", content=text)], token="t")
        source, telemetry = between(first.url, second.url, outbound)
        for _ in range(MIN_LATENCIES):
            assert (await source().search(QUERY, now())).passages[0].text == "first"
        first.source("docs", delay_s=30)
        reply = await source().search(QUERY, now())
        assert reply.passages[0].text == "second"
        await first.wait_for(lambda: first.requests[-1].disconnected)
        await first.wait_for(lambda: first.open_connections == 0)
        assert Hedged(upstream="alice/docs", won=True) in telemetry.signals


async def test_an_unreachable_source_is_replaced_and_two_unreachable_ones_fail(outbound: AiohttpOutbound) -> None:
    async with Space() as gone:
        dead = gone.url
    async with Space() as second:
        second.source("docs", documents=[Document(title="T", content="second")])
        source, _ = between(dead, second.url, outbound)
        assert (await source().search(QUERY, now())).passages[0].text == "second"
        second.fails("docs", Failure.STATUS_503)
        both = await source().search(QUERY, now())
    assert (both.status, both.error, both.fault) == (Status.ERROR, "No connection could be made.", True)


@pytest.mark.parametrize(
    ("failure", "fault"),
    [
        (Failure.STATUS_401, False),
        (Failure.STATUS_404, False),
        (Failure.STATUS_429, False),
        (Failure.POLICY_VIOLATION, False),
        (Failure.REDIRECT, False),
        (Failure.STATUS_500, True),
        (Failure.HTML, True),
        (Failure.WRONG_SHAPE, True),
        (Failure.RESET, True),
        (Failure.CUT, True),
        (Failure.HUGE, True),
    ],
)
async def test_a_source_reply_says_whether_the_upstream_failed(
    outbound: AiohttpOutbound, failure: Failure, fault: bool
) -> None:
    async with Space(everything=True) as space:
        endpoint = Endpoint(slug=failure.value, url=space.url, operator=True)
        assert (await SpaceSource(endpoint, outbound).search(QUERY, now())).fault is fault


async def test_a_blocked_address_is_not_a_failure_of_the_source(outbound: AiohttpOutbound) -> None:
    for url in ("http://10.0.0.1:1", "ftp://x", ""):
        reply = await SpaceSource(Endpoint(slug="docs", url=url), outbound).search(QUERY, now())
        assert (reply.status, reply.fault) == (Status.ERROR, False)


# --- the file


def configured(tmp_path: Path, text: str) -> dict[str, Endpoint]:
    file = tmp_path / "anabranch.yaml"
    file.write_text(text, encoding="utf-8")
    return load({}, file).sources


def test_an_alternate_is_configured_in_the_file(tmp_path: Path) -> None:
    text = "sources: {handbook: {url: 'http://a.example', slug: docs, alternate: 'http://b.example'}}"
    assert configured(tmp_path, text)["handbook"].alternate == "http://b.example"
    assert ENDPOINT.alternate is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "sources: {h: {url: 'http://a.example', slug: d, alternate: nowhere}}",
            "sources.h.alternate takes a URL that",
        ),
        (
            "models: {m: {url: 'http://a.example', slug: d, alternate: 'http://b.example'}}",
            "only sources have an alternate",
        ),
    ],
)
def test_an_invalid_alternate_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        configured(tmp_path, text)
