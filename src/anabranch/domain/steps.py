"""A planner step: its subagents, the commands on it, and what its subagents send."""

from collections.abc import Mapping
from typing import Literal

import msgspec

from anabranch.domain.events import SafetyVerdict, SubagentStatus
from anabranch.domain.model import Value

EMPTY = msgspec.Raw(b"{}")
# How many attempts a result has, also those that are counted because a push names none.
MAX_ATTEMPTS = 1_000

Ignored = Literal["duplicate", "superseded", "late", "completed", "ended", "degraded"]


class Trace(Value, gc=False):
    """A position in a distributed trace."""

    trace_id: str
    span_id: str
    parent_span_id: str | None = None
    tracestate: str | None = None

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-01"


class Expected(Value):
    """One subagent that a step waits for: it is called at `url`, works in this process on `input`, or else pushes its
    result. `result_key` names its result, for all attempts."""

    key: str
    result_key: str
    trace: Trace | None = None
    deadline_ms: int | None = None
    url: str | None = None
    required: bool = False
    input: msgspec.Raw | None = None


class Directive(Value):
    """The envelope that starts a step. `next_step_id` is the step whose stream follows; `legacy` is the legacy answer
    by result key, to compare with (shadow mode)."""

    session_id: str
    plan_step_id: str
    expected: tuple[Expected, ...]
    planner_context: Mapping[str, str | int | float | bool | None] = {}
    next_step_id: str | None = None
    callback_url: str | None = None
    shadow: bool = False
    legacy: Mapping[str, msgspec.Raw] | None = None


class Fragment(Value):
    """What a subagent yields: a result or a part of one, as its adapter encodes it (a compact JSON object). `verdict`
    is set by the safety subagent."""

    status: SubagentStatus
    payload: msgspec.Raw = EMPTY
    metrics: Mapping[str, float] = {}
    verdict: SafetyVerdict | None = None
    reason: str = ""


class Push(Value, tag=True):
    """A result that a subagent pushes. Within an attempt `revision` counts up; without one it is the next. Without an
    `attempt` it belongs to the current one, or after an error to the next. `name` is the subagent's key or its result
    key."""

    name: str
    status: SubagentStatus
    payload: msgspec.Raw = EMPTY
    result_key: str | None = None
    revision: int | None = None
    attempt: int | None = None
    trace: Trace | None = None
    latency_ms: int | None = None
    metrics: Mapping[str, float] = {}


class Progress(Value, tag=True):
    """Progress of the planner itself. It may name the next step, or carry the legacy answer to compare with."""

    payload: msgspec.Raw = EMPTY
    stage: str = "planner"
    status: str = "in_progress"
    next_step_id: str | None = None
    legacy: Mapping[str, msgspec.Raw] | None = None


class Decision(Value, tag=True):
    """A safety decision; anything but allow and warn counts as block."""

    decision: str
    reason: str = ""


def verdict_of(said: str) -> SafetyVerdict:
    """Anything but allow and warn counts as block."""
    match said.strip().lower():
        case "allow":
            return "allow"
        case "warn":
            return "warn"
        case _:
            return "block"


class Cancel(Value, tag=True):
    reason: str = ""


Command = Push | Progress | Decision | Cancel


class Receipt(Value, gc=False):
    """The result of a command: its sequence in the stream, or why it was ignored."""

    sequence: int = 0
    ignored: Ignored | None = None
    status: str = ""


class Breadcrumb(Value, gc=False):
    """One analytics record; `ignored` says why something was recorded and not delivered."""

    session_id: str
    plan_step_id: str
    type: str
    timestamp: str
    sequence: int = 0
    subagent: str | None = None
    result_key: str | None = None
    status: str = ""
    revision: int = 0
    retry_count: int = 0
    latency_ms: int | None = None
    trace_id: str | None = None
    ignored: str | None = None


def stream_of(session_id: str, plan_step_id: str) -> str:
    """The name of a step's stream; unique, whatever the ids contain."""
    return f"step:{len(session_id)}:{session_id}:{plan_step_id}"
