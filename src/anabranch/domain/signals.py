"""Signals of policies and infrastructure to telemetry: caches, limits, circuit breakers, Redis, MCP servers."""

from typing import Literal

from anabranch.domain.mcp import ServerState
from anabranch.domain.model import Usage, Value

CacheName = Literal["answer", "embedding"]
BreakerState = Literal["closed", "half_open", "open"]


class CacheLooked(Value, gc=False):
    """A cache lookup; an unreachable cache is a miss."""

    cache: CacheName
    hit: bool


class Joined(Value, gc=False):
    """A question shares the answer of an identical one that is already running."""


class Metered(Value, gc=False):
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


class BreakerMoved(Value, gc=False):
    upstream: str
    state: BreakerState


class Retried(Value, gc=False):
    """A call to an upstream is retried."""

    upstream: str


class Spent(Value, gc=False):
    """Token usage of a call to a model, as the model reports it."""

    model: str
    usage: Usage


class Hedged(Value, gc=False):
    """A hedged request to a source's alternate address; `won`: its reply was used."""

    upstream: str
    won: bool


class RedisMoved(Value, gc=False):
    reachable: bool
    reason: str = ""


class RedisSaidNo(Value, gc=False):
    """Redis refused a command: it is read-only, full, or needs a password. `why` is the name of its error."""

    why: str


class Compared(Value, gc=False):
    """A step in shadow mode compared with the legacy answer: the paths that differ, without values."""

    session_id: str
    plan_step_id: str
    equal: bool
    differences: tuple[str, ...] = ()


class Stepped(Value, gc=False):
    """A planner step has ended."""

    status: str
    latency_ms: int


class Subagented(Value, gc=False):
    """A subagent's part of a step has ended."""

    subagent: str
    status: str
    latency_ms: int


class Ignored(Value, gc=False):
    """An event sent to a step was recorded and not delivered."""

    reason: str


class Reading(Value, gc=False):
    """The number of clients that read streams."""

    clients: int


class ServerMoved(Value, gc=False):
    """The new state of an MCP server. `reason` is our message; secrets are removed from what it quotes of the server,
    and from `last_words`, the last output of its process."""

    server: str
    state: ServerState
    reason: str = ""
    last_words: str = ""


class CrumbsLost(Value, gc=False):
    """Breadcrumbs that a sink dropped."""

    count: int


Signal = (
    CacheLooked
    | Joined
    | Metered
    | Rejected
    | Load
    | BreakerMoved
    | Retried
    | Spent
    | Hedged
    | RedisMoved
    | RedisSaidNo
    | Compared
    | Stepped
    | Subagented
    | Ignored
    | Reading
    | CrumbsLost
    | ServerMoved
)
