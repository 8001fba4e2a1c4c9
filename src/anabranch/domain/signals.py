"""Signals of policies and infrastructure to telemetry: caches, limits, circuit breakers, Redis, MCP servers."""

from typing import Literal

from anabranch.domain.mcp import ServerState
from anabranch.domain.model import Endpoint, Usage, Value

CacheName = Literal["answer", "embedding", "evidence"]
EvidenceTask = Literal["read", "check"]
BreakerState = Literal["closed", "half_open", "open"]
EndpointRole = Literal["source", "model"]


class CacheLookup(Value, gc=False):
    """A cache lookup; an unreachable cache is a miss."""

    cache: CacheName
    hit: bool


class EvidenceJudged(Value, gc=False):
    """The evidence model has read passages for a question, or checked a claim with them; cached results not counted."""

    task: EvidenceTask
    passages: int
    latency_ms: float


class EvidenceUnavailable(Value, gc=False):
    """The evidence model, or the configured verifier, cannot be loaded or asked, and is not used; noted once for each
    reason."""

    reason: str


class RecordingFailed(Value, gc=False):
    """The recording of a run could not be written."""

    reason: str


class QuestionNotRecorded(Value, gc=False):
    """A question could not be written to the query log; its answer is not affected."""

    reason: str


class AnswerShared(Value, gc=False):
    """A question shares the answer of an identical one that is already running."""


class RateLimitChecked(Value, gc=False):
    """A rate limiter's decision about a caller: a user, or an address."""

    surface: str
    admitted: bool
    caller: str = ""


class Rejected(Value, gc=False):
    """A request was rejected before a Run began."""

    surface: str
    code: str


class Load(Value, gc=False):
    """The number of questions that run, and that wait for admission."""

    running: int
    waiting: int


class BreakerStateChanged(Value, gc=False):
    upstream: str
    state: BreakerState


class Retried(Value, gc=False):
    """A call to an upstream is retried."""

    upstream: str


class TokensUsed(Value, gc=False):
    """Token usage of a call to a model, as the model reports it."""

    model: str
    usage: Usage


class Hedged(Value, gc=False):
    """A hedged request to a source's alternate address; `won`: its reply was used."""

    upstream: str
    won: bool


class RedisStateChanged(Value, gc=False):
    reachable: bool
    reason: str = ""


class RedisCommandRefused(Value, gc=False):
    """Redis refused a command: it is read-only, full, or needs a password. `why` is the name of its error."""

    why: str


class ShadowCompared(Value, gc=False):
    """A step in shadow mode compared with the legacy answer: the paths that differ, without values."""

    session_id: str
    plan_step_id: str
    equal: bool
    differences: tuple[str, ...] = ()


class StepEnded(Value, gc=False):
    """A planner step has ended."""

    status: str
    latency_ms: int


class SubagentEnded(Value, gc=False):
    """A subagent's part of a step has ended."""

    subagent: str
    status: str
    latency_ms: int


class EventIgnored(Value, gc=False):
    """An event sent to a step was recorded and not delivered."""

    reason: str


class StreamClients(Value, gc=False):
    """The number of clients that read streams."""

    clients: int


class McpServerStateChanged(Value, gc=False):
    """The new state of an MCP server. `reason` is our message; secrets are removed from what it quotes of the server,
    and from `last_words`, the last output of its process."""

    server: str
    state: ServerState
    reason: str = ""
    last_words: str = ""


class AnswerRated(Value, gc=False):
    """An answer got its first rating."""

    surface: str
    rating: str


class EndpointCalled(Value, gc=False):
    """An endpoint of the operator has replied, or failed: `error` is the sentence that callers get. Calls of endpoints
    that callers name by URL are not noted."""

    role: EndpointRole
    endpoint: Endpoint
    latency_ms: float
    error: str | None = None


class AddedSourcesUnreadable(Value, gc=False):
    """The file of the sources that were added over the API cannot be used."""

    reason: str


class BreadcrumbsDropped(Value, gc=False):
    """Breadcrumbs that a sink dropped."""

    count: int


Signal = (
    CacheLookup
    | EvidenceJudged
    | EvidenceUnavailable
    | RecordingFailed
    | QuestionNotRecorded
    | AnswerShared
    | RateLimitChecked
    | Rejected
    | Load
    | BreakerStateChanged
    | Retried
    | TokensUsed
    | Hedged
    | RedisStateChanged
    | RedisCommandRefused
    | ShadowCompared
    | StepEnded
    | SubagentEnded
    | EventIgnored
    | StreamClients
    | EndpointCalled
    | AddedSourcesUnreadable
    | BreadcrumbsDropped
    | McpServerStateChanged
    | AnswerRated
)
