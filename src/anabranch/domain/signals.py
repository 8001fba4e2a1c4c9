"""What the policies around the river tell telemetry: not what becomes of a question, but how the machinery is doing."""

from typing import Literal

from anabranch.domain.mcp import ServerState
from anabranch.domain.model import Usage, Value

CacheName = Literal["answer", "embedding"]
BreakerState = Literal["closed", "half_open", "open"]


class CacheLooked(Value, gc=False):
    """A cache was asked; a cache that could not be reached is a miss."""

    cache: CacheName
    hit: bool


class Joined(Value, gc=False):
    """A question was already being answered, and this one waits for the same answer."""


class Metered(Value, gc=False):
    """A limiter has decided about a caller: a user, or an address."""

    surface: str
    admitted: bool
    caller: str = ""


class Rejected(Value, gc=False):
    """A request was turned away before a Run began."""

    surface: str
    code: str


class Load(Value, gc=False):
    """How many questions are being answered, and how many wait for their turn."""

    running: int
    waiting: int


class BreakerMoved(Value, gc=False):
    upstream: str
    state: BreakerState


class Retried(Value, gc=False):
    """An upstream is asked again."""

    upstream: str


class Spent(Value, gc=False):
    """What a call to a model took, as the model reports it, for whatever it was made."""

    model: str
    usage: Usage


class Hedged(Value, gc=False):
    """A source's alternate was asked too; `won` says that its reply was the one that counted."""

    upstream: str
    won: bool


class RedisMoved(Value, gc=False):
    reachable: bool
    reason: str = ""


class RedisSaidNo(Value, gc=False):
    """Redis answers, and refuses a command: it is read-only, full, wants a password. `why` is its error's name."""

    why: str


class Compared(Value, gc=False):
    """A step in shadow mode beside the old way's answer: where they differ, without what stands there."""

    session_id: str
    plan_step_id: str
    equal: bool
    differences: tuple[str, ...] = ()


class Stepped(Value, gc=False):
    """A planner's step has ended."""

    status: str
    latency_ms: int


class Subagented(Value, gc=False):
    """A subagent's part of a step has ended."""

    subagent: str
    status: str
    latency_ms: int


class Ignored(Value, gc=False):
    """Something sent to a step was recorded, and not delivered."""

    reason: str


class Reading(Value, gc=False):
    """How many clients read streams here."""

    clients: int


class ServerMoved(Value, gc=False):
    """How an MCP server is doing now. `reason` is a sentence of ours; what it quotes of the server's own words, and the
    `last_words` that its process wrote, hold nothing that it was given in confidence."""

    server: str
    state: ServerState
    reason: str = ""
    last_words: str = ""


class CrumbsLost(Value, gc=False):
    """Breadcrumbs that the sink could not take."""

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
