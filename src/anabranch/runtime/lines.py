"""One line of the log as JSON, and a quick way to many of them."""

import logging
import time
from functools import lru_cache
from typing import Any, Protocol

import msgspec
import structlog
from structlog.typing import EventDict, WrappedLogger

from anabranch.runtime.logwriter import LogWriter
from anabranch.runtime.settings import Settings

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


class Lines:
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


class Writing(Protocol):
    """As much of a log as telemetry needs."""

    def info(self, event: str, **said: Any) -> object: ...

    def warning(self, event: str, **said: Any) -> object: ...

    def error(self, event: str, **said: Any) -> object: ...


def quickly(log: Log, settings: Settings) -> Writing:
    """The log itself, or, where it writes JSON, a quicker way to the same lines."""
    if settings.log_format != "json":
        return log
    return Lines(log, writer_of(log), logging.getLevelNamesMapping()[settings.log_level])


def writer_of(log: Log) -> LogWriter:
    writer: LogWriter = log.new()._logger  # type: ignore[attr-defined]
    return writer
