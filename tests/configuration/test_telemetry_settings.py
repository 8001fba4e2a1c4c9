"""Settings of logs, metrics and traces, as an operator sees them."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from anabranch.testing import Space
from conftest import ref
from support.environment import served
from support.otlp_collector import Collector

pytestmark = pytest.mark.usefixtures("isolated_home")

LONG = "Where does the heron sleep? " * 10


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    async with Collector() as started:
        yield started


def body(space: Space) -> dict[str, Any]:
    return {"prompt": LONG, "model": ref(space, "scribe"), "data_sources": [ref(space, "docs")]}


@pytest.mark.parametrize(("public", "status"), [("true", 200), ("false", 401)])
async def test_metrics_public_allows_reading_metrics_without_a_key(public: str, status: int) -> None:
    async with served(METRICS_PUBLIC=public) as server:
        from_afar = {"X-Forwarded-For": "203.0.113.9"}
        async with server.session.get(f"{server.url}/metrics", headers=from_afar) as response:
            assert response.status == status
            assert ("anabranch_build_info" in await response.text()) == (status == 200)


async def test_otlp_endpoint_is_where_traces_go(space: Space, collector: Collector) -> None:
    async with served(OTLP_ENDPOINT=collector.url) as server:
        await server.chat(**body(space))
    assert {path for path, _, _ in collector.requests} == {"/v1/traces"}
    assert collector.one("question").kind == "server"


async def test_otlp_headers_are_sent_to_the_collector(space: Space, collector: Collector) -> None:
    given = "Authorization=Bearer%20a=b==, x-team = river"
    async with served(OTLP_ENDPOINT=collector.url, OTLP_HEADERS=given) as server:
        await server.chat(**body(space))
    _, headers, _ = collector.requests[0]
    assert headers["Authorization"] == "Bearer a=b=="
    assert headers["x-team"] == "river"
    assert headers["Content-Type"] == "application/x-protobuf"


async def test_trace_share_is_how_many_questions_are_traced(space: Space, collector: Collector) -> None:
    """None of our own; but who sends a trace along has decided for themselves."""
    traced, untraced = (f"00-{digit * 32}-{digit * 16}-0{flag}" for digit, flag in (("a", 1), ("b", 0)))
    async with served(OTLP_ENDPOINT=collector.url, TRACE_SHARE="0") as server:
        await server.chat(**body(space))
        for traceparent in (traced, untraced):
            await server.post("/api/v1/chat", body(space), headers={"traceparent": traceparent})
    assert {span.trace for span in collector.spans} == {"a" * 32}
    assert {request.headers["traceparent"][-2:] for request in space.requests} >= {"00", "01"}


@pytest.mark.parametrize(("wanted", "logged"), [("true", LONG[:100]), ("false", None)])
async def test_log_queries_logs_the_beginning_of_a_question(
    space: Space, capsys: pytest.CaptureFixture[str], wanted: str, logged: str | None
) -> None:
    async with served(LOG_QUERIES=wanted, LOG_LEVEL="INFO") as server:
        await server.chat(**body(space))
    text = capsys.readouterr().err
    lines = [json.loads(line) for line in text.splitlines()]
    ends = [line for line in lines if line["event"] in ("chat_request_started", "chat_request_completed")]
    assert [line.get("query") for line in ends] == [logged] * 2
    assert LONG not in text
    assert ("heron" in text) == (logged is not None)
