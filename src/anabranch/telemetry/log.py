"""Structured logs and the correlation id."""

import asyncio
import atexit
import hashlib
import logging
import random
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from contextvars import ContextVar
from functools import lru_cache
from multiprocessing import parent_process
from types import MappingProxyType
from typing import Any, TextIO

import msgspec

from anabranch.configuration.settings import Settings
from anabranch.domain.audit import AuditRecord
from anabranch.domain.contracts import Attribute, Clock, Span, SystemClock
from anabranch.domain.errors import Overloaded
from anabranch.domain.events import (
    Answered,
    AnswerEvent,
    Failed,
    FellBack,
    GenerationStarted,
    RetrievalFinished,
    RetrievalStarted,
    SourceReplied,
)
from anabranch.domain.model import Answer, Context, Question, Status
from anabranch.domain.signals import (
    AddedSourcesUnreadable,
    BreadcrumbsDropped,
    BreakerStateChanged,
    EvidenceUnavailable,
    McpServerStateChanged,
    QuestionNotRecorded,
    RateLimitChecked,
    RecordingFailed,
    RedisCommandRefused,
    RedisStateChanged,
    Rejected,
    ShadowCompared,
    Signal,
)
from anabranch.network import redaction

SAFE = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)


def new_correlation_id() -> str:
    # Not secret, and the system's random source can cost as much as an upstream call.
    return f"{random.getrandbits(128):032x}"


def correlation_id(given: str | None) -> str:
    """The caller's id, if it is safe to send on and to log; else a new one."""
    return given if given is not None and SAFE.fullmatch(given) else new_correlation_id()


FLUSH_AFTER_S = 0.05
PIPE_BYTES = 4096
SOCKETS = "uvicorn.error.sockets"
# Libraries log what they carry: sse_starlette whole answers at DEBUG, others headers and addresses at INFO. So they log
# from WARNING on, whatever our own level is, and uvicorn from INFO on (its start-up lines). Exceptions: for a WebSocket
# uvicorn logs the whole URL at INFO, and keys may be in it; the MCP SDK's client quotes other people's servers and
# session identifiers in warnings as well.
LIBRARIES: Mapping[str | None, int] = {
    None: logging.WARNING,
    "uvicorn": logging.INFO,
    SOCKETS: logging.WARNING,
    **dict.fromkeys(("client", "httpcore2", "httpx2", "mcp.client", "mcp.shared", "mcp_types"), logging.CRITICAL),
}
RATE_LIMITED_EVERY_S = 1.0
MAX_QUERY = 100
MAX_NAME = 100
MAX_SENTENCE = 1_000
URL = re.compile(r"^[a-z][a-z0-9+.-]*://(?:[^/?#]*@)?([^/?#]*).*$", re.IGNORECASE | re.DOTALL)
COLORS = {"warning": "\x1b[33m", "error": "\x1b[31m", "critical": "\x1b[31m"}

Render = Callable[[dict[str, Any]], str]


class Log:
    """Writes events at or above a level as lines, in batches: a system call per line would cost more than the rest of
    the telemetry. A line is written after FLUSH_AFTER_S at the latest; an error, and any line outside an event loop, at
    once. `flush` writes the lines that wait: a worker that is ended by a signal runs no exit handlers."""

    def __init__(self, stream: TextIO, level: int, render: Render) -> None:
        self._stream = stream
        self._level = level
        self._render = render
        # Several workers write to the same pipe, which is atomic only up to this size.
        self._max_bytes = PIPE_BYTES if parent_process() is not None else None
        self._lines: list[str] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        atexit.register(self.flush)

    def info(self, event: str, **fields: Any) -> None:
        if self._level <= logging.INFO:
            self._write(self._render(_stamped("info", event, fields)))

    def warning(self, event: str, **fields: Any) -> None:
        if self._level <= logging.WARNING:
            self._write(self._render(_stamped("warning", event, fields)))

    def error(self, event: str, exc_info: BaseException | None = None, **fields: Any) -> None:
        """Written at once. `exc_info` adds the traceback of this exception, which may quote an upstream."""
        self._write(redaction.removed(self._render(_stamped("error", event, fields, exc_info))))
        self.flush()

    def _write(self, line: str) -> None:
        self._lines.append(line)
        if self._timer is not None and self._loop is not None and self._loop.is_running():
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self.flush()
            return
        self._loop = loop
        self._timer = loop.call_later(FLUSH_AFTER_S, self.flush)

    def flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._lines:
            lines, self._lines = self._lines, []
            with suppress(OSError, ValueError):
                for batch in ["\n".join(lines) + "\n"] if self._max_bytes is None else batches(lines, self._max_bytes):
                    self._stream.write(batch)
                    self._stream.flush()


def batches(lines: Sequence[str], max_bytes: int) -> Iterator[str]:
    """Whole lines, joined up to `max_bytes`; a longer line is a batch of its own."""
    batch: list[str] = []
    size = 0
    for line in lines:
        length = len(line.encode(errors="replace")) + 1
        if batch and size + length > max_bytes:
            yield "".join(batch)
            batch, size = [], 0
        batch.append(line + "\n")
        size += length
    if batch:
        yield "".join(batch)


class LineFormatter(logging.Formatter):
    """Renders records of the standard library's loggers like our own events."""

    def __init__(self, render: Render) -> None:
        super().__init__()
        self._render = render

    def format(self, record: logging.LogRecord) -> str:
        error = record.exc_info[1] if record.exc_info else None
        line = _stamped(record.levelname.lower(), record.getMessage(), {}, error)
        return redaction.removed(self._render(line))


def _stamped(level: str, event: str, fields: dict[str, Any], error: BaseException | None = None) -> dict[str, Any]:
    """Adds event, level, time and traceback. A traceback shows no values of variables: tokens may be among them."""
    seconds, nanoseconds = divmod(time.time_ns(), 1_000_000_000)
    fields["event"], fields["level"] = event, level
    fields["timestamp"] = f"{_second(seconds)}.{nanoseconds // 1000:06d}Z"
    if error is not None:
        fields["exception"] = "".join(traceback.format_exception(error)).rstrip("\n")
    return fields


@lru_cache(maxsize=2)
def _second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


encode = msgspec.json.Encoder(enc_hook=str).encode


def json_line(fields: dict[str, Any]) -> str:
    return encode(fields).decode()


def console_line(fields: dict[str, Any]) -> str:
    exception = fields.pop("exception", None)
    time, level, event = (fields.pop(name) for name in ("timestamp", "level", "event"))
    values = " ".join(f"{name}={_shown(value)}" for name, value in sorted(fields.items()))
    line = f"{time} [{level:<9}] {event:<30} {values}".rstrip()
    return f"{line}\n{exception}" if exception else line


def colored_line(fields: dict[str, Any]) -> str:
    color = COLORS.get(fields["level"], "")
    return f"{color}{console_line(fields)}\x1b[0m" if color else console_line(fields)


def _shown(value: object) -> str:
    text = str(value)
    return text if text.isprintable() else repr(text)


def configured_log(settings: Settings, stream: TextIO | None = None) -> Log:
    """The log that the settings name. The standard library's loggers (uvicorn's too) write to the same stream."""
    out = stream or sys.stderr
    level = logging.getLevelNamesMapping()[settings.log_level]
    render = json_line if settings.log_format == "json" else colored_line if out.isatty() else console_line
    handler = logging.StreamHandler(out)
    handler.setFormatter(LineFormatter(render))
    logging.root.handlers[:] = [handler]
    for name, lowest in LIBRARIES.items():
        logging.getLogger(name).setLevel(max(level, lowest))
    return Log(out, level, render)


class SilentTelemetry:
    """Telemetry that records nothing."""

    def asked(self, question: Question, context: Context) -> None: ...

    def happened(self, event: AnswerEvent, context: Context) -> None: ...

    def crashed(self, error: BaseException, context: Context) -> None: ...

    def noted(self, signal: Signal) -> None: ...

    def span(
        self,
        name: str,  # noqa: ARG002
        context: Context,
        **attributes: str | int | float,  # noqa: ARG002
    ) -> AbstractContextManager[Span]:
        return NullSpan(context)


class NullSpan(msgspec.Struct):
    """A span that records nothing."""

    context: Context

    def __enter__(self) -> "NullSpan":
        return self

    def __exit__(self, *_: object) -> None: ...

    def set(self, name: str, value: Attribute) -> None: ...


# The question's hash (and text, if wanted), for the last line of the task that answers it.
question_fields: ContextVar[Mapping[str, str]] = ContextVar("question_fields", default=MappingProxyType({}))


UNAVAILABLE = {EvidenceUnavailable: "evidence_unavailable", AddedSourcesUnreadable: "added_sources_unreadable"}
NOT_WRITTEN = {RecordingFailed: "recording_failed", QuestionNotRecorded: "question_not_recorded"}


class LoggedEvents(SilentTelemetry):
    """Telemetry as log lines. Questions appear as hash and length, with `queries` also as text; tokens never."""

    def __init__(self, log: Log, *, queries: bool = False, clock: Clock | None = None) -> None:
        self._log = log
        self._queries = queries
        self._clock = clock or SystemClock()
        self._redis_unreachable = False
        self._last_written: dict[str, float] = {}
        self._left_out: Counter[str] = Counter()

    def asked(self, question: Question, context: Context) -> None:
        fields = {"query_hash": hashlib.blake2b(question.text.encode(errors="replace"), digest_size=8).hexdigest()}
        if self._queries:
            fields["query"] = question.text[:MAX_QUERY]
        question_fields.set(fields)
        self._log.info(
            "chat_request_started",
            **_ids(context),
            user_id=context.user_id and _name(context.user_id),
            client=context.address,
            **fields,
            query_length=len(question.text),
            sources=len(question.sources),
            model=_name(question.model.path) if question.model else None,
        )

    def happened(self, event: AnswerEvent, context: Context) -> None:
        ids = _ids(context)
        match event:
            case RetrievalStarted():
                self._log.info("chat_retrieval_started", **ids, sources=len(event.sources))
                for path in event.sources:
                    self._log.info("data_source_query_started", **ids, path=_name(path))
            case SourceReplied(reply=reply):
                write = self._log.info if reply.status is Status.SUCCESS else self._log.warning
                write(
                    "data_source_query_completed",
                    **ids,
                    path=_name(reply.path),
                    status=reply.status,
                    documents_count=len(reply.passages),
                    latency_ms=reply.latency_ms,
                    # After the colon the message may quote the upstream.
                    reason=sentence(reply.error.partition(":")[0]) if reply.error else None,
                )
            case RetrievalFinished():
                self._log.info(
                    "chat_retrieval_completed", **ids, documents_count=event.passages, latency_ms=event.time_ms
                )
            case GenerationStarted():
                self._log.info("chat_generation_started", **ids, model=_name(event.model))
            case FellBack(fallback=fallback):
                self._log.warning(
                    "model_query_completed",
                    **ids,
                    model=_name(fallback.failed),
                    status="error",
                    # After the colon the message may quote the model server.
                    reason=sentence(fallback.message.partition(":")[0]),
                    fallback=_name(event.model),
                )
            case Answered():
                self._answered(event.answer, context, ids)
            case Failed():
                self._failed(event, context, ids)

    def _answered(self, answer: Answer, context: Context, ids: dict[str, str]) -> None:
        if answer.model is not None and not answer.cached:
            self._log.info(
                "model_query_completed",
                **ids,
                model=_name(answer.model),
                status="success",
                latency_ms=answer.timings.generation_ms,
            )
        self._log.info(
            "chat_request_completed",
            **ids,
            user_id=context.user_id and _name(context.user_id),
            **question_fields.get(),
            status="success",
            documents_count=sum(len(reply.passages) for reply in answer.replies),
            latency_ms=answer.timings.total_ms,
            cached=answer.cached,
            refused=answer.refused,
            **_verified(answer),
        )

    def _failed(self, event: Failed, context: Context, ids: dict[str, str]) -> None:
        if "model_path" in event.details:
            self._log.warning(
                "model_query_completed",
                **ids,
                model=_name(str(event.details["model_path"])),
                status="error",
                latency_ms=event.details.get("latency_ms"),
                # After the colon the message may quote the model server.
                reason=sentence(event.message.removeprefix("Model generation failed: ").partition(":")[0]),
            )
        write = self._log.info if event.code == "cancelled" else self._log.warning
        write(
            "chat_request_completed",
            **ids,
            user_id=context.user_id and _name(context.user_id),
            **question_fields.get(),
            status="error",
            code=event.code,
            latency_ms=event.time_ms,
        )

    def crashed(self, error: BaseException, context: Context) -> None:
        self._log.error("unexpected_error", **_ids(context), exc_info=error)

    def noted(self, signal: Signal) -> None:
        match signal:
            case RedisStateChanged(reachable=False) if not self._redis_unreachable:
                self._redis_unreachable = True
                self._log.warning("redis_gone", reason=signal.reason)
            case RedisStateChanged(reachable=True) if self._redis_unreachable:
                self._redis_unreachable = False
                self._log.info("redis_back")
            case BreakerStateChanged(state="open"):
                self._log.warning("breaker_opened", upstream=label(signal.upstream))
            case BreakerStateChanged():
                self._log.info(f"breaker_{signal.state}", upstream=label(signal.upstream))
            case RateLimitChecked(admitted=False):
                self._rate_limited(self._log.info, "rate_limited", surface=signal.surface, caller=label(signal.caller))
            case Rejected(code=Overloaded.code):
                self._rate_limited(self._log.warning, "overloaded", surface=signal.surface)
            case RedisCommandRefused():
                self._rate_limited(self._log.warning, "redis_refused", reason=signal.why)
            case ShadowCompared():
                write = self._log.info if signal.equal else self._log.warning
                write(
                    "planner_shadow",
                    session_id=label(signal.session_id),
                    plan_step_id=label(signal.plan_step_id),
                    equal=signal.equal,
                    differences=list(signal.differences),
                )
            case EvidenceUnavailable() | AddedSourcesUnreadable():
                self._log.warning(UNAVAILABLE[type(signal)], reason=sentence(signal.reason))
            case RecordingFailed() | QuestionNotRecorded():
                self._rate_limited(self._log.warning, NOT_WRITTEN[type(signal)], reason=sentence(signal.reason))
            case BreadcrumbsDropped():
                self._log.warning("breadcrumbs_lost", count=signal.count)
            case McpServerStateChanged():
                self._server_moved(signal)

    def _server_moved(self, signal: McpServerStateChanged) -> None:
        server, reason = label(signal.server), sentence(signal.reason)
        words = {"last_words": sentence(signal.last_words)} if signal.last_words else {}
        if signal.state == "ready":
            self._log.info("mcp_server_ready", server=server)
        elif signal.state == "failed":
            self._log.warning("mcp_server_failed", server=server, reason=reason, **words)
        elif reason:
            self._log.warning("mcp_server_lost", server=server, reason=reason, **words)

    def _rate_limited(self, write: Callable[..., object], event: str, **fields: str) -> None:
        """At most one line a second per event, with the number of lines left out."""
        now = self._clock.monotonic()
        if event in self._last_written and now - self._last_written[event] < RATE_LIMITED_EVERY_S:
            self._left_out[event] += 1
            return
        self._last_written[event] = now
        write(event, **fields, left_out=self._left_out.pop(event, 0))


def audit_fields(record: AuditRecord) -> dict[str, str | int]:
    """A record of the audit log as a log line or a collector gets it: without the names of documents and of those who
    may see them, because what has left cannot be forgotten."""
    return {
        "seq": record.seq,
        "at": f"{record.at:%Y-%m-%dT%H:%M:%S.%fZ}",
        "action": record.action,
        "outcome": record.outcome,
        "actor": sentence(record.actor or ""),
        "address": sentence(record.address or ""),
        "surface": record.surface,
        "key": record.key,
        "request": record.request,
        "object": sentence(record.object),
        "details": json_line(dict(record.details)),
        "hash": record.hash,
    }


def label(name: str) -> str:
    """A name for a log line or a metric label: short, printable, and of a URL only the host."""
    return _printable(URL.sub(r"\1", name[: 4 * MAX_NAME])[:MAX_NAME])


def _name(name: str) -> str:
    """A name that a request or an upstream has chosen; a usual one as it is."""
    return name if len(name) <= MAX_NAME else label(name)


def sentence(text: str) -> str:
    """A quoted text in one line of bounded length."""
    return _printable(text if len(text) <= MAX_SENTENCE else text[: MAX_SENTENCE - 1] + "…")


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)


def _ids(context: Context) -> dict[str, str]:
    return {"correlation_id": context.correlation_id, "trace_id": context.trace_id}


def _verified(answer: Answer) -> dict[str, Any]:
    """What is logged of a verified answer: no words of it."""
    if not answer.sentences and answer.faithfulness is None:
        return {}
    return {
        "faithfulness": answer.faithfulness,
        "unfaithful": answer.unfaithful,
        "left_out": answer.left_out,
        "sentences": answer.verdicts,
        "citation_marks": answer.marks,
    }
