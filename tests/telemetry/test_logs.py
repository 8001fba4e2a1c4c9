"""Logs: spec 1's events and fields, for answers and failures, without secrets."""

import asyncio
import io
import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any, Never

import aiohttp
import pytest

from anabranch import Answer, Question
from anabranch.configuration.settings import Settings
from anabranch.domain.contracts import Emit
from anabranch.domain.events import Answered
from anabranch.domain.model import Context, Ground
from anabranch.domain.signals import (
    BreakerState,
    BreakerStateChanged,
    EvidenceUnavailable,
    QuestionNotRecorded,
    RateLimitChecked,
    RecordingFailed,
    RedisStateChanged,
    Rejected,
    Signal,
)
from anabranch.telemetry.log import LoggedEvents, batches, configured_log
from anabranch.testing import Document, ManualClock, Space
from conftest import Server, ref

Serve = Callable[..., AbstractAsyncContextManager[Server]]

SECRETS = {
    "question": "Where does the heron sleep?",
    "document": "The heron sleeps under the alder by the weir.",
    "title": "Heron diary",
    "endpoint token": "sat-7f3a",
    "transaction token": "tx-91bc",
    "user token": "hub-55de",
    "peer token": "peer-08aa",
    "history": "Herons, please.",
    "system prompt": "Speak like a heron.",
    "answer": "By the weir, says the model.",
}
ID = "trace-me-1"
STATES: tuple[BreakerState, ...] = ("open", "half_open", "closed")
STEPS = re.compile(r"^(chat|data_source|model)_")


class Log:
    """What the server has written to standard error so far."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self._text = ""

    @property
    def text(self) -> str:
        self._text += self._capsys.readouterr().err
        return self._text

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines()]

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if STEPS.match(line["event"])]

    def of(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] == event]

    def has(self, words: str) -> Callable[[], bool]:
        return lambda: words in self.text


@pytest.fixture
def log(capsys: pytest.CaptureFixture[str]) -> Iterator[Log]:
    yield Log(capsys)
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)


class Broken:
    """An Answerer with a bug."""

    def __init__(self, **_: object) -> None: ...

    async def answer(self, question: Question, context: Context, emit: Emit) -> Answer:
        raise ZeroDivisionError("a detail that is nobody's business")


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.app.wiring.Pipeline", Broken)


def body(space: Space, *slugs: str, model: str = "scribe") -> dict[str, Any]:
    """A question with a secret in every place that has room for one."""
    space.source("heron", documents=[Document(title=SECRETS["title"], content=SECRETS["document"])])
    space.model("weir", reply=SECRETS["answer"])
    return {
        "prompt": SECRETS["question"],
        "model": ref(space, model, "mia"),
        "data_sources": [ref(space, slug, "alice") for slug in slugs],
        "endpoint_tokens": {"alice": SECRETS["endpoint token"], "mia": SECRETS["endpoint token"]},
        "transaction_tokens": {"alice": SECRETS["transaction token"], "mia": SECRETS["transaction token"]},
        "user_token": SECRETS["user token"],
        "peer_token": SECRETS["peer token"],
        "messages": [{"role": "user", "content": SECRETS["history"]}],
        "custom_system_prompt": SECRETS["system prompt"],
    }


async def ask(server: Server, request: dict[str, Any], path: str = "/api/v1/chat") -> tuple[int, str]:
    headers = {"X-Correlation-ID": ID}
    async with server.session.post(server.url + path, json=request, headers=headers) as response:
        assert response.headers["X-Correlation-ID"] == ID
        return response.status, await response.text()


# --- events and fields


@pytest.mark.parametrize("path", ["/api/v1/chat", "/api/v1/chat/stream"])
async def test_an_answer_is_logged_step_by_step(serve: Serve, space: Space, log: Log, path: str) -> None:
    async with serve(log_level="INFO") as server:
        await ask(server, body(space, "heron"), path)
        await space.wait_for(log.has("chat_request_completed"))
    assert [line["event"] for line in log.steps] == [
        "chat_request_started",
        "chat_retrieval_started",
        "data_source_query_started",
        "data_source_query_completed",
        "chat_retrieval_completed",
        "chat_generation_started",
        "model_query_completed",
        "chat_request_completed",
    ]
    assert {line["correlation_id"] for line in log.steps} == {ID}
    assert {line["trace_id"] for line in log.steps} == {ID}, "without a trace, the one is the other"
    assert all({"level", "timestamp"} <= line.keys() for line in log.lines)
    for event in ("data_source_query_completed", "chat_retrieval_completed", "chat_request_completed"):
        assert log.of(event)[0]["documents_count"] == 1
        assert isinstance(log.of(event)[0]["latency_ms"], int)
    assert isinstance(log.of("model_query_completed")[0]["latency_ms"], int)
    for event in ("data_source_query_completed", "model_query_completed", "chat_request_completed"):
        assert log.of(event)[0]["status"] == "success"
    assert log.of("data_source_query_started")[0]["path"] == "alice/heron"
    started = log.of("chat_request_started")[0]
    assert started["query_length"] == len(SECRETS["question"])
    assert re.fullmatch(r"[\da-f]{16}", started["query_hash"])
    completed = log.of("chat_request_completed")[0]
    assert completed["query_hash"] == started["query_hash"]
    assert "user_id" in started.keys() & completed.keys()
    assert (completed["cached"], completed["refused"]) == (False, False)


async def test_the_trace_id_of_the_caller_is_in_every_log_line(serve: Serve, space: Space, log: Log) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
    async with serve(log_level="INFO") as server:
        await server.post("/api/v1/chat", body(space, "heron"), headers=headers)
        await space.wait_for(log.has("chat_request_completed"))
    assert {line["trace_id"] for line in log.steps} == {trace}
    assert ID not in log.text


async def test_the_query_hash_of_concurrent_questions_is_not_mixed_up(serve: Serve, space: Space, log: Log) -> None:
    async with serve(log_level="INFO") as server:
        await asyncio.gather(
            *(ask(server, {**body(space, "heron"), "prompt": f"Number {number}?"}) for number in range(5)),
            ask(server, {**body(space, "heron", model="status-401"), "prompt": "Number 5?"}),
        )
        await space.wait_for(lambda: len(log.of("chat_request_completed")) == 6)
    begun, ended = (
        sorted(line["query_hash"] for line in log.of(event))
        for event in ("chat_request_started", "chat_request_completed")
    )
    assert begun == ended
    assert len(set(begun)) == 6


async def test_the_same_question_has_the_same_query_hash(serve: Serve, space: Space, log: Log) -> None:
    async with serve(log_level="INFO") as server:
        await ask(server, body(space, "heron"))
        await ask(server, body(space, "docs"))
        await ask(server, {**body(space), "prompt": "Something else?"})
        await space.wait_for(lambda: len(log.of("chat_request_completed")) == 3)
    first, second, third = (line["query_hash"] for line in log.of("chat_request_started"))
    assert first == second != third


async def test_each_failed_source_is_logged(serve: Serve, space: Space, log: Log) -> None:
    async with serve(log_level="INFO", retrieval_timeout=0.1) as server:
        await ask(server, body(space, "heron", "hang", "status-403", "rate-limited"))
        await space.wait_for(log.has("chat_request_completed"))
    told = {line["path"]: (line["status"], line["level"]) for line in log.of("data_source_query_completed")}
    assert told == {
        "alice/heron": ("success", "info"),
        "alice/hang": ("timeout", "warning"),
        "alice/status-403": ("access_denied", "warning"),
        "alice/rate-limited": ("rate_limited", "warning"),
    }
    slow = next(line for line in log.of("data_source_query_completed") if line["path"] == "alice/hang")
    assert 0 < slow["latency_ms"] < 5_000
    assert log.of("chat_request_completed")[0]["status"] == "success"


@pytest.mark.parametrize(
    ("model", "settings", "code"),
    [
        ("status-500", {}, "generation_failed"),
        ("hang", {"generation_timeout": 0.1}, "generation_failed"),
        ("hang", {"total_timeout": 0.3}, "deadline_exceeded"),
    ],
)
async def test_a_failed_question_is_logged_with_its_code(
    serve: Serve, space: Space, log: Log, model: str, settings: dict[str, float], code: str
) -> None:
    async with serve(log_level="INFO", **settings) as server:
        await ask(server, body(space, "heron", model=model))
        await space.wait_for(log.has("chat_request_completed"))
    assert {line["correlation_id"] for line in log.steps} == {ID}
    end = log.steps[-1]
    assert (end["event"], end["status"], end["code"]) == ("chat_request_completed", "error", code)
    assert end["level"] == "warning"
    assert isinstance(end["latency_ms"], int)
    if code == "generation_failed":
        of_model = log.steps[-2]
        assert of_model["event"] == "model_query_completed"
        assert of_model["status"] in ("error", "timeout")
        assert isinstance(of_model["latency_ms"], int)


async def test_the_latency_of_a_failed_request_is_that_of_the_request(serve: Serve, space: Space, log: Log) -> None:
    space.source("slow", documents=[Document(title="T", content="Slow.")], delay_s=0.2)
    async with serve(log_level="INFO") as server:
        await ask(server, body(space, "slow", model="status-500"))
        await space.wait_for(log.has("chat_request_completed"))
    assert log.of("model_query_completed")[0]["latency_ms"] < 200
    assert log.of("chat_request_completed")[0]["latency_ms"] >= 200


async def test_long_names_of_a_request_are_logged_in_short(serve: Serve, space: Space, log: Log) -> None:
    name = "n" * 100_000
    async with serve(log_level="INFO") as server:
        source, model = {"url": space.url, "slug": name, "owner_username": name}, {"url": space.url, "slug": name}
        await ask(server, {"prompt": "x", "data_sources": [source], "model": model})
        await space.wait_for(log.has("chat_request_completed"))
    assert {line["path"] for line in log.of("data_source_query_completed")} == {name[:100]}
    assert {line["model"] for line in log.of("model_query_completed")} == {name[:100]}
    assert all(len(json.dumps(line)) < 3_000 for line in log.lines)


async def test_a_cancelled_question_is_logged(serve: Serve, space: Space, log: Log) -> None:
    async with serve(log_level="INFO") as server:
        url = f"{server.url}/api/v1/chat/stream"
        async with server.session.post(url, json=body(space, "heron", model="hang")) as response:
            await response.content.readuntil(b"generation_start")
            response.close()
        await space.wait_for(log.has("chat_request_completed"))
    end = log.of("chat_request_completed")[0]
    assert (end["status"], end["code"], end["level"]) == ("error", "cancelled", "info")


async def test_events_below_the_log_level_are_not_logged(serve: Serve, space: Space, log: Log) -> None:
    async with serve(log_level="WARNING") as server:
        await ask(server, body(space, "heron", "status-500"))
        await ask(server, body(space, "heron", model="status-500"))
        await space.wait_for(log.has("chat_request_completed"))
    assert {line["level"] for line in log.lines} == {"warning"}
    assert {line["event"] for line in log.lines} == {
        "data_source_query_completed",
        "model_query_completed",
        "chat_request_completed",
    }


async def test_console_log_format(serve: Serve, space: Space, log: Log) -> None:
    async with serve(log_level="INFO", log_format="console") as server:
        await ask(server, body(space, "heron"))
        await space.wait_for(log.has("chat_request_completed"))
    assert "{" not in log.text
    assert "\x1b" not in log.text, "no colors where no terminal is"
    lines = [line for line in log.text.splitlines() if "chat_request_completed" in line]
    assert len(lines) == 1
    assert re.search(r"\[info +\] chat_request_completed +.*correlation_id=trace-me-1", lines[0])
    assert "latency_ms=" in lines[0]
    assert "status=success" in lines[0]


# --- how the machinery does


class Machinery:
    """The telemetry of a server without one, and what it writes."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.stream = io.StringIO()
        self._log = configured_log(Settings(), self.stream)
        self._telemetry = LoggedEvents(self._log, clock=self.clock)

    def noted(self, *signals: Signal) -> None:
        for one in signals:
            self._telemetry.noted(one)

    @property
    def told(self) -> list[tuple[str, str]]:
        self._log.flush()
        lines = [json.loads(line) for line in self.stream.getvalue().splitlines()]
        return [(line["event"], line["level"]) for line in lines]


def test_redis_outages_are_logged_at_their_beginning_and_end() -> None:
    machinery = Machinery()
    machinery.noted(RedisStateChanged(reachable=True))
    assert machinery.told == [], "that it is there is no news"
    machinery.noted(
        RedisStateChanged(reachable=False), RedisStateChanged(reachable=False), RedisStateChanged(reachable=True)
    )
    assert machinery.told == [("redis_gone", "warning"), ("redis_back", "info")]


def test_breaker_changes_are_logged_without_urls() -> None:
    machinery = Machinery()
    for state in STATES:
        machinery.noted(BreakerStateChanged(upstream="https://user:pw@node.example/path?key=1", state=state))
    assert machinery.told == [("breaker_opened", "warning"), ("breaker_half_open", "info"), ("breaker_closed", "info")]
    assert machinery.stream.getvalue().count('"upstream":"node.example"') == 3


def test_an_evidence_model_that_cannot_be_loaded_is_logged_with_the_reason() -> None:
    machinery = Machinery()
    machinery.noted(EvidenceUnavailable(reason="It is not installed. Run: anabranch models install"))
    assert machinery.told == [("evidence_unavailable", "warning")]
    assert "Run: anabranch models install" in machinery.stream.getvalue()


def test_a_recording_that_cannot_be_written_is_logged_with_the_reason() -> None:
    machinery = Machinery()
    machinery.noted(RecordingFailed(reason="/data/recordings: No space left on device."))
    assert machinery.told == [("recording_failed", "warning")]
    assert "No space left on device" in machinery.stream.getvalue()


def test_a_question_that_cannot_be_recorded_is_a_warning_with_the_reason() -> None:
    machinery = Machinery()
    machinery.noted(QuestionNotRecorded(reason="The records cannot be written (database or disk is full)."))
    assert machinery.told == [("question_not_recorded", "warning")]
    assert "disk is full" in machinery.stream.getvalue()


def test_repeated_rejections_are_logged_once_a_second() -> None:
    machinery = Machinery()
    for _ in range(1_000):
        machinery.noted(
            RateLimitChecked(surface="rag_stream", admitted=True),
            RateLimitChecked(surface="rag_stream", admitted=False),
            Rejected(surface="rag_stream", code="rate_limited"),
            Rejected(surface="chat", code="overloaded"),
        )
    assert machinery.told == [("rate_limited", "info"), ("overloaded", "warning")]
    machinery.clock.advance(1.0)
    machinery.noted(Rejected(surface="chat", code="overloaded"))
    assert machinery.told[2:] == [("overloaded", "warning")]
    assert '"left_out":999' in machinery.stream.getvalue()


def test_a_cached_answer_is_logged_without_a_model_call() -> None:
    stream = io.StringIO()
    telemetry = LoggedEvents(configured_log(Settings(), stream))
    answer = Answer(text="By the weir.", ground=Ground.DOCUMENTS, model="mia/weir", cached=True)
    telemetry.happened(Answered(answer=answer), Context(correlation_id=ID, deadline=1.0, user_id="ursula"))
    (line,) = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (line["event"], line["cached"], line["user_id"]) == ("chat_request_completed", True, "ursula")


# --- what must never be in it


@pytest.mark.parametrize("log_format", ["json", "console"])
async def test_logs_hold_no_secrets_and_no_texts(serve: Serve, space: Space, log: Log, log_format: str) -> None:
    async with serve(log_level="DEBUG", log_format=log_format, retrieval_timeout=0.1, generation_timeout=0.2) as server:
        for path in ("/api/v1/chat", "/api/v1/chat/stream"):
            await ask(server, body(space, "heron", model="weir"), path)
            await ask(server, body(space, "heron", "hang", "bad-json", "wrong-shape", "reset", model="weir"), path)
            for model in ("status-401", "hang", "bad-json", "reset"):
                await ask(server, body(space, "heron", model=model), path)
        await ask(server, {**body(space, "heron"), "top_k": 1000})
        await ask(server, {**body(space, "heron"), "endpoint_tokens": [SECRETS["endpoint token"]]})
        await space.wait_for(lambda: log.text.count("chat_request_completed") == 12)
    for what, secret in SECRETS.items():
        assert secret not in log.text, what


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize("log_format", ["json", "console"])
async def test_tracebacks_hold_no_secrets(serve: Serve, space: Space, log: Log, log_format: str) -> None:
    async with serve(log_level="DEBUG", log_format=log_format) as server:
        await ask(server, body(space, "heron"))
        await space.wait_for(log.has("chat_request_completed"))
    assert "ZeroDivisionError" in log.text
    for what, secret in SECRETS.items():
        assert secret not in log.text, what


# --- our own mistakes


@pytest.mark.usefixtures("broken")
async def test_an_unexpected_error_is_500_with_a_correlation_id_and_a_logged_traceback(
    serve: Serve, space: Space, log: Log
) -> None:
    async with serve(log_level="INFO") as server:
        status, text = await ask(server, body(space, "heron"))
        await space.wait_for(log.has("chat_request_completed"))
    error = json.loads(text)
    assert (status, error["error"]) == (500, "internal_error")
    assert "nobody's business" not in text
    assert "ZeroDivisionError" not in text
    assert error["details"] == {"correlation_id": ID}
    crash = log.of("unexpected_error")[0]
    assert (crash["level"], crash["correlation_id"]) == ("error", ID)
    assert "Traceback (most recent call last)" in crash["exception"]
    assert "ZeroDivisionError: a detail that is nobody's business" in crash["exception"]
    assert log.of("chat_request_completed")[0]["code"] == "internal_error"


@pytest.mark.usefixtures("broken")
async def test_an_unexpected_error_ends_a_stream_with_an_error_event(serve: Serve, space: Space, log: Log) -> None:
    async with serve(log_level="INFO") as server:
        status, text = await ask(server, body(space, "heron"), "/api/v1/chat/stream")
        await space.wait_for(log.has("unexpected_error"))
    assert status == 200
    assert text.startswith("event: error\ndata: ")
    assert '"error":"internal_error"' in text
    assert "nobody's business" not in text


@pytest.mark.usefixtures("broken")
async def test_an_unexpected_error_ends_a_rag_stream_with_an_error_frame(serve: Serve, space: Space, log: Log) -> None:
    async with serve(log_level="INFO") as server:
        status, text = await ask(server, {"query": "Why?"}, "/rag/stream")
        await space.wait_for(log.has("unexpected_error"))
    [frame] = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]
    assert (status, frame["type"], frame["data"]["error_code"]) == (200, "error", "internal_error")
    assert frame["data"]["details"] == {"correlation_id": ID}
    assert "nobody's business" not in text


@pytest.fixture
def broken_health(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Never:
        raise ZeroDivisionError("a detail that is nobody's business")

    monkeypatch.setattr("anabranch.entrypoints.http.ops.OpsSurface._health", fail)


@pytest.mark.usefixtures("broken_health")
async def test_an_unexpected_error_outside_a_question_is_500_with_a_correlation_id(
    serve: Serve, space: Space, log: Log
) -> None:
    async with serve(log_level="INFO") as server:
        async with server.session.get(f"{server.url}/health", headers={"X-Correlation-ID": ID}) as response:
            error = await response.json()
            assert (response.status, response.headers["X-Correlation-ID"]) == (500, ID)
        await space.wait_for(log.has("unexpected_error"))
    assert (error["error"], error["details"]) == ("internal_error", {"correlation_id": ID})
    assert "nobody's business" not in json.dumps(error)
    assert "ZeroDivisionError" in log.of("unexpected_error")[0]["exception"]


@pytest.mark.usefixtures("broken_health")
async def test_an_unexpected_error_has_cors_headers(serve: Serve) -> None:
    async with serve(log_level="INFO") as server:
        url, headers = f"{server.url}/health", {"Origin": "https://app.example"}
        async with server.session.get(url, headers=headers) as response:
            assert response.status == 500
            assert response.headers.get("Access-Control-Allow-Origin") == "*"


def test_workers_write_whole_lines_in_batches_that_fit_into_a_pipe() -> None:
    lines = ["x" * 1000, "é" * 1500, "y" * 10, "z" * 9000, ""]
    written = list(batches(lines, 4096))
    assert "".join(written) == "".join(line + "\n" for line in lines)
    assert [len(piece.encode()) <= 4096 for piece in written] == [True, False, True]


async def test_websocket_keys_are_not_logged_and_a_refused_socket_is_no_error(serve: Serve, log: Log) -> None:
    async with serve(log_level="DEBUG") as server:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await server.session.ws_connect(
                f"{server.url}/planner/sessions/s/steps/p/ws?key=ab_alder",
                headers={"Authorization": "Bearer ab_heron"},
                protocols=("anabranch.planner", "bearer.ab_weir"),
            )
    assert refused.value.status == 401
    assert log.of("request_refused")
    assert "ab_" not in log.text
    assert not [line for line in log.lines if line["level"] == "error"]
