"""How log lines get out: in batches, and nothing waits for long."""

import asyncio
import atexit
import hashlib
import logging
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import lru_cache
from multiprocessing import parent_process
from types import MappingProxyType
from typing import Any, Protocol, TextIO

import msgspec
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from anabranch.configuration.settings import Settings
from anabranch.domain.clock import SystemClock
from anabranch.domain.contracts import Attribute, Clock
from anabranch.domain.errors import Overloaded
from anabranch.domain.events import (
    Answered,
    AnswerEvent,
    Failed,
    GenerationStarted,
    RetrievalFinished,
    RetrievalStarted,
    SourceReplied,
    Token,
)
from anabranch.domain.model import Answer, Context, Question, Status
from anabranch.domain.signals import (
    BreakerMoved,
    Compared,
    CrumbsLost,
    Metered,
    RedisMoved,
    RedisSaidNo,
    Rejected,
    ServerMoved,
    Signal,
)
from anabranch.network import redaction

FLUSH_AFTER_S = 0.05
PIPE_BYTES = 4096


class LogWriter:
    """Writes lines in batches: a system call per line would cost more than the rest of the telemetry. A line waits
    at most FLUSH_AFTER_S; an error, and anything outside an event loop, is written at once."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        # One of several workers: they write into the same pipe, which takes only so much in one piece.
        self._most_bytes = PIPE_BYTES if parent_process() is not None else None
        self._lines: list[str] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        atexit.register(self.flush)

    def msg(self, line: str) -> None:
        self._lines.append(line)
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self.flush()
            return
        if loop is not self._loop:
            self._loop = loop
            self._timer = None
        if self._timer is None:
            self._timer = loop.call_later(FLUSH_AFTER_S, self.flush)

    def urgent(self, line: str) -> None:
        self._lines.append(line)
        self.flush()

    debug = info = warning = msg
    error = critical = exception = fatal = urgent

    def flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._lines:
            lines, self._lines = self._lines, []
            with suppress(OSError, ValueError):
                for piece in ["\n".join(lines) + "\n"] if self._most_bytes is None else pieces(lines, self._most_bytes):
                    self._stream.write(piece)
                    self._stream.flush()


def pieces(lines: Sequence[str], most_bytes: int) -> Iterator[str]:
    """Whole lines, as many at a time as fit."""
    piece: list[str] = []
    size = 0
    for line in lines:
        length = len(line.encode(errors="replace")) + 1
        if piece and size + length > most_bytes:
            yield "".join(piece)
            piece, size = [], 0
        piece.append(line + "\n")
        size += length
    if piece:
        yield "".join(piece)


Log = structlog.typing.FilteringBoundLogger


def _text(value: Any) -> str:
    return str(value)


encode = msgspec.json.Encoder(enc_hook=_text).encode


def stamped(_log: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Level and time. A line is written a dozen times per question, so the date is formatted once a second."""
    now = time.time()
    event["level"] = method
    event["timestamp"] = f"{_second(int(now))}.{int(now % 1 * 1_000_000):06d}Z"
    return event


@lru_cache(maxsize=2)
def _second(whole: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole))


class JsonLog:
    """A log for what is written a dozen times per question: JSON, without what a general logger does around it."""

    def __init__(self, log: Log, writer: LogWriter, level: int) -> None:
        self._log = log
        self._writer = writer
        self._level = level

    def info(self, event: str, **said: object) -> None:
        if self._level <= logging.INFO:
            self._write("info", event, said)

    def warning(self, event: str, **said: object) -> None:
        if self._level <= logging.WARNING:
            self._write("warning", event, said)

    def error(self, event: str, **said: object) -> None:
        self._log.error(event, **said)

    def _write(self, level: str, event: str, said: dict[str, object]) -> None:
        said["event"] = event
        self._writer.msg(encode(stamped(None, level, said)).decode())


class EventLogger(Protocol):
    """As much of a log as telemetry needs."""

    def info(self, event: str, **said: Any) -> object: ...

    def warning(self, event: str, **said: Any) -> object: ...

    def error(self, event: str, **said: Any) -> object: ...


def fast_log(log: Log, settings: Settings) -> EventLogger:
    """The log itself, or, where it writes JSON, a quicker way to the same lines."""
    if settings.log_format != "json":
        return log
    return JsonLog(log, writer_of(log), logging.getLevelNamesMapping()[settings.log_level])


def writer_of(log: Log) -> LogWriter:
    writer: LogWriter = log.new()._logger  # type: ignore[attr-defined]
    return writer


SOCKETS = "uvicorn.error.sockets"
# Libraries log what they carry: sse_starlette whole answers at DEBUG, others headers and addresses at INFO. So they log
# from WARNING on, whatever our own level is, and uvicorn from INFO on (its start-up lines). Exceptions: of a WebSocket
# uvicorn shows the whole address at INFO, and keys may be in it; the MCP SDK's client quotes other people's servers and
# session identifiers in warnings as well.
LIBRARIES: Mapping[str | None, int] = {
    None: logging.WARNING,
    "uvicorn": logging.INFO,
    SOCKETS: logging.WARNING,
    **dict.fromkeys(("client", "httpcore2", "httpx2", "mcp.client", "mcp.shared", "mcp_types"), logging.CRITICAL),
}
SELDOM_S = 1.0
MAX_QUERY = 100
MAX_NAME = 100
MAX_SENTENCE = 1_000
ADDRESS = re.compile(r"^[a-z][a-z0-9+.-]*://(?:[^/?#]*@)?([^/?#]*).*$", re.IGNORECASE | re.DOTALL)
EXCEPTION = structlog.processors.ExceptionRenderer()


class SilentTelemetry:
    """Telemetry that says nothing."""

    def asked(self, question: Question, context: Context) -> None: ...

    def happened(self, event: AnswerEvent, context: Context) -> None: ...

    def crashed(self, error: BaseException, context: Context) -> None: ...

    def noted(self, signal: Signal) -> None: ...

    def span(self, name: str, context: Context, **attributes: str | int | float) -> "NullSpan":  # noqa: ARG002
        return NullSpan(context)


class NullSpan:
    """A span that nobody looks at."""

    __slots__ = ("context",)

    def __init__(self, context: Context) -> None:
        self.context = context

    def __enter__(self) -> "NullSpan":
        return self

    def __exit__(self, *_: object) -> None: ...

    def set(self, name: str, value: Attribute) -> None: ...


# What the end of a question says of its beginning, in the task that answers it.
asking: ContextVar[Mapping[str, str]] = ContextVar("asking", default=MappingProxyType({}))


class LoggedEvents(SilentTelemetry):
    """Telemetry that writes what happens as log lines. Questions appear as hash and length, unless `queries` are
    wanted; tokens never."""

    def __init__(self, log: EventLogger, *, queries: bool = False, clock: Clock | None = None) -> None:
        self._log = log
        self._queries = queries
        self._clock = clock or SystemClock()
        self._redis_gone = False
        self._last: dict[str, float] = {}
        self._left_out: Counter[str] = Counter()

    def asked(self, question: Question, context: Context) -> None:
        told = {"query_hash": hashlib.blake2b(question.text.encode(errors="replace"), digest_size=8).hexdigest()}
        if self._queries:
            told["query"] = question.text[:MAX_QUERY]
        asking.set(told)
        self._log.info(
            "chat_request_started",
            **_ids(context),
            user_id=context.user_id,
            client=context.address,
            **told,
            query_length=len(question.text),
            sources=len(question.sources),
            model=question.model.path if question.model else None,
        )

    def happened(self, event: AnswerEvent, context: Context) -> None:
        if isinstance(event, Token):
            return
        said = _ids(context)
        match event:
            case RetrievalStarted():
                self._log.info("chat_retrieval_started", **said, sources=len(event.sources))
                for path in event.sources:
                    self._log.info("data_source_query_started", **said, path=path)
            case SourceReplied(reply=reply):
                write = self._log.info if reply.status is Status.SUCCESS else self._log.warning
                write(
                    "data_source_query_completed",
                    **said,
                    path=reply.path,
                    status=reply.status,
                    documents_count=len(reply.passages),
                    latency_ms=reply.latency_ms,
                    # Our own words only: what stands behind the colon may be the upstream's.
                    reason=reply.error.partition(":")[0] if reply.error else None,
                )
            case RetrievalFinished():
                found, took_ms = event.passages, event.time_ms
                self._log.info("chat_retrieval_completed", **said, documents_count=found, latency_ms=took_ms)
            case GenerationStarted():
                self._log.info("chat_generation_started", **said, model=event.model)
            case Answered():
                self._answered(event.answer, context, said)
            case Failed():
                self._failed(event, context, said)

    def _answered(self, answer: Answer, context: Context, said: dict[str, str]) -> None:
        if answer.model is not None and not answer.cached:
            took_ms = answer.timings.generation_ms
            self._log.info("model_query_completed", **said, model=answer.model, status="success", latency_ms=took_ms)
        self._log.info(
            "chat_request_completed",
            **said,
            user_id=context.user_id,
            **asking.get(),
            status="success",
            documents_count=sum(len(reply.passages) for reply in answer.replies),
            latency_ms=answer.timings.total_ms,
            cached=answer.cached,
            refused=answer.refused,
        )

    def _failed(self, event: Failed, context: Context, said: dict[str, str]) -> None:
        if "model_path" in event.details:
            model, took_ms = event.details["model_path"], event.details.get("latency_ms")
            # Our own words only: what stands behind the colon may be the model server's.
            reason = event.message.removeprefix("Model generation failed: ").partition(":")[0]
            self._log.warning(
                "model_query_completed", **said, model=model, status="error", latency_ms=took_ms, reason=reason
            )
        write = self._log.info if event.code == "cancelled" else self._log.warning
        write(
            "chat_request_completed",
            **said,
            user_id=context.user_id,
            **asking.get(),
            status="error",
            code=event.code,
            latency_ms=event.time_ms,
        )

    def crashed(self, error: BaseException, context: Context) -> None:
        self._log.error("unexpected_error", **_ids(context), exc_info=error)

    def noted(self, signal: Signal) -> None:
        match signal:
            case RedisMoved(reachable=False) if not self._redis_gone:
                self._redis_gone = True
                self._log.warning("redis_gone", reason=signal.reason)
            case RedisMoved(reachable=True) if self._redis_gone:
                self._redis_gone = False
                self._log.info("redis_back")
            case BreakerMoved(state="open"):
                self._log.warning("breaker_opened", upstream=label(signal.upstream))
            case BreakerMoved():
                self._log.info(f"breaker_{signal.state}", upstream=label(signal.upstream))
            case Metered(admitted=False):
                self._seldom(self._log.info, "rate_limited", surface=signal.surface, caller=label(signal.caller))
            case Rejected(code=Overloaded.code):
                self._seldom(self._log.warning, "overloaded", surface=signal.surface)
            case RedisSaidNo():
                self._seldom(self._log.warning, "redis_refused", reason=signal.why)
            case Compared():
                session, step = label(signal.session_id), label(signal.plan_step_id)
                write = self._log.info if signal.equal else self._log.warning
                differences = list(signal.differences)
                write(
                    "planner_shadow", session_id=session, plan_step_id=step, equal=signal.equal, differences=differences
                )
            case CrumbsLost():
                self._log.warning("breadcrumbs_lost", count=signal.count)
            case ServerMoved():
                self._server_moved(signal)
            case _:
                pass

    def _server_moved(self, signal: ServerMoved) -> None:
        server, reason = label(signal.server), sentence(signal.reason)
        words = {"last_words": sentence(signal.last_words)} if signal.last_words else {}
        if signal.state == "ready":
            self._log.info("mcp_server_ready", server=server)
        elif signal.state == "failed":
            self._log.warning("mcp_server_failed", server=server, reason=reason, **words)
        elif reason:
            self._log.warning("mcp_server_lost", server=server, reason=reason, **words)

    def _seldom(self, write: Callable[..., object], event: str, **said: str) -> None:
        """What comes in floods is one line a second, which says how many are not there."""
        now = self._clock.monotonic()
        if event in self._last and now - self._last[event] < SELDOM_S:
            self._left_out[event] += 1
            return
        self._last[event] = now
        write(event, **said, left_out=self._left_out.pop(event, 0))


def flush(log: Log) -> None:
    """Write what still waits: a worker may be ended by a signal, and then nothing runs at its exit."""
    writer_of(log).flush()


def configured_log(settings: Settings, stream: TextIO | None = None) -> Log:
    """The log that the settings ask for; the standard library's loggers (the server's among them) go the same way."""
    out = stream or sys.stderr
    level = logging.getLevelNamesMapping()[settings.log_level]
    shared: list[Processor] = [stamped]
    if settings.log_format == "json":
        rendering: list[Processor] = [_json]
    else:
        # A plain traceback: a rich one shows the values of variables, and tokens are among them.
        plain = structlog.dev.plain_traceback
        rendering = [structlog.dev.ConsoleRenderer(colors=out.isatty(), exception_formatter=plain)]
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering, _redacted],
        )
    )
    logging.root.handlers[:] = [handler]
    for name, lowest in LIBRARIES.items():
        logging.getLogger(name).setLevel(max(level, lowest))
    log: Log = structlog.wrap_logger(
        LogWriter(out),
        processors=[*shared, *rendering, _redacted],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=True,
    )
    return log


def label(name: str) -> str:
    """A name as it may stand in a log line or a label: short, printable, and of a URL no more than the host."""
    return _printable(ADDRESS.sub(r"\1", name[: 4 * MAX_NAME])[:MAX_NAME])


def sentence(text: str) -> str:
    """One line of a bounded length, whatever was quoted in it."""
    return _printable(text if len(text) <= MAX_SENTENCE else text[: MAX_SENTENCE - 1] + "…")


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)


def _ids(context: Context) -> dict[str, str]:
    return {"correlation_id": context.correlation_id, "trace_id": context.trace_id}


def _redacted(_log: WrappedLogger, _method: str, line: Any) -> str:
    """Tracebacks and libraries' lines may quote an upstream. What is written for each question (`lines`) does not pass
    here: it quotes only what has been redacted."""
    return redaction.removed(line)


def _json(log: WrappedLogger, method: str, event: EventDict) -> str:
    if "exc_info" in event:
        event = EXCEPTION(log, method, event)
    return encode(event).decode()
