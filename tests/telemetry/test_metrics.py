"""Prometheus metrics: every question is counted once, with its outcome, and labels are bounded."""

import asyncio
import gzip
import io
import json
import math
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, get_args

import aiohttp
import msgspec
import psutil
import pytest

from anabranch.configuration.settings import Settings
from anabranch.domain.events import Answered, AnswerEvent, Failed, RetrievalFinished, SourceReplied, Token
from anabranch.domain.mcp import McpServer
from anabranch.domain.model import (
    Answer,
    CheckedSentence,
    Context,
    Endpoint,
    Ground,
    Question,
    SourceReply,
    Status,
    Timings,
    Usage,
)
from anabranch.domain.signals import (
    AnswerShared,
    BreakerStateChanged,
    CacheLookup,
    EvidenceJudged,
    Hedged,
    Load,
    McpServerStateChanged,
    RateLimitChecked,
    RedisStateChanged,
    Rejected,
    Retried,
    Signal,
    TokensUsed,
)
from anabranch.entrypoints.cli import resources
from anabranch.knowledge.records import keys
from anabranch.knowledge.records.sqlite import SqliteDatabase
from anabranch.telemetry.log import configured_log
from anabranch.telemetry.metrics import CombinedTelemetry, Metrics
from anabranch.testing import ManualClock, Space
from conftest import Server, ref
from support.metrics_scrape import Scraped, scrape
from support.server_process import PATIENCE_S, READY, Program, serving

Serve = Callable[..., AbstractAsyncContextManager[Server]]

SPENT = Usage(prompt_tokens=70, completion_tokens=9, total_tokens=79)
ANSWER = Answer(
    text="An arm of a river.",
    ground=Ground.DOCUMENTS,
    model="mia/scribe",
    usage=SPENT,
    timings=Timings(total_ms=40),
)


class Watch:
    """The server's telemetry, and its exposition."""

    def __init__(self, settings: Settings | None = None, metrics: Metrics | None = None) -> None:
        settings = settings or Settings()
        self.log = io.StringIO()
        self.clock = ManualClock()
        self.metrics = metrics or Metrics(settings)
        self.telemetry = CombinedTelemetry(configured_log(settings, self.log), self.metrics, settings, clock=self.clock)

    def question(self, *events: AnswerEvent, surface: str = "chat") -> None:
        context = Context(correlation_id="c", deadline=1.0, surface=surface, user_id="ursula")
        self.telemetry.asked(Question(text="What is an anabranch?"), context)
        for event in events:
            self.telemetry.happened(event, context)

    def signals(self, *signals: Signal) -> None:
        for one in signals:
            self.telemetry.noted(one)

    @property
    def scraped(self) -> Scraped:
        text, _ = self.metrics.exposition("")
        return Scraped(text.decode())


@pytest.fixture
def watch() -> Watch:
    return Watch()


def replied(path: str, status: Status = Status.SUCCESS, latency_ms: int = 20) -> SourceReplied:
    return SourceReplied(index=0, reply=SourceReply(path=path, status=status, latency_ms=latency_ms))


# --- what is counted


def test_metrics_of_the_alerts_exist_before_the_first_question(watch: Watch) -> None:
    fresh = watch.scraped
    for name in (
        "rag_stream_requests_total",
        "rag_stream_errors_total",
        "rag_stream_cancelled_total",
        "rag_retrieval_latency_ms_bucket",
        "rag_retrieval_latency_ms_count",
        "rag_cache_hit_total",
        "rag_cache_miss_total",
        "rag_guardrail_triggered_total",
        "llm_tokens_in_total",
        "llm_tokens_out_total",
        "anabranch_questions_running",
        "anabranch_questions_waiting",
    ):
        assert fresh.value(name) == 0, name
    assert fresh.values("rag_cache_hit_total", "cache").keys() == {"answer", "embedding", "evidence"}
    assert fresh.values("rag_guardrail_triggered_total", "reason").keys() == {
        "no_sources",
        "all_failed",
        "nothing_found",
        "weak",
        "abstained",
        "unfaithful",
        "unsupported",
    }
    assert {"rate_limited", "generation_failed", "internal_error"} <= fresh.values(
        "rag_stream_errors_total", "error_code"
    ).keys()
    assert "cancelled" not in fresh.values("rag_stream_errors_total", "error_code")
    for surface in ("rag_stream", "chat", "query", "endpoints", "library"):
        assert fresh.value("anabranch_questions_total", surface=surface) == 0
    assert fresh.value("anabranch_rejected_total", surface="chat", error_code="overloaded") == 0
    assert fresh.value("anabranch_limiter_total", surface="rag_stream", decision="refused") == 0
    assert fresh.value("anabranch_build_info") == 1
    assert "anabranch_redis_reachable" not in fresh.names, "no Redis is configured"
    assert not any(name.endswith("_created") for name in fresh.names)


def test_an_answered_question_is_counted_with_its_sources_latency_and_tokens(watch: Watch) -> None:
    watch.question(
        replied("alice/docs"),
        replied("bob/docs", Status.TIMEOUT, 1_900),
        RetrievalFinished(passages=3, time_ms=1_900),
        Token(text="An"),
        Answered(answer=ANSWER),
        surface="query",
    )
    watch.signals(TokensUsed(model="mia/scribe", usage=SPENT))
    after = watch.scraped
    assert after.value("anabranch_questions_total", surface="query", outcome="answered") == 1
    assert after.value("anabranch_questions_total") == 1
    assert after.value("anabranch_question_latency_ms_sum", surface="query") == 40
    assert after.value("rag_retrieval_latency_ms_bucket", surface="query", le="2000.0") == 1
    assert after.value("rag_retrieval_latency_ms_bucket", surface="query", le="1500.0") == 0
    assert after.value("anabranch_source_replies_total", source="alice/docs", status="success") == 1
    assert after.value("anabranch_source_replies_total", source="bob/docs", status="timeout") == 1
    assert after.value("anabranch_source_latency_ms_sum", source="bob/docs") == 1_900
    assert after.value("llm_tokens_in_total", model="mia/scribe") == 70
    assert after.value("llm_tokens_out_total", model="mia/scribe") == 9
    assert after.value("rag_stream_requests_total") == 0


def test_a_cached_answer_counts_no_tokens(watch: Watch) -> None:
    cached = Answer(text="An arm.", ground=Ground.DOCUMENTS, model="mia/scribe", usage=SPENT, cached=True)
    watch.question(Answered(answer=cached), surface="rag_stream")
    after = watch.scraped
    assert after.value("anabranch_questions_total", surface="rag_stream", outcome="cached") == 1
    assert after.value("llm_tokens_in_total") == after.value("llm_tokens_out_total") == 0
    assert after.value("rag_stream_requests_total") == 1


@pytest.mark.parametrize(
    ("ground", "reason"),
    [
        (Ground.NO_SOURCES, "no_sources"),
        (Ground.ALL_FAILED, "all_failed"),
        (Ground.NOTHING_FOUND, "nothing_found"),
        (Ground.WEAK, "weak"),
        (Ground.DOCUMENTS, "abstained"),
    ],
)
def test_refused_answers_are_counted_by_reason(watch: Watch, ground: Ground, reason: str) -> None:
    watch.question(Answered(answer=Answer(text="Nothing.", ground=ground, refused=True)), surface="rag_stream")
    after = watch.scraped
    assert {why for why, count in after.values("rag_guardrail_triggered_total", "reason").items() if count} == {reason}
    assert after.value("anabranch_questions_total", outcome="refused") == 1


def test_a_withheld_answer_is_counted_as_unfaithful(watch: Watch) -> None:
    withheld = Answer(text="Withheld.", ground=Ground.DOCUMENTS, refused=True, unfaithful=True, faithfulness=0.25)
    watch.question(Answered(answer=withheld), surface="query")
    after = watch.scraped
    assert after.value("rag_guardrail_triggered_total", reason="unfaithful") == 1
    assert after.value("anabranch_faithfulness_sum") == 0.25


def test_the_sentences_and_citation_marks_of_a_verified_answer_are_counted(watch: Watch) -> None:
    answer = Answer(
        text="An arm. A leg [1]. [2]",
        ground=Ground.DOCUMENTS,
        sentences=(
            CheckedSentence(start=0, end=7, verdict="supported", added=1),
            CheckedSentence(start=8, end=22, verdict="unsupported", marks=2, removed=2),
            CheckedSentence(start=8, end=22, verdict="unchecked", reason="no_claim"),
        ),
        faithfulness=0.5,
    )
    watch.question(Answered(answer=answer))
    watch.question(Answered(answer=msgspec.structs.replace(answer, cached=True)))
    after = watch.scraped
    counted = {name: count for name, count in after.values("anabranch_sentences_total", "verdict").items() if count}
    assert counted == {"supported": 1, "unsupported": 1, "unchecked": 1}
    assert after.values("anabranch_citation_marks_total", "kind") == {
        "written": 2,
        "corrected": 0,
        "removed": 2,
        "added": 1,
    }
    assert (after.value("anabranch_faithfulness_count"), after.value("anabranch_faithfulness_sum")) == (1, 0.5)
    *_, line = map(msgspec.json.decode, watch.log.getvalue().splitlines())
    assert (line["event"], line["faithfulness"], line["left_out"]) == ("chat_request_completed", 0.5, 0)
    assert line["sentences"] == {"supported": 1, "unsupported": 1, "unchecked": 1}


def test_failed_cancelled_and_rejected_streams_are_counted(watch: Watch) -> None:
    watch.question(Failed(code="generation_failed", message="", time_ms=12), surface="rag_stream")
    watch.question(Failed(code="cancelled", message=""), surface="rag_stream")
    watch.question(Failed(code="generation_failed", message=""), surface="chat")
    watch.signals(Rejected(surface="rag_stream", code="rate_limited"), Rejected(surface="chat", code="overloaded"))
    after = watch.scraped
    assert after.value("rag_stream_requests_total") == 3
    assert after.value("rag_stream_errors_total") == 2
    assert after.value("rag_stream_errors_total", error_code="generation_failed") == 1
    assert after.value("rag_stream_errors_total", error_code="rate_limited") == 1
    assert after.value("rag_stream_cancelled_total") == 1
    for surface, outcome in (("rag_stream", "failed"), ("rag_stream", "cancelled"), ("rag_stream", "rejected")):
        assert after.value("anabranch_questions_total", surface=surface, outcome=outcome) == 1
    assert after.value("anabranch_questions_total", surface="chat", outcome="rejected") == 1
    assert after.value("anabranch_rejected_total", surface="chat", error_code="overloaded") == 1
    assert after.value("anabranch_question_latency_ms_count", surface="rag_stream") == 1, (
        "a cancelled question has no latency"
    )


def test_caches_limiters_breakers_retries_hedges_and_redis_are_counted() -> None:
    watch = Watch(Settings(redis_url="redis://127.0.0.1"))
    assert watch.scraped.value("anabranch_redis_reachable") == 1
    watch.signals(
        CacheLookup(cache="answer", hit=True),
        CacheLookup(cache="embedding", hit=False),
        CacheLookup(cache="evidence", hit=True),
        EvidenceJudged(task="read", passages=8, latency_ms=240.5),
        EvidenceJudged(task="check", passages=1, latency_ms=30),
        AnswerShared(),
        RateLimitChecked(surface="rag_stream", admitted=True),
        RateLimitChecked(surface="rag_stream", admitted=False),
        Load(running=3, waiting=2),
        BreakerStateChanged(upstream="alice/docs", state="open"),
        BreakerStateChanged(upstream="alice/docs", state="half_open"),
        Retried(upstream="mia/scribe"),
        Hedged(upstream="alice/docs", won=True),
        RedisStateChanged(reachable=False),
    )
    after = watch.scraped
    assert after.values("rag_cache_hit_total", "cache") == {"answer": 1, "embedding": 0, "evidence": 1}
    assert after.values("rag_cache_miss_total", "cache") == {"answer": 0, "embedding": 1, "evidence": 0}
    assert after.values("anabranch_evidence_passages_total", "task") == {"read": 8, "check": 1}
    assert after.value("anabranch_evidence_latency_ms_sum", task="read") == 240.5
    assert after.value("anabranch_evidence_latency_ms_count", task="check") == 1
    assert after.value("anabranch_questions_joined_total") == 1
    assert after.value("anabranch_limiter_total", surface="rag_stream", decision="admitted") == 1
    assert after.value("anabranch_limiter_total", surface="rag_stream", decision="refused") == 1
    assert (after.value("anabranch_questions_running"), after.value("anabranch_questions_waiting")) == (3, 2)
    assert after.value("anabranch_breaker_state", upstream="alice/docs") == 1
    assert after.value("anabranch_breaker_opened_total", upstream="alice/docs") == 1
    assert after.value("anabranch_retries_total", upstream="mia/scribe") == 1
    assert after.values("anabranch_hedges_total", "won") == {"true": 1, "false": 0}
    assert after.value("anabranch_redis_reachable") == 0
    watch.signals(RedisStateChanged(reachable=True), BreakerStateChanged(upstream="alice/docs", state="closed"))
    assert watch.scraped.value("anabranch_redis_reachable") == 1
    assert watch.scraped.value("anabranch_breaker_state") == 0


def test_an_mcp_server_that_is_disabled_or_removed_does_not_count_as_down() -> None:
    servers = {name: McpServer(name=name, command="x", enabled=name != "off") for name in ("library", "gone", "off")}
    watch = Watch(Settings(mcp_servers=servers))
    assert watch.scraped.values("anabranch_mcp_server_ready", "server") == {"library": 0, "gone": 0}
    watch.signals(*(McpServerStateChanged(server=name, state="ready") for name in ("library", "gone")))
    watch.signals(
        McpServerStateChanged(server="gone", state="idle"),
        McpServerStateChanged(server="library", state="failed", reason="No."),
    )
    after = watch.scraped.values("anabranch_mcp_server_ready", "server")
    assert after.pop("library") == 0
    assert [name for name, value in after.items() if math.isnan(value)] == ["gone"]


def test_the_metrics_have_an_update_for_every_signal(watch: Watch) -> None:
    assert set(watch.metrics._signals) == set(get_args(Signal))


def test_a_span_is_a_stage_in_milliseconds(watch: Watch) -> None:
    context = Context(correlation_id="c", deadline=1.0)
    with watch.telemetry.span("merge", context, **{"anabranch.sources": 2}) as span:
        span.set("anything", 1)
        assert span.context is context
        watch.clock.advance(0.25)
    assert watch.scraped.value("anabranch_stage_latency_ms_sum", stage="merge") == 250


# --- labels that callers choose


def test_labels_from_requests_are_bounded_and_configured_names_keep_theirs(watch: Watch) -> None:
    mine = Endpoint(slug="handbook", url="http://node.example", owner="alice")
    watch = Watch(Settings(sources={"handbook": mine}))
    watch.question(*(replied(f"stranger/{number}") for number in range(5_000)), replied("alice/handbook"))
    for number in range(500):
        watch.signals(
            TokensUsed(model=f"model-{number}", usage=SPENT),
            BreakerStateChanged(upstream=f"up-{number}", state="open"),
            Retried(upstream=f"up-{number}"),
            Hedged(upstream=f"up-{number}", won=False),
        )
    after = watch.scraped
    sources = {one.labels["source"] for one in after.all("anabranch_source_replies_total")}
    assert len(sources) == 103
    assert {"alice/handbook", "stranger/99", "other"} <= sources
    assert after.value("anabranch_source_replies_total", source="alice/handbook", status="success") == 1
    assert after.value("anabranch_source_replies_total", source="other", status="success") == 4_900
    assert after.value("llm_tokens_out_total") == 500 * 9
    for name, label in (
        ("llm_tokens_in_total", "model"),
        ("anabranch_breaker_state", "upstream"),
        ("anabranch_retries_total", "upstream"),
        ("anabranch_hedges_total", "upstream"),
    ):
        assert len({one.labels[label] for one in after.all(name)}) <= 103, name
    assert len(after.text) < 1_000_000


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("alice/" + "x" * 5_000, "alice/" + "x" * 94),
        ("https://user:secret@node.example:8080/path?token=t", "node.example:8080"),
        ('a"b\\c\nd\x00e\ud800', 'a"b\\c?d?e?'),
        ("", ""),
    ],
)
def test_a_label_is_truncated_and_holds_no_password(watch: Watch, given: str, shown: str) -> None:
    watch.question(replied(given), replied(given))
    assert watch.scraped.value("anabranch_source_replies_total", source=shown, status="success") == 2


def test_metrics_hold_no_user_and_no_question(watch: Watch) -> None:
    watch.question(replied("alice/docs"), Answered(answer=ANSWER))
    assert "ursula" not in watch.scraped.text
    assert "anabranch?" not in watch.scraped.text
    assert "arm of a river" not in watch.scraped.text


def test_collections_have_one_label_together_because_not_every_reader_may_see_them(watch: Watch) -> None:
    for name in ("collection:plans", "collection:alice/plans"):
        watch.question(replied(name))
    watch.question(replied("019ab3c4-plans"), surface="endpoints")
    watch.question(replied("alice/docs"))
    after = watch.scraped
    assert "plans" not in after.text
    assert after.value("anabranch_source_replies_total", source="collections", status="success") == 3
    assert after.value("anabranch_source_latency_ms_sum", source="collections") == 60
    assert after.value("anabranch_source_replies_total", source="alice/docs", status="success") == 1


# --- it never fails what it watches


class BrokenMetrics(Metrics):
    def asked(self, surface: str) -> None:
        raise OSError("no space left")

    def happened(self, event: AnswerEvent, surface: str) -> None:
        raise OSError("no space left")

    def noted(self, signal: Signal) -> None:
        raise OSError("no space left")


def test_a_failure_of_the_metrics_is_logged_once_and_fails_no_question() -> None:
    watch = Watch(metrics=BrokenMetrics(Settings()))
    watch.question(replied("alice/docs"), Answered(answer=ANSWER))
    watch.signals(AnswerShared(), AnswerShared())
    assert watch.log.getvalue().count("telemetry_failed") == 1


def test_two_servers_in_one_process_have_separate_metrics() -> None:
    one, other = Watch(), Watch()
    one.question(Answered(answer=ANSWER))
    assert one.scraped.value("anabranch_questions_total") == 1
    assert other.scraped.value("anabranch_questions_total") == 0


# --- GET /metrics


async def ask(server: Server, space: Space, **more: Any) -> None:
    await server.chat(prompt="?", model=ref(space, "scribe", "mia"), data_sources=[ref(space, "docs", "alice")], **more)


async def test_questions_over_http_are_counted(serve: Serve, space: Space) -> None:
    async with serve() as server:
        await ask(server, space)
        body = {"prompt": "?", "model": ref(space, "status-401"), "data_sources": [ref(space, "status-403", "bob")]}
        status, _, _ = await server.post("/api/v1/chat", body)
        assert status == 502
        after = await scrape(server.session, server.url)
    assert after.value("anabranch_questions_total", surface="chat", outcome="answered") == 1
    assert after.value("anabranch_questions_total", surface="chat", outcome="failed") == 1
    assert after.value("anabranch_source_replies_total", source="alice/docs", status="success") == 1
    assert after.value("anabranch_source_replies_total", source="bob/status-403", status="access_denied") == 1
    assert after.value("rag_retrieval_latency_ms_count", surface="chat") == 2
    assert after.value("llm_tokens_out_total", model="mia/scribe (named in a request)") > 0
    for stage in ("question", "retrieve", "merge", "prompt", "generate"):
        assert after.value("anabranch_stage_latency_ms_count", stage=stage) >= 2, stage
    assert after.value("anabranch_questions_running") == 0


async def test_accept_chooses_text_or_openmetrics_and_gzip(server: Server) -> None:
    url = f"{server.url}/metrics"
    async with server.session.get(url) as plain:
        assert plain.content_type == "text/plain"
        assert "version=0.0.4" in plain.headers["Content-Type"]
        assert plain.headers["Cache-Control"] == "no-store"
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    async with server.session.get(url, headers={"Accept": accept}) as openmetrics:
        assert openmetrics.content_type == "application/openmetrics-text"
        assert (await openmetrics.text()).endswith("# EOF\n")
    headers = {"Accept-Encoding": "gzip"}
    async with server.session.get(url, headers=headers, auto_decompress=False) as packed:
        assert packed.headers["Content-Encoding"] == "gzip"
        assert b"anabranch_build_info" in gzip.decompress(await packed.read())


@pytest.mark.parametrize("headers", [{"X-Forwarded-For": "203.0.113.9"}, {"Origin": "https://page.example"}])
async def test_metrics_need_a_key_unless_the_request_is_local(server: Server, headers: dict[str, str]) -> None:
    async with server.session.get(f"{server.url}/metrics", headers=headers) as response:
        error = await response.json()
        assert (response.status, error["error"]) == (401, "unauthorized")
        assert "anabranch_" not in await response.text()


@pytest.mark.parametrize(
    ("auth", "operator", "status"),
    [
        ("auto", False, 403),
        ("auto", True, 200),
        ("api_key", False, 403),
        ("api_key", True, 200),
        ("none", False, 403),
    ],
)
async def test_only_an_operators_key_may_read_metrics(
    serve: Serve, space: Space, tmp_path: Path, auth: str, operator: bool, status: int
) -> None:
    database = SqliteDatabase.open(tmp_path / "data")
    alice = database.writing(lambda db: keys.create(db, user="alice"))[1]
    secret = database.writing(lambda db: keys.create(db, user="prometheus", operator=operator))[1]
    database.close()
    asked = {"prompt": "?", "retrieval_only": True, "data_sources": [ref(space, "docs", "alices-own")]}
    with resources.alone(tmp_path / "data"):  # there is nothing to index
        async with serve(auth=auth) as server:
            await server.post("/api/v1/chat", asked, headers={"Authorization": f"Bearer {alice}"})
            headers = {"Authorization": f"Bearer {secret}", "X-Forwarded-For": "203.0.113.9"}
            async with server.session.get(f"{server.url}/metrics", headers=headers) as response:
                text = await response.text()
    assert response.status == status
    assert ("alices-own/docs" in text) is (status == 200)
    assert status == 200 or "anabranch keys create" in json.loads(text)["message"]


# --- several workers


@pytest.fixture
def temporary(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "temporary"
    folder.mkdir()
    yield folder
    assert list(folder.iterdir()) == [], "the folder of the workers is removed"


@pytest.fixture
async def two(tmp_path: Path, temporary: Path) -> AsyncIterator[Program]:
    """Two workers. Stale counts, of another program's run, are not theirs."""
    stale = tmp_path / "stale"
    stale.mkdir()
    variables = {"TMPDIR": str(temporary), "PROMETHEUS_MULTIPROC_DIR": str(stale)}
    async with serving(home=tmp_path, workers=2, variables=variables) as program:
        yield program
        program.send(signal.SIGTERM)
        assert await program.ended() == 0
    assert list(stale.iterdir()) == []


async def alone(url: str, **body: Any) -> None:
    """One question on a connection of its own, so that any worker may get it."""
    async with aiohttp.ClientSession() as session, session.post(f"{url}/api/v1/chat", json=body) as response:
        assert response.status == 200


async def read(url: str) -> Scraped:
    async with aiohttp.ClientSession() as session:
        return await scrape(session, url)


async def test_every_worker_serves_the_metrics_of_all_workers(two: Program, space: Space) -> None:
    body = {"prompt": "?", "model": ref(space, "scribe"), "data_sources": [ref(space, "docs")]}
    await asyncio.gather(*(alone(two.url, **body) for _ in range(20)))
    first = await read(two.url)
    assert first.value("anabranch_questions_total", outcome="answered") == 20
    assert first.value("rag_retrieval_latency_ms_count", surface="chat") == 20
    assert first.value("anabranch_build_info") == 1
    # A worker dies at a question: what it counted stays, how it stood does not.
    async with Space(everything=True) as slow, asyncio.TaskGroup() as group:
        left = group.create_task(_left(two.url, prompt="?", model=ref(slow, "hang"), data_sources=[]))
        await slow.wait_for(lambda: slow.requests)
        while (await read(two.url)).value("anabranch_questions_running") != 1:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        os.kill(_peer(two, slow), signal.SIGKILL)
        await left
        await two.logged(READY, times=3)
    for _ in range(4):
        after = await read(two.url)
        assert after.value("anabranch_questions_running") == 0
        assert after.value("anabranch_questions_total", outcome="answered") == 20


async def _left(url: str, **body: Any) -> None:
    with pytest.raises(aiohttp.ClientError):
        await alone(url, **body)


def _peer(program: Program, space: Space) -> int:
    """The worker that has a connection to the Space."""
    port = int(space.url.rpartition(":")[2])
    for process in program.family():
        for connection in process.net_connections(kind="tcp"):
            if getattr(connection.raddr, "port", None) == port and connection.status == psutil.CONN_ESTABLISHED:
                return int(process.pid)
    raise AssertionError("no worker talks to the Space")


async def test_one_worker_writes_no_metrics_folder(tmp_path: Path, temporary: Path) -> None:
    async with serving(home=tmp_path, variables={"TMPDIR": str(temporary)}) as program:
        assert os.listdir(temporary) == []  # noqa: PTH208  (a Path's own way is no better in a coroutine)
        assert (await read(program.url)).value("anabranch_build_info") == 1
        program.send(signal.SIGTERM)
        assert await program.ended(PATIENCE_S) == 0
