"""Structured logs: spec 1's event names and fields, as JSON lines or for a person's eyes."""

import asyncio
import atexit
import hashlib
import logging
import sys
import time
from contextlib import suppress
from functools import lru_cache
from typing import Any, TextIO

import msgspec
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

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
from anabranch.domain.model import Context, Question, Status
from anabranch.domain.signals import Signal
from anabranch.runtime.settings import Settings

FLUSH_AFTER_S = 0.05
EXCEPTION = structlog.processors.ExceptionRenderer()

Log = structlog.typing.FilteringBoundLogger


class Silent:
    """Telemetry that says nothing."""

    def asked(self, question: Question, context: Context) -> None: ...

    def happened(self, event: AnswerEvent, context: Context) -> None: ...

    def crashed(self, error: BaseException, context: Context) -> None: ...

    def noted(self, signal: Signal) -> None: ...

    def span(self, name: str, context: Context, **attributes: str | int | float) -> "Untimed":  # noqa: ARG002
        return Untimed(context)


class Untimed:
    """A span that nobody looks at."""

    __slots__ = ("context",)

    def __init__(self, context: Context) -> None:
        self.context = context

    def __enter__(self) -> "Untimed":
        return self

    def __exit__(self, *_: object) -> None: ...

    def set(self, name: str, value: str | int | float | bool) -> None: ...


class LoggedEvents(Silent):
    """Telemetry that writes what happens as log lines. Questions appear as hash and length, tokens never."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def asked(self, question: Question, context: Context) -> None:
        self._log.info(
            "chat_request_started",
            correlation_id=context.correlation_id,
            user_id=context.user_id,
            client=context.address,
            query_hash=hashlib.blake2b(question.text.encode(errors="replace"), digest_size=8).hexdigest(),
            query_length=len(question.text),
            sources=len(question.sources),
            model=question.model.path if question.model else None,
        )

    def happened(self, event: AnswerEvent, context: Context) -> None:
        said = context.correlation_id
        match event:
            case Token():
                pass
            case RetrievalStarted():
                self._log.info("chat_retrieval_started", correlation_id=said, sources=len(event.sources))
                for path in event.sources:
                    self._log.info("data_source_query_started", correlation_id=said, path=path)
            case SourceReplied(reply=reply):
                write = self._log.info if reply.status is Status.SUCCESS else self._log.warning
                write(
                    "data_source_query_completed",
                    correlation_id=said,
                    path=reply.path,
                    status=reply.status,
                    documents_count=len(reply.passages),
                    latency_ms=reply.latency_ms,
                    # Our own words only: what stands behind the colon may be the upstream's.
                    reason=reply.error.partition(":")[0] if reply.error else None,
                )
            case RetrievalFinished():
                self._log.info(
                    "chat_retrieval_completed",
                    correlation_id=said,
                    documents_count=event.passages,
                    latency_ms=event.time_ms,
                )
            case GenerationStarted():
                self._log.info("chat_generation_started", correlation_id=said, model=event.model)
            case Answered(answer=answer):
                if answer.model is not None:
                    self._log.info(
                        "model_query_completed",
                        correlation_id=said,
                        model=answer.model,
                        status="success",
                        latency_ms=answer.timings.generation_ms,
                    )
                self._log.info(
                    "chat_request_completed",
                    correlation_id=said,
                    status="success",
                    documents_count=sum(len(reply.passages) for reply in answer.replies),
                    latency_ms=answer.timings.total_ms,
                )
            case Failed():
                self._failed(event, said)

    def _failed(self, event: Failed, said: str) -> None:
        if "model_path" in event.details:
            self._log.warning(
                "model_query_completed",
                correlation_id=said,
                model=event.details["model_path"],
                status="error",
                latency_ms=event.details.get("latency_ms"),
            )
        write = self._log.info if event.code == "cancelled" else self._log.warning
        write("chat_request_completed", correlation_id=said, status="error", code=event.code, latency_ms=event.time_ms)

    def crashed(self, error: BaseException, context: Context) -> None:
        self._log.error("unexpected_error", correlation_id=context.correlation_id, exc_info=error)


class LogWriter:
    """Writes lines in batches: a system call per line would cost more than the rest of the telemetry. A line waits
    at most FLUSH_AFTER_S; an error, and anything outside an event loop, is written at once."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
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
                self._stream.write("\n".join(lines) + "\n")
                self._stream.flush()


def flush(log: Log) -> None:
    """Write what still waits: a worker may be ended by a signal, and then nothing runs at its exit."""
    log.new()._logger.flush()  # type: ignore[attr-defined]


def configured_log(settings: Settings, stream: TextIO | None = None) -> Log:
    """The log that the settings ask for; the standard library's loggers (the server's among them) go the same way."""
    out = stream or sys.stderr
    level = logging.getLevelNamesMapping()[settings.log_level]
    shared: list[Processor] = [_stamped]
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
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    log: Log = structlog.wrap_logger(
        LogWriter(out),
        processors=[*shared, *rendering],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=True,
    )
    return log


def _text(value: Any) -> str:
    return str(value)


encode = msgspec.json.Encoder(enc_hook=_text).encode


def _stamped(_log: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Level and time. A line is written a dozen times per question, so the date is formatted once a second."""
    now = time.time()
    event["level"] = method
    event["timestamp"] = f"{_second(int(now))}.{int(now % 1 * 1_000_000):06d}Z"
    return event


@lru_cache(maxsize=2)
def _second(whole: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole))


def _json(log: WrappedLogger, method: str, event: EventDict) -> str:
    if "exc_info" in event:
        event = EXCEPTION(log, method, event)
    return encode(event).decode()
