"""The events of a question and of a planner step, and the fold between events and answer."""

from collections.abc import Iterable
from typing import Literal

import msgspec

from anabranch.domain.model import Answer, CheckedSentence, Fallback, Passage, SourceReply, Value


class Event(Value, tag=True):
    """The base of all events."""


class RetrievalStarted(Event):
    sources: tuple[str, ...]


class SourceReplied(Event):
    """A source has replied or failed; `index` is its position in the question."""

    index: int
    reply: SourceReply


class RetrievalFinished(Event):
    passages: int
    time_ms: int


class PromptComposed(Event):
    """The passages that the model gets, of an answer that is verified: the quotes of its sentences name them by their
    place."""

    passages: tuple[Passage, ...]


class GenerationStarted(Event):
    model: str


class FellBack(Event):
    """The model has failed before its first token, and `model` answers instead."""

    model: str
    fallback: Fallback


class Token(Event, gc=False):
    text: str


class SentenceChecked(Event):
    """A sentence of the answer is complete and was checked; `index` counts from 0."""

    index: int
    sentence: CheckedSentence


class Answered(Event):
    """The end with an answer: all of it, so that a client that resumes in the middle can render it."""

    answer: Answer


class Failed(Event):
    """The end with an error: its code, message and details, and the time until it occurred."""

    code: str
    message: str
    details: dict[str, str | int] = {}
    time_ms: int = 0


AnswerEvent = (
    RetrievalStarted
    | SourceReplied
    | RetrievalFinished
    | PromptComposed
    | GenerationStarted
    | FellBack
    | Token
    | SentenceChecked
    | Answered
    | Failed
)
TERMINAL = (Answered, Failed)


def fold(events: Iterable[AnswerEvent]) -> Answer | None:
    """The answer, assembled from its events; None if they do not end in one."""
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
    return None


def unfold(answer: Answer) -> tuple[AnswerEvent, ...]:
    """The events that a finished answer would have emitted, so that a stored one streams like a live one."""
    found = sum(len(reply.passages) for reply in answer.replies)
    return (
        RetrievalStarted(sources=tuple(reply.path for reply in answer.replies)),
        *(SourceReplied(index=index, reply=reply) for index, reply in enumerate(answer.replies)),
        RetrievalFinished(passages=found, time_ms=answer.timings.retrieval_ms),
        *([PromptComposed(passages=answer.passages)] if answer.sentences else []),
        *_generation(answer),
        *([Token(text=answer.text)] if answer.text else []),
        *(SentenceChecked(index=index, sentence=sentence) for index, sentence in enumerate(answer.sentences)),
        Answered(answer=answer),
    )


def _generation(answer: Answer) -> tuple[AnswerEvent, ...]:
    if answer.model is None:
        return ()
    if answer.fallback is None:
        return (GenerationStarted(model=answer.model),)
    return GenerationStarted(model=answer.fallback.failed), FellBack(model=answer.model, fallback=answer.fallback)


SubagentStatus = Literal["pending", "in_progress", "partial", "success", "error"]
OutcomeStatus = Literal["success", "error", "timeout", "degraded", "cancelled"]
StepStatus = Literal["success", "partial_failure", "failed", "blocked", "cancelled", "worker_lost"]
SafetyVerdict = Literal["allow", "warn", "block"]


class StepStarted(Event):
    expected: tuple[str, ...]


class SubagentPending(Event):
    """The step waits for this subagent; nothing of it has happened yet."""

    subagent: str
    result_key: str


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
    """A subagent's attempt has ended; another attempt may follow an error."""

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
    """The subagent is not called: its circuit is open, or it is disabled."""

    subagent: str
    result_key: str
    reason: str


class StreamDegraded(Event):
    """The shared log is unreachable; the stream continues in another epoch on one worker."""

    epoch: int
    reason: str


class SafetyDecided(Event):
    verdict: SafetyVerdict
    reason: str
    revision: int = 1
    subagent: str | None = None


class StepProgressed(Event):
    """A progress message of the planner itself."""

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


class StepEnd(Event):
    """How a step ended; `outcomes` are by result key."""

    status: StepStatus
    outcomes: dict[str, Outcome] = {}
    reason: str | None = None
    next_step_id: str | None = None


class StepCompleted(StepEnd):
    """The last lifecycle event of a step, directly before the end of its stream."""


class PlanStepCompleted(StepEnd):
    """The end of a step's stream."""


SubagentEvent = (
    SubagentPending
    | SubagentStarted
    | SubagentResult
    | SubagentCompleted
    | SubagentRetried
    | SubagentTimedOut
    | SubagentDegraded
)
StepEvent = (
    StepStarted | SubagentEvent | StreamDegraded | SafetyDecided | StepProgressed | StepCompleted | PlanStepCompleted
)
