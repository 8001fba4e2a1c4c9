"""Records one Run at its contracts: sources, models, the evidence model, the clock, and the events."""

import asyncio
import os
import platform
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import msgspec

from anabranch.app.recording_redaction import Redaction
from anabranch.configuration.settings import Settings
from anabranch.domain.contracts import Clock, Directory, Generator, Source, Span, Telemetry
from anabranch.domain.errors import AnabranchError, RecordingError
from anabranch.domain.events import TERMINAL, AnswerEvent
from anabranch.domain.evidence import ClaimChecker, Evidence, EvidencePage, Reading, Verdict
from anabranch.domain.model import Context, Delta, Endpoint, Prompt, Query, Question, SourceReply
from anabranch.domain.recording import (
    FORMAT,
    Ended,
    EvidenceCall,
    ModelCall,
    RecordedContext,
    RecordedError,
    RecordedPrompt,
    Recording,
    SourceCall,
    TimedDelta,
    encode,
)
from anabranch.domain.signals import Signal

# The settings that a pipeline is built from.
SETTINGS = (
    "retrieval_timeout",
    "generation_timeout",
    "max_context_tokens",
    "query_context_tokens",
    "context",
    "compact_tokens",
    "evidence",
    "evidence_passages",
    "verify",
    "min_faithfulness",
)
# What no caller and no upstream has written.
NOT_REDACTED = ("settings", "software", "documents")
T = TypeVar("T", SourceCall, ModelCall, EvidenceCall)
# The format is named in the first bytes of a recording.
HEAD_BYTES = 100
Timed = TypeVar("Timed", SourceCall, ModelCall, EvidenceCall, TimedDelta)


class RunRecorder:
    """Collects one Run. Its wrappers pass everything on unchanged."""

    def __init__(self, settings: Settings) -> None:
        self._settings = {name: getattr(settings, name) for name in SETTINGS}
        self._made = datetime.now(UTC)
        self._began = time.monotonic()
        self._question: Question | None = None
        self._context: Context | None = None
        self._source_calls: list[SourceCall] = []
        # In the order in which they began; a call is replaced when it has ended.
        self._model_calls: list[ModelCall] = []
        self._evidence_calls: list[EvidenceCall] = []
        self._readings: dict[asyncio.Task[Any] | None, list[float]] = {}
        self._events: list[msgspec.Raw] = []
        self.finished = False

    def clock(self, inner: Clock) -> "RecordingClock":
        return RecordingClock(inner, self._readings)

    def directory(self, inner: Directory) -> "RecordingDirectory":
        return RecordingDirectory(inner, self)

    def evidence(self, inner: Evidence) -> "RecordingEvidence":
        return RecordingEvidence(inner, self)

    def claims(self, inner: ClaimChecker) -> "RecordingClaims":
        return RecordingClaims(inner, self)

    def telemetry(self, inner: Telemetry) -> "RecordingTelemetry":
        return RecordingTelemetry(inner, self)

    @property
    def began_at(self) -> float:
        """When the run began, in seconds since 1970."""
        return self._made.timestamp()

    @property
    def emitted(self) -> int:
        return len(self._events)

    def timed(self, delta: Delta) -> TimedDelta:
        return TimedDelta(at_s=self.now_s(), after_events=self.emitted, delta=delta)

    def now_s(self) -> float:
        return round(time.monotonic() - self._began, 6)

    def asked(self, question: Question, context: Context) -> None:
        self._question, self._context = question, context

    def happened(self, event: AnswerEvent) -> None:
        self._events.append(msgspec.Raw(msgspec.json.encode(event)))
        self.finished = self.finished or isinstance(event, TERMINAL)

    def source_ended(self, call: SourceCall) -> None:
        self._source_calls.append(call)

    def model_began(self, call: ModelCall) -> Callable[[ModelCall], None]:
        return _replacing(self._model_calls, call)

    def evidence_began(self, call: EvidenceCall) -> Callable[[EvidenceCall], None]:
        return _replacing(self._evidence_calls, call)

    @property
    def name(self) -> str:
        """Identifies the run: when it began, where it was asked, and its correlation id."""
        about = (self._context.surface, self._context.correlation_id) if self._context is not None else ()
        return "-".join((self._made.strftime("%Y%m%dT%H%M%S.%f"), *about))

    async def save(self, path: Path) -> None:
        """Write the recording, without secrets, to a file that only its owner can read. RecordingError if it cannot be
        written."""
        redacted = await self._redacted()
        data = await asyncio.to_thread(encode, redacted)
        try:
            await asyncio.to_thread(write_private, path, data)
        except OSError as error:
            raise RecordingError(f"The recording cannot be written to {path}: {error.strerror or error}.") from None

    def recording(self) -> Recording:
        if self._question is None or self._context is None or not self.finished:
            raise RecordingError("The run has not ended, so it cannot be recorded.")
        return Recording(
            made=self._made.isoformat(timespec="seconds"),
            software={
                "anabranch": version("anabranch"),
                "python": platform.python_version(),
                "system": f"{platform.system()} {platform.machine()}",
            },
            settings=self._settings,
            question=_without_addresses(self._question),
            context=RecordedContext.of(self._context),
            source_calls=tuple(self._source_calls),
            model_calls=tuple(self._model_calls),
            evidence_calls=tuple(self._evidence_calls),
            clock=tuple(map(tuple, self._readings.values())),
            events=tuple(self._events),
            documents=tuple(sorted(self._documents())),
        )

    def _documents(self) -> set[str]:
        """The ids of the documents of this server in the replies, also of those that only an explanation names."""
        assert self._question is not None
        sources = self._question.sources
        own = (call.reply for call in self._source_calls if sources[call.index].kind == "collection")
        return {identifier for reply in own for identifier in _document_ids(reply)}

    async def _redacted(self) -> Recording:
        """The recording without secrets. If one was removed, its events are those of a replay, so that they fit."""
        recording = self.recording()
        assert self._question is not None
        assert self._context is not None
        redaction = Redaction(self._question, self._context)
        kept = {name: getattr(recording, name) for name in NOT_REDACTED}
        clean = msgspec.structs.replace(await asyncio.to_thread(redaction.removed_from, recording), **kept)
        if redaction.found:
            from anabranch.app.replay import replay  # noqa: PLC0415  nearly always there is no secret

            again = await replay(clean)
            events = tuple(msgspec.Raw(redaction.removed(event.decode()).encode()) for event in again.events)
            clean = _within_its_events(msgspec.structs.replace(clean, events=events))
        return clean


def _document_ids(value: Any) -> Iterator[str]:
    """The `document_id` of a struct and of all in it. Metadata of documents is no struct: it can hold any text."""
    if isinstance(value, msgspec.Struct):
        if identifier := getattr(value, "document_id", None):
            yield identifier
        value = [getattr(value, name) for name in value.__struct_fields__]
    if isinstance(value, list | tuple):
        for one in value:
            yield from _document_ids(one)


def _replacing(calls: list[T], call: T) -> Callable[[T], None]:
    at = len(calls)
    calls.append(call)

    def replace(ended: T) -> None:
        calls[at] = ended

    return replace


def _within_its_events(recording: Recording) -> Recording:
    """The recording without results that came after more events than it has: without its secrets, a run can have fewer
    than it had."""
    most = len(recording.events)

    def capped(timed: Timed) -> Timed:
        return msgspec.structs.replace(timed, after_events=min(most, timed.after_events))

    return msgspec.structs.replace(
        recording,
        source_calls=tuple(map(capped, recording.source_calls)),
        model_calls=tuple(
            msgspec.structs.replace(capped(call), stream=tuple(map(capped, call.stream)))
            for call in recording.model_calls
        ),
        evidence_calls=tuple(map(capped, recording.evidence_calls)),
    )


def _without_addresses(question: Question) -> Question:
    """The question without tokens, and with no more of an address than its origin."""

    def public(endpoint: Endpoint | None) -> Endpoint | None:
        if endpoint is None:
            return None
        alternate = _origin(endpoint.alternate) if endpoint.alternate else None
        return msgspec.structs.replace(endpoint, token=None, url=_origin(endpoint.url), alternate=alternate)

    return msgspec.structs.replace(
        question,
        sources=tuple(one for one in map(public, question.sources) if one is not None),
        model=public(question.model),
        fallback=public(question.fallback),
    )


def _origin(url: str) -> str:
    with suppress(ValueError):
        parts = urlsplit(url)
        if parts.hostname:
            return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    return ""


def recording_target(path: Path) -> Path:
    """The file for a recording; of a link, the one that it leads to. RecordingError if it would replace anything but a
    recording or an empty file."""
    target = path.resolve()
    if not target.parent.is_dir():
        raise RecordingError(f"The recording cannot be written: there is no folder {target.parent}.")
    if not target.exists():
        return target
    if not target.is_file():
        raise RecordingError(f"The recording cannot be written to {path}: it is not a regular file.")
    with target.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if head and FORMAT.encode() not in head:
        raise RecordingError(f"{path} exists and is not a recording, so it is not replaced. Name another file.")
    return target


def write_private(path: Path, data: bytes) -> None:
    """Replace a file at once, readable by its owner only."""
    descriptor, beside = tempfile.mkstemp(prefix=f".{path.name[:100]}.", dir=path.parent)  # its mode is 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        Path(beside).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(beside).unlink()
        raise


class CallOutcome:
    """How a call ends, and when it began."""

    def __init__(self, recorder: RunRecorder) -> None:
        self._recorder = recorder
        self._began_s = recorder.now_s()
        self.ended: Ended = "returned"
        self.error: RecordedError | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        try:
            yield
        except AnabranchError as error:
            self.ended, self.error = "failed", RecordedError.of(error)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            self.ended = "cancelled"
            raise
        except Exception:
            self.ended = "crashed"
            raise

    def fields(self) -> dict[str, Any]:
        return {
            "began_s": self._began_s,
            "ended_s": self._recorder.now_s(),
            "after_events": self._recorder.emitted,
            "ended": self.ended,
            "error": self.error,
        }


class RecordingClock:
    """Keeps the readings of each task."""

    def __init__(self, inner: Clock, readings: dict[asyncio.Task[Any] | None, list[float]]) -> None:
        self._inner = inner
        self._readings = readings

    def monotonic(self) -> float:
        now = self._inner.monotonic()
        self._readings.setdefault(asyncio.current_task(), []).append(now)
        return now


class RecordingDirectory:
    """Numbers the sources in the order in which they are asked for, which is that of the question."""

    def __init__(self, inner: Directory, recorder: RunRecorder) -> None:
        self._inner = inner
        self._recorder = recorder
        self._sources = 0

    def source(self, endpoint: Endpoint) -> Source:
        index, self._sources = self._sources, self._sources + 1
        return RecordingSource(self._inner.source(endpoint), index, self._recorder)

    def generator(self, endpoint: Endpoint, *, retried: bool = True) -> Generator:
        return RecordingModel(self._inner.generator(endpoint, retried=retried), endpoint.path, self._recorder)


class RecordingSource:
    def __init__(self, inner: Source, index: int, recorder: RunRecorder) -> None:
        self._inner = inner
        self._index = index
        self._recorder = recorder

    async def search(self, query: Query, context: Context) -> SourceReply:
        outcome = CallOutcome(self._recorder)
        reply: SourceReply | None = None
        try:
            with outcome.watching():
                reply = await self._inner.search(query, context)
                return reply
        finally:
            self._recorder.source_ended(SourceCall(index=self._index, query=query, reply=reply, **outcome.fields()))


class RecordingModel:
    def __init__(self, inner: Generator, path: str, recorder: RunRecorder) -> None:
        self._inner = inner
        self._path = path
        self._recorder = recorder

    async def generate(self, prompt: Prompt, context: Context) -> AsyncGenerator[Delta, None]:
        outcome = CallOutcome(self._recorder)
        call = ModelCall(model=self._path, prompt=RecordedPrompt.of(prompt), **outcome.fields())
        record = self._recorder.model_began(call)
        stream: list[TimedDelta] = []
        try:
            with outcome.watching():
                async with aclosing(self._inner.generate(prompt, context)) as deltas:
                    async for delta in deltas:
                        stream.append(self._recorder.timed(delta))
                        yield delta
        finally:
            record(msgspec.structs.replace(call, stream=tuple(stream), **outcome.fields()))


class RecordingEvidence:
    def __init__(self, inner: Evidence, recorder: RunRecorder) -> None:
        self._inner = inner
        self._recorded = partial(_judging, recorder)

    async def read(
        self, question: str, inputs: Sequence[tuple[EvidencePage, ...]], *, until: float | None = None
    ) -> Sequence[Reading | None]:
        with self._recorded("read", question, inputs) as results:
            results["readings"] = found = tuple(await self._inner.read(question, inputs, until=until))
        return found


class RecordingClaims:
    def __init__(self, inner: ClaimChecker, recorder: RunRecorder) -> None:
        self._inner = inner
        self._recorded = partial(_judging, recorder)

    async def check(
        self, claim: str, inputs: Sequence[tuple[EvidencePage, ...]], *, until: float | None = None
    ) -> Sequence[Verdict | None]:
        with self._recorded("check", claim, inputs) as results:
            results["verdicts"] = found = tuple(await self._inner.check(claim, inputs, until=until))
        return found


@contextmanager
def _judging(
    recorder: RunRecorder, task: Literal["read", "check"], text: str, inputs: Sequence[tuple[EvidencePage, ...]]
) -> Iterator[dict[str, Any]]:
    """Records a call; its results are put into what this yields."""
    outcome = CallOutcome(recorder)
    call = EvidenceCall(task=task, text=text, inputs=tuple(inputs), **outcome.fields())
    record = recorder.evidence_began(call)
    results: dict[str, Any] = {}
    try:
        with outcome.watching():
            yield results
    finally:
        record(msgspec.structs.replace(call, **results, **outcome.fields()))


class RecordingTelemetry:
    """Keeps the question and the events; the pipeline and the Run report all of them to their Telemetry."""

    def __init__(self, inner: Telemetry, recorder: RunRecorder) -> None:
        self._inner = inner
        self._recorder = recorder

    def asked(self, question: Question, context: Context) -> None:
        self._recorder.asked(question, context)
        self._inner.asked(question, context)

    def happened(self, event: AnswerEvent, context: Context) -> None:
        self._recorder.happened(event)
        self._inner.happened(event, context)

    def crashed(self, error: BaseException, context: Context) -> None:
        self._inner.crashed(error, context)

    def noted(self, signal: Signal) -> None:
        self._inner.noted(signal)

    def span(self, name: str, context: Context, **attributes: str | int | float) -> AbstractContextManager[Span]:
        return self._inner.span(name, context, **attributes)
