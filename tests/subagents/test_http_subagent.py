"""A subagent at a URL, well or ill: what it replies becomes results as they come, or one failure."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from anabranch.configuration.settings import Settings
from anabranch.domain.contracts import SystemClock
from anabranch.domain.errors import FailureKind, UpstreamError, UpstreamTimedOut
from anabranch.domain.model import Context
from anabranch.domain.steps import Directive, Expected, Fragment
from anabranch.network.addresses import AddressGuard
from anabranch.network.outbound import AiohttpOutbound
from anabranch.subagents.http import MAX_FRAGMENTS, HttpSubagent
from anabranch.subagents.kinds import KINDS, SafetySubagent, SubagentRegistry, confirmation, preview
from anabranch.subagents.payloads import MAX_BYTES, CardSubagent

LOOPBACK = Settings(endpoint_allowlist=("127.0.0.0/8",)).allowed_networks
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
GOOD = {"status": "success", "payload": {"rows": [{"a": 1}]}}

Handle = Callable[[web.Request], Awaitable[web.StreamResponse]]
Reply = web.Response | Handle


class Upstream:
    """A subagent on a port of its own, asked through the guard."""

    def __init__(self, url: str, outbound: AiohttpOutbound) -> None:
        self.url = url
        self.requests: list[tuple[dict[str, str], Any]] = []
        self.gone = asyncio.Event()
        self._outbound = outbound

    async def work(
        self,
        adapter: Any = None,
        *,
        seconds: float = 20,
        url: str | None = None,
        max_fragments: int = MAX_FRAGMENTS,
        **given: Any,
    ) -> AsyncIterator[Fragment]:
        envelope = Expected(key="rows", result_key="r-1", url=url or self.url, **given)
        directive = Directive(
            session_id="s-1", plan_step_id="p-1", expected=(envelope,), planner_context={"request_id": "q"}
        )
        context = Context(
            correlation_id="c-1",
            deadline=time.monotonic() + seconds,
            tokens={"alice": "sat-secret"},
            transactions={"alice": "sat-secret"},
            traceparent=TRACEPARENT,
            tracestate="rojo=1",
        )
        adapter = adapter or CardSubagent(preview)
        subagent = HttpSubagent(adapter, self._outbound, SystemClock(), max_fragments=max_fragments)
        async with aclosing(subagent.work(envelope, directive, context)) as fragments:
            async for fragment in fragments:
                yield fragment

    async def all(self, adapter: Any = None, **given: Any) -> list[Fragment]:
        return [fragment async for fragment in self.work(adapter, **given)]

    async def failure(self, adapter: Any = None, **given: Any) -> UpstreamError:
        with pytest.raises(UpstreamError) as failed:
            await self.all(adapter, **given)
        return failed.value


@asynccontextmanager
async def replying(reply: Reply | bytes, content_type: str = "application/json") -> AsyncIterator[Upstream]:
    outbound = AiohttpOutbound(guard=AddressGuard(LOOPBACK), max_reply_bytes=4_000_000)

    async def respond(request: web.Request) -> web.StreamResponse:
        upstream.requests.append((dict(request.headers), await request.json()))
        try:
            if callable(reply):
                return await reply(request)
            if isinstance(reply, bytes):
                return web.Response(body=reply, content_type=content_type)
            return reply
        finally:
            upstream.gone.set()

    app = web.Application()
    app.router.add_post("/work", respond)
    async with TestServer(app, handler_cancellation=True) as server:
        upstream = Upstream(f"http://127.0.0.1:{server.port}/work", outbound)
        try:
            yield upstream
        finally:
            await outbound.close()


def lines(*objects: Any) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in objects)


def sse(*objects: Any) -> bytes:
    return b"".join(b"data: %b\n\n" % json.dumps(one).encode() for one in objects)


def shown(fragment: Fragment) -> Any:
    return json.loads(bytes(fragment.payload))


# --- what it is asked


async def test_the_request_to_a_subagent_has_its_task_and_trace_and_no_token() -> None:
    async with replying(json.dumps(GOOD).encode()) as upstream:
        await upstream.all(input=msgspec.Raw(b'{"filter": "open"}'))
    ((headers, asked),) = upstream.requests
    assert asked == {
        "session_id": "s-1",
        "plan_step_id": "p-1",
        "subagent": "rows",
        "result_key": "r-1",
        "input": {"filter": "open"},
        "planner_context": {"request_id": "q"},
    }
    assert (headers["traceparent"], headers["tracestate"]) == (TRACEPARENT, "rojo=1")
    assert headers["X-Correlation-ID"] == "c-1"
    assert "sat-secret" not in str(upstream.requests)
    assert "Authorization" not in headers


async def test_a_subagent_at_a_blocked_address_is_not_called() -> None:
    async with replying(b"{}") as upstream:
        shut = AiohttpOutbound(guard=AddressGuard(()), max_reply_bytes=1_000)
        upstream._outbound, reaching = shut, upstream._outbound
        failed = await upstream.failure()
        await shut.close()
        upstream._outbound = reaching
        assert failed.failure_kind is FailureKind.REQUEST
        assert upstream.requests == []
        for url in ("file:///etc/passwd", "http://user:word@127.0.0.1/", "not a url", "http://"):
            assert (await upstream.failure(url=url)).failure_kind is FailureKind.REQUEST


# --- what it replies, when all is well


@pytest.mark.parametrize(
    "reply",
    [
        GOOD,
        {"status": "completed", "payload": GOOD["payload"]},
        {"payload": GOOD["payload"]},
        {"type": "subagent_result", "subagent": "x", "result_key": "other", **GOOD, "unknown": 1},
        GOOD["payload"],
        {"records": [{"a": 1}]},
    ],
    ids=str,
)
async def test_a_json_reply_of_a_subagent_is_a_success(reply: Any) -> None:
    async with replying(json.dumps(reply, indent=1).encode()) as upstream:
        (fragment,) = await upstream.all()
    assert fragment.status == "success"
    assert (shown(fragment)["card"], shown(fragment)["rows"]) == ("table_preview", [[1]])


async def test_a_payload_with_a_field_status_is_a_payload() -> None:
    async with replying(b'{"action":"ship","status":"success","state":"executed"}') as upstream:
        (fragment,) = await upstream.all(CardSubagent(confirmation))
    assert (shown(fragment)["action"], shown(fragment)["status"]) == ("ship", "success")


async def test_metrics_of_a_subagent_are_passed_on() -> None:
    metrics = {"retrieval_count": 4, "share": 0.5, "words": "no", "huge": 10**300, "x" * 200: 1}
    async with replying(json.dumps({**GOOD, "telemetry": {"metrics": metrics}}).encode()) as upstream:
        (fragment,) = await upstream.all()
        assert fragment.metrics == {"retrieval_count": 4.0, "share": 0.5}
    async with replying(json.dumps({**GOOD, "telemetry": "none"}).encode()) as upstream:
        assert (await upstream.all())[0].metrics == {}


@pytest.mark.parametrize(
    ("written", "content_type"), [(sse, "text/event-stream"), (lines, "application/x-ndjson")], ids=["sse", "lines"]
)
async def test_sse_and_json_lines_of_a_subagent_are_streamed(written: Callable[..., bytes], content_type: str) -> None:
    going_on = asyncio.Event()

    async def respond(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": content_type})
        await response.prepare(request)
        first = written({"status": "in_progress", "payload": {"message": "searching"}}, {"type": "heartbeat"})
        await response.write(first[:9])
        await response.write(first[9:])
        await going_on.wait()
        await response.write(written({"status": "partial", "payload": {"rows": []}}, GOOD, {"status": "nonsense"}))
        return response

    seen = []
    async with replying(respond) as upstream:
        async for fragment in upstream.work():
            seen.append((fragment.status, shown(fragment).get("message"), shown(fragment).get("rows")))
            going_on.set()
    assert seen == [("in_progress", "searching", None), ("partial", None, []), ("success", None, [[1]])]


async def test_nothing_is_read_after_an_error_of_a_subagent() -> None:
    reply = {"status": "error", "payload": {"message": "The table is locked."}}
    async with replying(sse({"status": "pending"}, reply, GOOD), "text/event-stream") as upstream:
        fragments = await upstream.all()
    assert [one.status for one in fragments] == ["pending", "error"]
    assert fragments[-1].reason == "The table is locked."


async def test_a_safety_subagent_at_a_url_decides() -> None:
    async with replying(b'{"decision":"block","reason":"A secret."}') as upstream:
        (fragment,) = await upstream.all(SafetySubagent())
    assert (fragment.verdict, fragment.reason) == ("block", "A secret.")


# --- what it replies, when it is ill or means harm

DEEP = b"[" * 50_000 + b"]" * 50_000


@pytest.mark.parametrize(
    ("reply", "content_type"),
    [
        (b"", "application/json"),
        (b"<html>Hello</html>", "text/html"),
        (b"[1]", "application/json"),
        (b'{"payload":' + DEEP + b"}", "application/json"),
        (DEEP, "application/x-ndjson"),
        (b'{"status":"sideways","payload":{}}', "application/json"),
        (b'{"status":5,"payload":{}}', "application/json"),
        (b'{"status":"success","payload":{"columns":[]}}', "application/json"),
        (b'{"status":"success","payload":null}', "application/json"),
        (b'{"rows":[], "a":"' + b"x" * MAX_BYTES + b'"}', "application/json"),
        (b'{"rows":[], "a":"' + b"x" * MAX_BYTES, "application/x-ndjson"),
        (b'data: {"rows":[], "a":"' + b"x" * MAX_BYTES + b'"}\n\n', "text/event-stream"),
        (b"data: " + b"x" * 3 * MAX_BYTES, "text/event-stream"),
        (b"x" * 5_000_000, "application/json"),
        (b"data: \xff\xfe\n\n", "text/event-stream"),
        (b"[1]\n" * 2, "application/x-ndjson"),
    ],
    ids=lambda reply: reply[:25].decode(errors="replace") if isinstance(reply, bytes) else reply,
)
async def test_an_unusable_reply_of_a_subagent_is_not_retried(reply: bytes, content_type: str) -> None:
    async with replying(reply, content_type) as upstream:
        failed = await upstream.failure()
    assert failed.failure_kind is FailureKind.UNUSABLE
    assert len(failed.message) < 300


@pytest.mark.parametrize(
    ("reply", "content_type"),
    [
        (b"", "text/event-stream"),
        (b": nothing\n\n", "text/event-stream"),
        (b"data: [DONE]\n\n", "text/event-stream"),
        (sse({"status": "partial", "payload": {}}, {"type": "ping"}), "text/event-stream"),
        (lines({"status": "in_progress"}), "application/x-ndjson"),
    ],
)
async def test_a_reply_without_a_result_can_be_retried(reply: bytes, content_type: str) -> None:
    async with replying(reply, content_type) as upstream:
        failed = await upstream.failure()
    assert (failed.failure_kind, failed.message) == (FailureKind.DOWN, "It ended without a result.")


@pytest.mark.parametrize(
    ("status", "failure_kind"),
    [
        (301, FailureKind.REQUEST),
        (400, FailureKind.REQUEST),
        (401, FailureKind.REQUEST),
        (404, FailureKind.REQUEST),
        (429, FailureKind.BUSY),
        (500, FailureKind.DOWN),
        (503, FailureKind.DOWN),
    ],
)
async def test_the_http_status_of_a_subagent_decides_about_a_retry(status: int, failure_kind: FailureKind) -> None:
    refusal = web.Response(status=status, text='{"detail":"No."}', content_type="application/json")
    refusal.headers.update({"Retry-After": "7", "Location": "http://127.0.0.1/"})
    async with replying(refusal) as upstream:
        failed = await upstream.failure()
    assert (failed.failure_kind, failed.details) == (failure_kind, {"upstream_status": status})
    assert (failed.wait_s, len(upstream.requests)) == (7.0, 1)


async def test_a_broken_connection_to_a_subagent_can_be_retried() -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        await response.write(lines({"status": "in_progress"}) + b'{"status":"success","payload":{"ro')
        assert request.transport is not None
        request.transport.abort()
        return response

    async with replying(respond) as upstream:
        assert (await upstream.failure()).failure_kind is FailureKind.DOWN
    async with replying(b"{}") as upstream:
        pass
    assert (await _unreachable(upstream.url)).failure_kind is FailureKind.DOWN


async def _unreachable(url: str) -> UpstreamError:
    outbound = AiohttpOutbound(guard=AddressGuard(LOOPBACK), max_reply_bytes=1_000)
    try:
        return await Upstream(url, outbound).failure()
    finally:
        await outbound.close()


@pytest.mark.parametrize("begun", [False, True])
async def test_a_call_of_a_subagent_ends_at_its_deadline(begun: bool) -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        if begun:
            await response.prepare(request)
            await response.write(lines({"status": "in_progress"}))
        await asyncio.Event().wait()
        return response

    async with replying(respond) as upstream:
        failed = await upstream.failure(seconds=0.5)
        assert isinstance(failed, UpstreamTimedOut)
        assert failed.failure_kind is FailureKind.DOWN
        async with asyncio.timeout(10):
            await upstream.gone.wait()


async def test_a_cancelled_call_of_a_subagent_closes_its_connection() -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(sse({"status": "in_progress"}))
        await asyncio.Event().wait()
        return response

    async with replying(respond) as upstream:
        fragments = upstream.work()
        assert (await anext(fragments)).status == "in_progress"
        await fragments.aclose()  # type: ignore[attr-defined]
        async with asyncio.timeout(10):
            await upstream.gone.wait()


async def test_a_subagent_that_sends_too_many_parts_fails() -> None:
    async with replying(b'{"status":"pending"}\n' * 201, "application/x-ndjson") as upstream:
        failed = await upstream.failure(CardSubagent(), max_fragments=200)
    assert (failed.failure_kind, failed.message) == (FailureKind.UNUSABLE, "It sent more than 200 parts.")
    async with replying(
        b'{"status":"pending"}\n' * 199 + lines({"status": "success"}), "application/x-ndjson"
    ) as upstream:
        assert len(await upstream.all(CardSubagent(), max_fragments=200)) == 200


# --- who is found


async def test_a_kind_of_subagent_is_found_only_if_it_is_enabled() -> None:
    outbound = AiohttpOutbound(guard=AddressGuard(()), max_reply_bytes=1_000)
    documentation = CardSubagent()
    roster = SubagentRegistry(
        documentation=documentation, outbound=outbound, clock=SystemClock(), enabled={"documentation"}
    )
    found = {
        key: roster.find(Expected(key=key, result_key="r")) for key in (*KINDS, "documentation-qa", "Documentation")
    }
    assert found["documentation"] is found["documentation-qa"] is found["Documentation"] is documentation
    assert {key for key, one in found.items() if one is None} == set(KINDS) - {"documentation"}
    assert isinstance(roster.find(Expected(key="documentation", result_key="r", url="http://x")), HttpSubagent)
    assert roster.find(Expected(key="voice", result_key="r", url="http://x")) is None
    every = SubagentRegistry(documentation=documentation, outbound=outbound, clock=SystemClock())
    rows, other = (every.find(Expected(key=key, result_key="r")) for key in ("row-selection", "whatever this is"))
    assert isinstance(rows, CardSubagent)
    assert isinstance(other, CardSubagent)
    assert (rows.card, other.card) == (preview, dict)
    await outbound.close()
