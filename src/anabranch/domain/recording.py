"""The recording of a Run: the question, what its contracts returned, and the events that followed."""

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

import msgspec

from anabranch.domain.errors import AnabranchError, GenerationFailed, GenerationReason, RecordingError
from anabranch.domain.events import AnswerEvent
from anabranch.domain.evidence import EvidencePage, Reading, Verdict
from anabranch.domain.model import Context, Delta, Message, Prompt, Query, Question, SourceReply, Value

FORMAT: Final = "anabranch-recording"
# A later release reads this version and all before it.
VERSION = 1
MAX_BYTES = 64 * 1024 * 1024
MAX_MIB = MAX_BYTES // (1024 * 1024)
# The boundary of prompts that a recording does not have, such as those of a question that was refused.
UNRECORDED_BOUNDARY = "x" * 12

# A time of a clock or since the beginning, in seconds. No clock shows more, and sums of such times are finite.
Time = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]
EventCount = Annotated[int, msgspec.Meta(ge=0)]
# How a call ended: `cancelled` by a time-out or by the end of the Run, `crashed` by a bug.
Ended = Literal["returned", "failed", "cancelled", "crashed"]


class RecordedError(Value):
    """An expected error of a model; `reason` is that of a GenerationFailed."""

    code: str
    message: str
    details: dict[str, str | int] = {}
    reason: GenerationReason | None = None

    @classmethod
    def of(cls, error: AnabranchError) -> "RecordedError":
        reason = error.reason if isinstance(error, GenerationFailed) else None
        return cls(code=error.code, message=error.message, details=error.details, reason=reason)

    def error(self) -> AnabranchError:
        if self.reason is not None:
            failed = GenerationFailed(self.message, **self.details)
            failed.known_reason = self.reason
            return failed
        error = AnabranchError(self.message, **self.details)
        error.code = self.code
        return error


class RecordedCall(Value):
    """A call of a contract; `began_s` and `ended_s` are seconds since the beginning of the recording. It ended after so
    many events."""

    began_s: Time
    ended_s: Time
    after_events: EventCount
    ended: Ended
    error: RecordedError | None = None


class SourceCall(RecordedCall, kw_only=True):
    """A query to the source with this index in the question, and its reply, if it returned one."""

    index: int
    query: Query
    reply: SourceReply | None = None


class RecordedPrompt(Value):
    """What a model gets of a prompt, and the letters around its passages."""

    messages: tuple[Message, ...]
    max_tokens: int
    temperature: float
    version: str
    boundary: Annotated[str, msgspec.Meta(pattern=r"\A[a-z]{0,32}\Z")] = ""

    @classmethod
    def of(cls, prompt: Prompt) -> "RecordedPrompt":
        return cls(
            messages=prompt.messages,
            max_tokens=prompt.max_tokens,
            temperature=prompt.temperature,
            version=prompt.version,
            boundary=prompt.boundary,
        )


class TimedDelta(Value, gc=False):
    """A part of a model's stream, and when it came: in seconds since the beginning of the recording, and after how many
    events."""

    at_s: Time
    after_events: EventCount
    delta: Delta


class ModelCall(RecordedCall, kw_only=True):
    """A prompt, and what the model streamed."""

    model: str
    prompt: RecordedPrompt
    stream: tuple[TimedDelta, ...] = ()


class EvidenceCall(RecordedCall, kw_only=True):
    """Inputs that the evidence model has read for a question, or checked a claim with, and its results."""

    task: Literal["read", "check"]
    text: str
    inputs: tuple[tuple[EvidencePage, ...], ...]
    readings: tuple[Reading | None, ...] = ()
    verdicts: tuple[Verdict | None, ...] = ()


class RecordedContext(Value):
    """The Context without the caller: no identity, address, key or token is recorded."""

    correlation_id: str
    deadline: Time
    surface: str
    streaming: bool

    @classmethod
    def of(cls, context: Context) -> "RecordedContext":
        return cls(
            correlation_id=context.correlation_id,
            deadline=context.deadline,
            surface=context.surface,
            streaming=context.streaming,
        )

    def context(self) -> Context:
        return Context(
            correlation_id=self.correlation_id,
            deadline=self.deadline,
            surface=self.surface,
            streaming=self.streaming,
        )


class Recording(Value, kw_only=True):
    """One Run. `source_calls` are in the order in which they ended. `clock` has the clock's readings of each task, in
    the order in which the tasks first read it. `events` are as they were emitted, the terminal one last. `documents`
    are the ids of those that collections returned: an erasure needs them, so they are not redacted."""

    format: Literal["anabranch-recording"] = FORMAT
    version: int = VERSION
    made: str
    software: dict[str, str]
    settings: dict[str, Any]
    question: Question
    context: RecordedContext
    source_calls: tuple[SourceCall, ...] = ()
    model_calls: tuple[ModelCall, ...] = ()
    evidence_calls: tuple[EvidenceCall, ...] = ()
    clock: tuple[tuple[Time, ...], ...] = ()
    events: tuple[msgspec.Raw, ...] = ()
    documents: tuple[str, ...] = ()

    def decoded_events(self) -> Iterator[AnswerEvent]:
        """The events as values. RecordingError if one is unknown, such as one of a later release."""
        decoder = msgspec.json.Decoder(AnswerEvent)
        for number, event in enumerate(self.events, 1):
            try:
                yield decoder.decode(event)
            except (msgspec.DecodeError, RecursionError) as error:
                raise RecordingError(f"Event {number} of the recording cannot be read: {error}") from None

    @property
    def boundary(self) -> str:
        """The letters around the passages of its prompts, so that a replay has the same prompts."""
        return next((call.prompt.boundary for call in self.model_calls if call.prompt.boundary), UNRECORDED_BOUNDARY)

    @property
    def end(self) -> AnswerEvent:
        """The terminal event."""
        *_, end = self.decoded_events()
        return end


class RecordingHead(Value):
    format: str = ""
    version: int = 0


def encode(recording: Recording) -> bytes:
    """The recording as a file has it. RecordingError if it is too large, or if it has text that is not Unicode."""
    try:
        data = msgspec.json.encode(recording) + b"\n"
    except (UnicodeEncodeError, msgspec.EncodeError, TypeError) as error:
        raise RecordingError(f"The run cannot be recorded: {error}") from None
    if len(data) > MAX_BYTES:
        raise RecordingError(f"The run cannot be recorded: it takes more than {MAX_MIB} MiB.")
    return data


def decode(data: bytes) -> Recording:
    """The recording in a file. RecordingError if it is none, damaged, too large, or of a later format."""
    if len(data) > MAX_BYTES:
        raise RecordingError(f"The file is larger than {MAX_MIB} MiB, so it is not a recording.")
    try:
        head = msgspec.json.decode(data, type=RecordingHead)
    except msgspec.ValidationError as error:
        raise RecordingError(f"The file is not a recording, or it is damaged: {error}") from None
    except (msgspec.DecodeError, RecursionError):
        raise RecordingError("The file is not a recording, or it is damaged: it is not valid JSON.") from None
    if head.format != FORMAT:
        raise RecordingError("The file is not a recording. Make one with: anabranch ask --record FILE")
    if not 1 <= head.version <= VERSION:
        raise RecordingError(
            f"The recording has version {head.version} of the format; this release reads versions up to {VERSION}. "
            "Replay it with the release that has made it, or a later one."
        )
    try:
        recording = msgspec.json.decode(data, type=Recording)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RecordingError(f"The recording is damaged: {error}") from None
    _check(recording)
    return recording


def _check(recording: Recording) -> None:
    """What a type cannot say. Whatever else is wrong in a recording shows in its replay as other events."""
    if not recording.events:
        raise RecordingError("The recording is damaged: it has no events.")
    indexes = [call.index for call in recording.source_calls]
    if len(set(indexes)) != len(indexes) or any(not 0 <= at < len(recording.question.sources) for at in indexes):
        raise RecordingError("The recording is damaged: its replies do not belong to its sources.")
    for call in recording.evidence_calls:
        results = call.readings if call.task == "read" else call.verdicts
        if call.ended == "returned" and len(results) != len(call.inputs):
            raise RecordingError("The recording is damaged: a call of a model has fewer or more results than inputs.")
    most = len(recording.events)
    if (after := max(_event_counts(recording), default=0)) > most:
        # A replay would wait for events that never come.
        raise RecordingError(f"The recording is damaged: a result came after {after} events, and it has {most}.")


def _event_counts(recording: Recording) -> Iterator[int]:
    for call in (*recording.source_calls, *recording.model_calls, *recording.evidence_calls):
        yield call.after_events
        if isinstance(call, ModelCall):
            yield from (timed.after_events for timed in call.stream)
