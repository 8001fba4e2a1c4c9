"""Traces as a collector receives them: nesting, errors, and a collector that fails."""

import asyncio
import io
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from anabranch.configuration.settings import Settings
from anabranch.domain.errors import ConfigurationError, GenerationFailed
from anabranch.domain.model import Context
from anabranch.network.addresses import AddressGuard
from anabranch.network.outbound import AiohttpOutbound
from anabranch.telemetry.log import configured_log
from anabranch.telemetry.otlp import MAX_QUEUED_SPANS, OtlpTiming, Traces
from anabranch.testing import Document, Space
from anabranch.testing.failures import Failure
from conftest import Server, ref
from support.metrics_scrape import scrape
from support.otlp_collector import Collector

Serve = Callable[..., AbstractAsyncContextManager[Server]]

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"
REMOTE = {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "rojo=00f067aa0ba902b7"}
SECRET = "Where does the heron sleep?"


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    async with Collector() as started:
        yield started


def body(space: Space, *slugs: str, model: str = "scribe") -> dict[str, Any]:
    return {
        "prompt": SECRET,
        "model": ref(space, model, "mia"),
        "data_sources": [ref(space, slug, "alice") for slug in slugs],
        "endpoint_tokens": {"alice": "sat-7f3a"},
    }


# --- over HTTP


async def test_a_question_is_a_trace_of_nested_spans(serve: Serve, space: Space, collector: Collector) -> None:
    space.source("more", documents=[Document(title="T", content="An anabranch leaves the river and rejoins it.")])
    async with serve(otlp_endpoint=collector.url) as server:
        await server.post("/api/v1/chat", body(space, "docs", "more"))
    question = collector.one("question")
    assert question.parent == ""
    assert {span.trace for span in collector.spans} == {question.trace}
    assert {span.name for span in collector.inside(question)} == {"retrieve", "merge", "prompt", "chat scribe", "cite"}
    retrieve, generate = collector.one("retrieve"), collector.one("chat scribe")
    assert [span.name for span in collector.inside(retrieve)] == ["upstream", "upstream"]
    assert [span.name for span in collector.inside(generate)] == ["upstream"]
    assert (question.kind, generate.kind, retrieve.kind) == ("server", "client", "internal")
    assert {span.kind for span in collector.named("upstream")} == {"client"}
    assert not any(span.error for span in collector.spans)
    assert question.attributes["anabranch.surface"] == "chat"
    assert generate.attributes["gen_ai.operation.name"] == "chat"
    assert generate.attributes["gen_ai.request.model"] == "scribe"
    assert int(str(generate.attributes["gen_ai.usage.output_tokens"])) > 0
    assert collector.resource["service.name"] == "anabranch"
    assert collector.resource["service.version"]


async def test_upstream_calls_carry_the_traceparent_of_their_span(
    serve: Serve, space: Space, collector: Collector
) -> None:
    async with serve(otlp_endpoint=collector.url) as server:
        await server.post("/api/v1/chat", body(space, "docs"), headers=REMOTE)
    question = collector.one("question")
    assert (question.trace, question.parent, question.state) == (TRACE, CALLER, REMOTE["tracestate"])
    sent = {request.slug: request.headers["traceparent"].split("-") for request in space.requests}
    of_source = collector.inside(collector.one("retrieve"))[0]
    of_model = collector.inside(collector.one("chat scribe"))[0]
    assert sent["docs"][:3] == ["00", TRACE, of_source.id]
    assert sent["scribe"][:3] == ["00", TRACE, of_model.id]
    assert {request.headers["tracestate"] for request in space.requests} == {REMOTE["tracestate"]}


async def test_the_spans_of_a_planner_step_are_in_the_trace_of_its_request(serve: Serve, collector: Collector) -> None:
    async with serve(otlp_endpoint=collector.url, planner_retries=1) as server:
        steps = "/planner/sessions/s/steps"
        step = {"plan_step_id": "p", "expected_subagents": [{"key": "lookup"}, {"key": "voice"}]}
        status, _, _ = await server.post(steps, step, headers=REMOTE)
        assert status == 201
        for key, result in (("lookup", "error"), ("lookup", "success"), ("voice", "error")):
            await server.post(f"{steps}/p/subagents/{key}/events", {"status": result})
        await collector.until(lambda: len(collector.named("aggregation.wait")) == 3)
    spans = [span for span in collector.spans if span.name.startswith("aggregation.")]
    assert {span.name for span in spans} == {"aggregation.wait", "aggregation.emit", "aggregation.retry"}
    assert {(span.trace, span.parent) for span in spans} == {(TRACE, CALLER)}


async def test_log_lines_carry_the_trace_id(
    serve: Serve, space: Space, collector: Collector, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serve(otlp_endpoint=collector.url, log_level="INFO") as server:
        await server.post("/api/v1/chat", body(space, "docs"))
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    told = {line["trace_id"] for line in lines if line["event"].startswith(("chat_", "data_", "model_"))}
    assert told == {collector.one("question").trace}


async def test_only_the_spans_that_failed_have_an_error_status(
    serve: Serve, space: Space, collector: Collector
) -> None:
    async with serve(otlp_endpoint=collector.url) as server:
        status, _, _ = await server.post("/api/v1/chat", body(space, "docs", model="status-401"))
        assert status == 502
    wrong = {span.name for span in collector.spans if span.error}
    assert {"question", "chat status-401"} <= wrong
    assert not {"retrieve", "merge", "prompt"} & wrong
    assert collector.one("question").attributes["error.type"] == "generation_failed"
    assert collector.one("chat status-401").attributes["error.type"] == "generation_failed"


async def test_a_client_that_disconnects_is_cancelled_and_no_error(
    serve: Serve, space: Space, collector: Collector
) -> None:
    async with serve(otlp_endpoint=collector.url) as server:
        url = f"{server.url}/api/v1/chat/stream"
        async with server.session.post(url, json=body(space, "docs", model="hang")) as response:
            await response.content.readuntil(b"generation_start")
            response.close()
        await space.wait_for(lambda: any(one.slug == "hang" and one.disconnected for one in space.requests))
    assert not any(span.error for span in collector.spans)
    for name in ("question", "chat hang"):
        assert collector.one(name).attributes["anabranch.cancelled"] is True


async def test_spans_hold_neither_question_nor_documents_nor_tokens(
    serve: Serve, space: Space, collector: Collector
) -> None:
    space.source("heron", documents=[Document(title="Heron diary", content="Under the alder by the weir.")])
    space.fails("echo", Failure.STATUS_500, body=SECRET.encode())
    async with serve(otlp_endpoint=collector.url, retrieval_timeout=0.2, model_retries=0) as server:
        for model in ("scribe", "status-401", "bad-json", "reset"):
            await server.post("/api/v1/chat", body(space, "heron", "hang", "bad-json", "echo", model=model))
    sent = b"".join(raw for _, _, raw in collector.requests)
    assert len(collector.named("question")) == 4
    for secret in (SECRET, "sat-7f3a", "Heron diary", "alder"):
        assert secret.encode() not in sent


# --- a collector that is slow, gone or busy costs nothing


async def test_questions_are_answered_while_the_collector_is_unreachable(
    serve: Serve, space: Space, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        gone = f"http://127.0.0.1:{probe.getsockname()[1]}"
    async with serve(otlp_endpoint=gone, log_level="INFO") as server:
        for _ in range(3):
            status, _, _ = await server.post("/api/v1/chat", body(space, "docs"))
            assert status == 200
        async with asyncio.timeout(20):
            while not (await scrape(server.session, server.url)).value("anabranch_spans_dropped_total"):
                pass
    assert capsys.readouterr().err.count('"traces_lost"') == 1


# --- the sender by itself


class Sending:
    """Traces with everything around them, and no server."""

    def __init__(self, collector: Collector, close_s: float = 2.0, **settings: Any) -> None:
        self.lines = io.StringIO()
        self.dropped = 0.0
        given = Settings(**{"otlp_endpoint": collector.url, **settings})
        self.log = configured_log(given, self.lines)
        self.outbound = AiohttpOutbound(guard=AddressGuard(()), max_reply_bytes=65_536)
        self.traces = Traces(given, self.outbound, self.log, self._drop, OtlpTiming(interval_s=0.01, close_s=close_s))

    def _drop(self, count: float) -> None:
        self.dropped += count

    async def __aenter__(self) -> "Sending":
        self.traces.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.traces.close()
        await self.outbound.close()
        self.log.flush()

    def span(self, traceparent: str | None = None) -> None:
        with self.traces.span("merge", Context(correlation_id="c", deadline=1.0, traceparent=traceparent), {}):
            pass


async def test_a_collector_that_hangs_delays_neither_spans_nor_the_shutdown(collector: Collector) -> None:
    collector.hang = True
    async with asyncio.timeout(2), Sending(collector, close_s=0.1) as sending:
        sending.span()
        await collector.until(lambda: collector.requests)
        sending.span()
    assert sending.dropped == 2


async def test_a_refused_batch_of_spans_is_sent_again(collector: Collector) -> None:
    collector.refuse = 1
    async with Sending(collector) as sending:
        sending.span()
        await collector.until(lambda: collector.spans)
    assert (len(collector.requests), sending.dropped) == (2, 0)
    assert "traces_lost" not in sending.lines.getvalue()


async def test_a_collector_outage_is_logged_at_its_beginning_and_its_end(collector: Collector) -> None:
    collector.refuse = 6
    async with Sending(collector) as sending:
        for _ in range(4):
            before = len(collector.requests)
            sending.span()
            await collector.until(lambda: len(collector.requests) == before + 2 or collector.spans)  # noqa: B023
    told = [json.loads(line)["event"] for line in sending.lines.getvalue().splitlines()]
    assert told == ["traces_lost", "traces_back"]
    assert sending.dropped == 3


async def test_the_queue_of_spans_is_bounded_and_sent_at_close(collector: Collector) -> None:
    sending = Sending(collector)
    for _ in range(MAX_QUEUED_SPANS + 10):
        sending.span()
    assert sending.dropped == 10
    async with sending:
        pass
    assert len(collector.spans) == MAX_QUEUED_SPANS, "what waited is sent at the end"


async def test_the_otlp_endpoint_may_include_the_path_of_traces(collector: Collector) -> None:
    for endpoint in (collector.url, f"{collector.url}/", f"{collector.url}/otlp", f"{collector.url}/v1/traces"):
        async with Sending(collector, otlp_endpoint=endpoint) as sending:
            sending.span()
    assert [path for path, _, _ in collector.requests] == [
        "/v1/traces",
        "/v1/traces",
        "/otlp/v1/traces",
        "/v1/traces",
    ]


async def test_a_span_names_the_kind_of_error_without_its_message(collector: Collector) -> None:
    async with Sending(collector) as sending:
        context = Context(correlation_id="c", deadline=1.0)
        with pytest.raises(GenerationFailed), sending.traces.span("generate", context, {}):
            raise GenerationFailed(SECRET)
        with pytest.raises(ZeroDivisionError), sending.traces.span("merge", context, {}):
            raise ZeroDivisionError(SECRET)
        with pytest.raises(asyncio.CancelledError), sending.traces.span("cite", context, {}):
            raise asyncio.CancelledError
    assert [(span.name, span.error, span.attributes) for span in collector.spans] == [
        ("generate", True, {"error.type": "generation_failed"}),
        ("merge", True, {"error.type": "ZeroDivisionError"}),
        ("cite", False, {"anabranch.cancelled": True}),
    ]
    assert SECRET.encode() not in b"".join(raw for _, _, raw in collector.requests)


async def test_an_invalid_traceparent_starts_a_new_trace(collector: Collector) -> None:
    async with Sending(collector) as sending:
        for wrong in ("", "garbage", f"00-{'0' * 32}-{'0' * 16}-01", f"ff-{TRACE}-{CALLER}-01"):
            sending.span(wrong)
    assert [span.parent for span in collector.spans] == [""] * 4
    assert len({span.trace for span in collector.spans}) == 4


async def test_malformed_otlp_headers_stop_the_start(collector: Collector) -> None:
    wrong = Settings(otlp_endpoint=collector.url, otlp_headers="Bearer s3cret")
    async with Sending(collector) as sending:
        with pytest.raises(ConfigurationError, match="AGGREGATOR_OTLP_HEADERS takes") as refused:
            Traces(wrong, sending.outbound, sending.log)
    assert "s3cret" not in refused.value.message
