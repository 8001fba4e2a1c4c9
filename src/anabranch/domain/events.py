"""What happens while a question or a planner step is worked on, and the fold between events and answer."""

from collections.abc import Iterable
from typing import Literal

import msgspec

from anabranch.domain.model import Answer, SourceReply, Value


class Event(Value, tag=True):
    """One thing that happened."""


class RetrievalStarted(Event):
    sources: tuple[str, ...]


class SourceReplied(Event):
    """A source is through, well or not; `index` is its place in the question."""

    index: int
    reply: SourceReply


class RetrievalFinished(Event):
    passages: int
    time_ms: int


class GenerationStarted(Event):
    model: str


class Token(Event, gc=False):
    text: str


class Answered(Event):
    """The end, well: it carries the whole answer, so that a stream taken up in the middle can still render it."""

    answer: Answer


class Failed(Event):
    """The end, badly: an error's code, its sentence, its details, and when it came."""

    code: str
    message: str
    details: dict[str, str | int] = {}
    time_ms: int = 0


AnswerEvent = RetrievalStarted | SourceReplied | RetrievalFinished | GenerationStarted | Token | Answered | Failed
TERMINAL = (Answered, Failed)


def fold(events: Iterable[AnswerEvent]) -> Answer | None:
    """The answer that the events tell, put together from its parts; None if they do not end well."""
    text: list[str] = []
    replies: dict[int, SourceReply] = {}
    for event in events:
        match event:
            case Token():
                text.append(event.text)
            case SourceReplied():
                replies[event.index] = event.reply
            case Answered():
                ordered = tuple(replies[index] for index in sorted(replies))
                return msgspec.structs.replace(event.answer, text="".join(text), replies=ordered)
            case _:
                pass
    return None


def unfold(answer: Answer) -> tuple[AnswerEvent, ...]:
    """The events that a finished answer would have emitted, so that a stored one streams like a live one."""
    events: list[AnswerEvent] = [RetrievalStarted(sources=tuple(reply.path for reply in answer.replies))]
    events += [SourceReplied(index=index, reply=reply) for index, reply in enumerate(answer.replies)]
    found = sum(len(reply.passages) for reply in answer.replies)
    events.append(RetrievalFinished(passages=found, time_ms=answer.timings.retrieval_ms))
    if answer.model is not None:
        events.append(GenerationStarted(model=answer.model))
    if answer.text:
        events.append(Token(text=answer.text))
    events.append(Answered(answer=answer))
    return tuple(events)


SubagentStatus = Literal["pending", "in_progress", "partial", "success", "error"]
OutcomeStatus = Literal["success", "error", "timeout", "degraded", "cancelled"]
StepStatus = Literal["success", "partial_failure", "failed", "blocked", "cancelled", "worker_lost"]
SafetyVerdict = Literal["allow", "warn", "block"]


class StepStarted(Event):
    expected: tuple[str, ...]


class SubagentStarted(Event):
    subagent: str
    result_key: str
    attempt: int = 1


class SubagentResult(Event):
    """A result or a part of one; a higher `revision` replaces a lower one under the same key."""

    subagent: str
    result_key: str
    status: SubagentStatus
    revision: int
    payload: msgspec.Raw


class SubagentCompleted(Event):
    """A subagent has said its last word, well or not; a later attempt may still follow a bad one."""

    subagent: str
    result_key: str
    status: Literal["success", "error"]
    latency_ms: int
    attempt: int = 1
    error: str | None = None


class SubagentRetried(Event):
    subagent: str
    result_key: str
    attempt: int
    reason: str = ""


class SubagentTimedOut(Event):
    subagent: str
    result_key: str
    deadline_ms: int


class SubagentDegraded(Event):
    """It is not asked at all: it has failed too often of late, or it is switched off."""

    subagent: str
    result_key: str
    reason: str


class StreamDegraded(Event):
    """The workers' shared log is out of reach; the stream goes on in another epoch, from one worker alone."""

    epoch: int
    reason: str


class SafetyDecided(Event):
    verdict: SafetyVerdict
    reason: str
    revision: int = 1
    subagent: str | None = None


class StepProgressed(Event):
    """What the planner itself has to say."""

    payload: msgspec.Raw
    revision: int
    stage: str = "planner"
    status: str = "in_progress"


class Outcome(Value, gc=False):
    """How one subagent's part ended."""

    subagent: str
    status: OutcomeStatus
    revision: int = 0
    attempts: int = 1
    latency_ms: int | None = None
    error: str | None = None


class StepCompleted(Event):
    """The end of a step; `outcomes` are by result key."""

    status: StepStatus
    outcomes: dict[str, Outcome] = {}
    reason: str | None = None
    next_step_id: str | None = None


SubagentEvent = (
    SubagentStarted | SubagentResult | SubagentCompleted | SubagentRetried | SubagentTimedOut | SubagentDegraded
)
StepEvent = StepStarted | SubagentEvent | StreamDegraded | SafetyDecided | StepProgressed | StepCompleted
