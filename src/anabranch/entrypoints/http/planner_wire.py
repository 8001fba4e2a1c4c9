"""The types of spec 2's surface: steps, pushed results, progress and safety decisions, and the events of a step."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args
from urllib.parse import quote

import msgspec
from msgspec import Meta

from anabranch.domain.errors import InvalidQuestion
from anabranch.domain.eventlog import LAST, Page, SequencedEntry, epoch
from anabranch.domain.events import SafetyVerdict, SubagentStatus
from anabranch.domain.model import Value
from anabranch.domain.steps import MAX_ATTEMPTS, Directive, Expected, Progress, Push, Receipt, Trace
from anabranch.entrypoints.http.errors import RequestTooLarge
from anabranch.entrypoints.http.operations import is_deeper
from anabranch.entrypoints.http.streams import by_size
from anabranch.planner.encoder import StepRecord, numbered

LONGEST_ID = 200
SUBAGENTS = 64
PAYLOAD_BYTES = 512 * 1024
CONTEXT_BYTES = 16 * 1024
DEEPEST = 100
# Neither empty, nor `.` or `..`, without control characters and line separators. (`$` alone would allow a newline.)
ID = r"^(?!\.{1,2}$)[^\x00-\x1f\x7f-\x9f\u2028\u2029]+$(?!\n)"
URL = r"^[hH][tT][tT][pP][sS]?://[!-~]+$(?!\n)"
TRACE_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)
SPAN_ID = re.compile(r"[0-9a-f]{16}", re.ASCII)
TRACESTATE = re.compile(r"[ -~]{0,512}", re.ASCII)
ID_RULE = f"have 1 to {LONGEST_ID} characters without control characters (and be neither . nor ..)"
URL_RULE = "be an http:// or https:// address of at most 2,048 characters without spaces"
# What a field must be, where a request breaks a limit of it. Other fields are identifiers.
RULES = {
    "url": URL_RULE,
    "callback_url": URL_RULE,
    "type": "be subagent_result, or be left out",
    "attempt": f"be from 1 to {MAX_ATTEMPTS:,}",
    "revision": f"be from 1 to {2**31 - 1:,}",
    "deadline_ms": "be from 1 to 86,400,000",
    "latency_ms": f"be from 0 to {LAST:,}",
    "metrics": "have at most 64 entries",
    "expected_subagents": f"have 1 to {SUBAGENTS} entries",
    "legacy_response": f"have at most {SUBAGENTS} entries",
    "reason": "have at most 2,000 characters",
}
STATUS_RULE = f"be one of {', '.join(get_args(SubagentStatus))} (or completed, for success)"
BROKEN_LIMIT = re.compile(
    r"(Invalid enum value|Expected `\w+` (?:>=|<=|of length|matching)).* - at (`key` in )?`\$\.?([^`]*?(\w+))`",
    re.DOTALL,
)
ID_SCHEMA = {
    "type": "string",
    "minLength": 1,
    "maxLength": LONGEST_ID,
    "allOf": [{"pattern": r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*$"}, {"pattern": r"[^.]"}],
}

Identifier = Annotated[str, Meta(min_length=1, max_length=LONGEST_ID, pattern=ID)]
Url = Annotated[str, Meta(max_length=2_048, pattern=URL)]
Legacy = Annotated[dict[Identifier, Any], Meta(max_length=SUBAGENTS)]


class TelemetryForm(Value):
    """The trace and span, the latency, and metrics."""

    trace_id: str | None = None
    span_id: str | None = None
    tracestate: str | None = None
    latency_ms: Annotated[float, Meta(ge=0, le=LAST)] | None = None
    metrics: Annotated[dict[Identifier, float], Meta(max_length=64)] | None = None


class SubagentForm(Value):
    """A subagent that the step waits for. It is called at `url`, runs here on `input`, or pushes its results."""

    key: Identifier
    result_key: Identifier | None = None
    telemetry: TelemetryForm | None = None
    deadline_ms: Annotated[int, Meta(ge=1, le=86_400_000)] | None = None
    url: Url | None = None
    required: bool = False
    input: Any = None


class StepForm(Value):
    """A step of a plan. `legacy_response` is the single answer to compare with, by result key (shadow mode)."""

    plan_step_id: Identifier
    expected_subagents: Annotated[list[SubagentForm], Meta(min_length=1, max_length=SUBAGENTS)]
    session_id: str | None = None
    planner_context: dict[str, str | int | float | bool | None] | None = None
    next_step_id: Identifier | None = None
    callback_url: Url | None = None
    shadow: bool = False
    legacy_response: Legacy | None = None


class PushForm(Value):
    """A subagent's result, or a part of it; `completed` means `success`."""

    status: SubagentStatus | Literal["completed"]
    payload: dict[str, Any] | None = None
    result_key: Identifier | None = None
    revision: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    attempt: Annotated[int, Meta(ge=1, le=MAX_ATTEMPTS)] | None = None
    telemetry: TelemetryForm | None = None
    type: Literal["subagent_result"] = "subagent_result"
    subagent: str | None = None
    error: Any = None
    message: Any = None


class ProgressForm(Value):
    payload: dict[str, Any] | None = None
    stage: Identifier | None = None
    status: Identifier | None = None
    next_step_id: Identifier | None = None
    legacy_response: Legacy | None = None


class SafetyForm(Value):
    """Every decision but `allow` and `warn` counts as `block`."""

    decision: Any
    reason: Annotated[str, Meta(max_length=2_000)] | None = None


Pushes = PushForm | Annotated[list[PushForm], Meta(min_length=1, max_length=100)]


def explain(error: str) -> str:
    """The message for a request that does not decode: where a limit is broken, it says what is allowed."""
    found = BROKEN_LIMIT.fullmatch(error)
    if found is not None:
        problem, key, place, name = found.groups()
        if key:
            return f"Each key of {place} must {ID_RULE}."
        enum = problem == "Invalid enum value" and name == "status"
        return f"{place} must {STATUS_RULE if enum else RULES.get(name, ID_RULE)}."
    if error.startswith("Expected `array` of length"):
        return "Send one event, or a list of 1 to 100."
    return f"The request is not valid: {error}"


def identifier(value: str, what: str) -> str:
    if len(value) > LONGEST_ID or re.search(ID, value) is None:
        raise InvalidQuestion(f"{what} must {ID_RULE}.")
    return value


def cursor(value: str, what: str) -> int:
    """A cursor: a sequence that this server has sent."""
    if re.fullmatch(r"[0-9]{1,16}", value) is None or int(value) > LAST:
        raise InvalidQuestion(f"{what} must be a sequence that was received: a whole number from 0 to {LAST}.")
    return int(value)


def directive(session_id: str, form: StepForm) -> Directive:
    if form.session_id is not None and form.session_id != session_id:
        raise InvalidQuestion("session_id in the body is not the one in the address; leave it out, or make them agree.")
    expected = tuple(
        Expected(
            key=one.key,
            result_key=one.result_key or one.key,
            trace=_trace(one.telemetry or TelemetryForm(), f"expected_subagents[{number}].telemetry"),
            deadline_ms=one.deadline_ms,
            url=one.url,
            required=one.required,
            input=None if one.input is None else packed(one.input, f"expected_subagents[{number}].input"),
        )
        for number, one in enumerate(form.expected_subagents)
    )
    if len({one.result_key for one in expected}) < len(expected):
        raise InvalidQuestion("Two of the expected_subagents have the same result_key; give each one its own.")
    context = form.planner_context or {}
    if len(msgspec.json.encode(context)) > CONTEXT_BYTES:
        raise RequestTooLarge(f"planner_context is larger than {CONTEXT_BYTES:,} bytes.", limit=CONTEXT_BYTES)
    return Directive(
        session_id=session_id,
        plan_step_id=form.plan_step_id,
        expected=expected,
        planner_context=context,
        next_step_id=form.next_step_id,
        callback_url=form.callback_url,
        shadow=form.shadow,
        legacy=_legacy(form.legacy_response),
    )


def push(name: str, form: PushForm) -> Push:
    """A push as its subagent sent it. An error may come without a payload."""
    telemetry, payload = form.telemetry or TelemetryForm(), form.payload
    if payload is None:
        payload = {key: value for key in ("error", "message") if (value := getattr(form, key)) is not None}
    return Push(
        name=name,
        status="success" if form.status == "completed" else form.status,
        payload=packed(payload, "payload"),
        result_key=form.result_key,
        revision=form.revision,
        attempt=form.attempt,
        trace=_trace(telemetry, "telemetry"),
        latency_ms=None if telemetry.latency_ms is None else round(telemetry.latency_ms),
        metrics=telemetry.metrics or {},
    )


def progress(form: ProgressForm, body: bytes) -> Progress:
    """Without a payload, the other fields of the body are the payload."""
    payload = form.payload
    if payload is None:
        fields = msgspec.json.decode(body, type=dict[str, Any])
        payload = {key: value for key, value in fields.items() if key not in ProgressForm.__struct_fields__}
    return Progress(
        payload=packed(payload, "payload"),
        stage=form.stage or "planner",
        status=form.status or "in_progress",
        next_step_id=form.next_step_id,
        legacy=_legacy(form.legacy_response),
    )


def packed(value: Any, what: str) -> msgspec.Raw:
    """A value as compact JSON on one line, with limits on its size and nesting."""
    body = msgspec.json.encode(value)
    if len(body) > PAYLOAD_BYTES:
        raise RequestTooLarge(f"{what} is larger than {PAYLOAD_BYTES:,} bytes.", limit=PAYLOAD_BYTES)
    if body.count(b"[") + body.count(b"{") > DEEPEST and is_deeper(value, DEEPEST):
        raise InvalidQuestion(f"{what} is nested more than {DEEPEST} deep.")
    return msgspec.Raw(body)


def _legacy(answers: Mapping[str, Any] | None) -> Mapping[str, msgspec.Raw] | None:
    if answers is None:
        return None
    return {key: packed(answer, "A result in legacy_response") for key, answer in answers.items()}


def _trace(telemetry: TelemetryForm, where: str) -> Trace | None:
    """The trace that a form names: both ids, neither of zeros only."""
    if telemetry.trace_id is None or telemetry.span_id is None:
        return None
    trace_id, span_id = telemetry.trace_id.lower(), telemetry.span_id.lower()
    if TRACE_ID.fullmatch(trace_id) is None or SPAN_ID.fullmatch(span_id) is None:
        raise InvalidQuestion(f"{where}.trace_id must be 32 hexadecimal digits, and {where}.span_id 16.")
    if TRACESTATE.fullmatch(telemetry.tracestate or "") is None:
        raise InvalidQuestion(f"{where}.tracestate must have at most 512 printable ASCII characters.")
    if not (trace_id.strip("0") and span_id.strip("0")):
        return None
    return Trace(trace_id=trace_id, span_id=span_id, tracestate=telemetry.tracestate or None)


EVENTS_A_FRAME = 5
# Any other final status also ends the plan.
CONTINUING = ("success", "partial_failure", "failed")


class StepSummary(Value):
    session_id: str
    plan_step_id: str
    status: str
    sequence: int


class StepAccepted(StepSummary):
    """A step, and the addresses of its events."""

    stream: str
    ws: str
    events: str


class StepResult(Value):
    subagent: str
    status: str
    payload: msgspec.Raw
    revision: int


class StepAnswer(StepSummary):
    """A step's single answer, at its end: the latest result of each key, and the status of each subagent."""

    results: dict[str, StepResult]
    subagents: msgspec.Raw
    reason: str | None
    next_step_id: str | None


class PushReceiptView(Value, omit_defaults=True):
    """The outcome of a push: `sequence` is its place in the stream, `reason` why it was ignored. In a list, a refused
    push has an `error` and its `message`."""

    accepted: bool
    sequence: int = 0
    reason: str | None = None
    status: str = ""
    error: str | None = None
    message: str | None = None


class PushReceipts(Value):
    results: list[PushReceiptView]


class StepReceipt(Value, omit_defaults=True):
    """The status of the step, and whether the command was applied; `reason` says why it was ignored."""

    status: str
    accepted: bool
    sequence: int = 0
    reason: str | None = None


class SafetyReceipt(StepReceipt, kw_only=True, omit_defaults=True):
    """The decision that was applied, and the status of the step."""

    decision: SafetyVerdict


class PlannerEventView(StepRecord):
    """An event as clients see it; a higher revision replaces the one with the same type and result key."""

    sequence: int


class EventPage(Value):
    """`next_cursor` is the `after` of the next page. With `reset`, the cursor was not valid: events start again."""

    session_id: str
    plan_step_id: str
    events: list[PlannerEventView]
    next_cursor: int
    has_more: bool
    reset: bool


class EventBatch(Value):
    """The data of `planner_stream`: up to five events; `batch_sequence` counts from 1 on each connection."""

    batch_sequence: int
    events: list[PlannerEventView]
    type: Literal["event_batch"] = "event_batch"


class Heartbeat(Value):
    """No new events; `sequence` is the latest one."""

    sequence: int
    type: Literal["heartbeat"] = "heartbeat"


class ResetView(Value):
    """The cursor is not valid: discard what was read so far, all events follow."""

    sequence: int
    epoch: int
    type: Literal["reset"] = "reset"


class EndPayload(Value):
    subagents: msgspec.Raw = msgspec.Raw(b"{}")
    reason: str | None = None
    next_step_id: str | None = None


_event_of = msgspec.json.Decoder(StepRecord).decode
_end_of = msgspec.json.Decoder(EndPayload).decode


def accepted(session_id: str, plan_step_id: str, page: Page, status: str) -> bytes:
    path = f"/planner/sessions/{quote(session_id, safe='')}/steps/{quote(plan_step_id, safe='')}"
    return msgspec.json.encode(
        StepAccepted(
            session_id=session_id,
            plan_step_id=plan_step_id,
            status=status,
            sequence=page.head,
            stream=f"{path}/stream",
            ws=f"{path}/ws",
            events=f"{path}/events",
        )
    )


def answer(session_id: str, plan_step_id: str, entries: Iterable[SequencedEntry]) -> bytes:
    """The single answer of an ended step, from its events."""
    results: dict[str, StepResult] = {}
    status, sequence, end = "", 0, EndPayload()
    for entry in entries:
        event, sequence = _event_of(entry.body), entry.sequence
        content = event.content
        if event.type == "subagent_result" and content.result_key is not None:
            results[content.result_key] = StepResult(
                subagent=content.stage, status=content.status, payload=content.payload, revision=content.revision
            )
        elif entry.final:
            status, end = content.status, _end_of(content.payload)
    return msgspec.json.encode(
        StepAnswer(
            session_id=session_id,
            plan_step_id=plan_step_id,
            status=status,
            sequence=sequence,
            results=results,
            subagents=end.subagents,
            reason=end.reason,
            next_step_id=end.next_step_id,
        )
    )


def status_of(final: SequencedEntry) -> str:
    return _event_of(final.body).content.status


def next_step(final: SequencedEntry) -> str | None:
    """The step that follows, as a step's last event names it."""
    content = _event_of(final.body).content
    return _end_of(content.payload).next_step_id if content.status in CONTINUING else None


def push_receipt(receipt: Receipt) -> PushReceiptView:
    if receipt.ignored is None:
        return PushReceiptView(accepted=True, sequence=receipt.sequence)
    return PushReceiptView(accepted=False, reason=receipt.ignored, status=receipt.status)


def step_receipt(receipt: Receipt) -> StepReceipt:
    accepted = receipt.ignored is None
    return StepReceipt(status=receipt.status, accepted=accepted, sequence=receipt.sequence, reason=receipt.ignored)


def page(session_id: str, plan_step_id: str, after: int, found: Page) -> Iterator[bytes]:
    """A page of events in pieces, so that a slow client holds no copy of all of it."""
    entries = found.entries
    head = msgspec.json.encode({"session_id": session_id, "plan_step_id": plan_step_id})
    yield b'%b,"events":[' % head[:-1]
    *earlier, last = by_size(entries)
    for group in earlier:
        yield _joined(group) + b","
    unchanged = 0 if found.reset else after
    rest = msgspec.json.encode(
        {
            "next_cursor": entries[-1].sequence if entries else unchanged,
            "has_more": found.more,
            "reset": found.reset,
        }
    )
    yield b"%b],%b" % (_joined(last), rest[1:])


class Frames:
    """A stream for one client: the events in batches that count from 1."""

    def __init__(self) -> None:
        self._batches = 0

    def sse(self, batch: Page) -> bytes:
        frames = [b"event: reset\ndata: %b\n\n" % reset(batch.head)] if batch.reset else []
        frames += [
            b"id: %d\nevent: planner_stream\ndata: %b\n\n" % (group[-1].sequence, self._body(group))
            for group in _groups(batch)
        ]
        return frames[0] if len(frames) == 1 else b"".join(frames)

    def messages(self, batch: Page) -> Iterator[str]:
        """The texts of WebSocket messages. No reference to one stays here while it waits for a slow client."""
        if batch.reset:
            yield reset(batch.head).decode()
        for group in _groups(batch):
            yield self._body(group).decode()

    def _body(self, group: Sequence[SequencedEntry]) -> bytes:
        self._batches += 1
        return b'{"type":"event_batch","batch_sequence":%d,"events":[%b]}' % (self._batches, _joined(group))


def _groups(batch: Page) -> Iterator[Sequence[SequencedEntry]]:
    """The events of each frame."""
    return (batch.entries[start : start + EVENTS_A_FRAME] for start in range(0, len(batch.entries), EVENTS_A_FRAME))


def heartbeat(head: int) -> bytes:
    return b'{"type":"heartbeat","sequence":%d}' % head


def sse_heartbeat(head: int) -> bytes:
    return b"event: heartbeat\ndata: %b\n\n" % heartbeat(head)


def reset(head: int) -> bytes:
    return b'{"type":"reset","sequence":%d,"epoch":%d}' % (head, epoch(head))


def _joined(entries: Sequence[SequencedEntry]) -> bytes:
    if len(entries) == 1:
        return numbered(entries[0].body, entries[0].sequence)
    return b",".join([numbered(entry.body, entry.sequence) for entry in entries])
