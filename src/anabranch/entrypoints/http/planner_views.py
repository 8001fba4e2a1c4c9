"""Spec 2 on the wire, as it goes out: receipts, the single answer, pages of events, and the stream's frames."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal
from urllib.parse import quote

import msgspec

from anabranch.domain.model import Value
from anabranch.domain.steprecords import StepRecord, numbered
from anabranch.domain.steps import Receipt
from anabranch.domain.streams import Page, Recorded, epoch
from anabranch.entrypoints.http.exchange import PIECE_BYTES
from anabranch.streams.mux import Batch

EVENTS_A_FRAME = 5
# Whatever else ended a step, it also ended the plan.
GOES_ON = ("success", "partial_failure", "failed")


class StepAccepted(Value):
    """A step, and where to follow it."""

    session_id: str
    plan_step_id: str
    status: str
    sequence: int
    stream: str
    ws: str
    events: str


class StepResult(Value):
    subagent: str
    status: str
    payload: msgspec.Raw
    revision: int


class StepAnswer(Value):
    """A step's single answer, at its end: the latest result under each key, and how each subagent did."""

    session_id: str
    plan_step_id: str
    status: str
    sequence: int
    results: dict[str, StepResult]
    subagents: msgspec.Raw
    reason: str | None
    next_step_id: str | None


class Taken(Value, omit_defaults=True):
    """What became of something that was sent: `sequence` is its place in the stream, `reason` why it was ignored.
    In a list, one that was refused has an `error` and its `message`."""

    accepted: bool
    sequence: int = 0
    reason: str | None = None
    status: str = ""
    error: str | None = None
    message: str | None = None


class TakenList(Value):
    results: list[Taken]


class Judged(Value, omit_defaults=True):
    """The decision as it was applied, and how the step stands."""

    decision: Literal["allow", "warn", "block"]
    status: str
    accepted: bool
    sequence: int = 0
    reason: str | None = None


class StepStands(Value, omit_defaults=True):
    status: str
    accepted: bool
    sequence: int = 0
    reason: str | None = None


class PlannerEvent(StepRecord):
    """An event as clients see it; what a client has under a type and a result key, a higher revision replaces."""

    sequence: int


class EventPage(Value):
    """`next_cursor` is the `after` of the next page. With `reset`, the cursor meant nothing: it begins again."""

    session_id: str
    plan_step_id: str
    events: list[PlannerEvent]
    next_cursor: int
    has_more: bool
    reset: bool


class EventBatch(Value):
    """What `planner_stream` carries: up to five events; `batch_sequence` counts from 1 on each connection."""

    batch_sequence: int
    events: list[PlannerEvent]
    type: Literal["event_batch"] = "event_batch"


class Heartbeat(Value):
    """Nothing is new; `sequence` is the latest there is."""

    sequence: int
    type: Literal["heartbeat"] = "heartbeat"


class Reset(Value):
    """The cursor means nothing any more: what was read so far is void, and all of it follows."""

    sequence: int
    epoch: int
    type: Literal["reset"] = "reset"


class EndPayload(Value):
    subagents: msgspec.Raw = msgspec.Raw(b"{}")
    reason: str | None = None
    next_step_id: str | None = None


class EventContent(Value):
    stage: str
    status: str
    payload: msgspec.Raw
    revision: int
    result_key: str | None = None


class EventBody(Value):
    type: str
    content: EventContent


_event_of = msgspec.json.Decoder(EventBody).decode
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


def answer(session_id: str, plan_step_id: str, entries: Iterable[Recorded]) -> bytes:
    """What the events of an ended step come to."""
    results: dict[str, StepResult] = {}
    status, sequence, end = "", 0, EndPayload()
    for entry in entries:
        event, sequence = _event_of(entry.body), entry.sequence
        said = event.content
        if event.type == "subagent_result" and said.result_key is not None:
            results[said.result_key] = StepResult(
                subagent=said.stage, status=said.status, payload=said.payload, revision=said.revision
            )
        elif entry.final:
            status, end = said.status, _end_of(said.payload)
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


def status_of(final: Recorded) -> str:
    return _event_of(final.body).content.status


def next_step(final: Recorded) -> str | None:
    """Where the stream goes on after a step's last event."""
    said = _event_of(final.body).content
    return _end_of(said.payload).next_step_id if said.status in GOES_ON else None


def taken(receipt: Receipt) -> Taken:
    if receipt.ignored is None:
        return Taken(accepted=True, sequence=receipt.sequence)
    return Taken(accepted=False, reason=receipt.ignored, status=receipt.status)


def page(session_id: str, plan_step_id: str, after: int, found: Page) -> Iterator[bytes]:
    """A page of events, in pieces: those who read slowly hold no copy of all of it."""
    entries = found.entries
    head = msgspec.json.encode({"session_id": session_id, "plan_step_id": plan_step_id})
    yield b'%b,"events":[' % head[:-1]
    begin = size = 0
    for index, entry in enumerate(entries):
        if size and size + len(entry.body) > PIECE_BYTES:
            yield _joined(entries[begin:index]) + b","
            begin, size = index, 0
        size += len(entry.body)
    rest = msgspec.json.encode(
        {
            "next_cursor": entries[-1].sequence if entries else 0 if found.reset else after,
            "has_more": found.more,
            "reset": found.reset,
        }
    )
    yield b"%b],%b" % (_joined(entries[begin:]), rest[1:])


class Frames:
    """A stream for one client: the events in batches that count from 1."""

    def __init__(self) -> None:
        self._batches = 0

    def sse(self, batch: Batch) -> bytes:
        frames = [b"event: reset\ndata: %b\n\n" % reset(batch.head)] if batch.reset else []
        for group, body in self._bodies(batch):
            frames.append(b"id: %d\nevent: planner_stream\ndata: %b\n\n" % (group[-1].sequence, body))
        return frames[0] if len(frames) == 1 else b"".join(frames)

    def messages(self, batch: Batch) -> Iterator[bytes]:
        if batch.reset:
            yield reset(batch.head)
        for _, body in self._bodies(batch):
            yield body

    def _bodies(self, batch: Batch) -> Iterator[tuple[Sequence[Recorded], bytes]]:
        for start in range(0, len(batch.entries), EVENTS_A_FRAME):
            group = batch.entries[start : start + EVENTS_A_FRAME]
            self._batches += 1
            body = b'{"type":"event_batch","batch_sequence":%d,"events":[%b]}' % (self._batches, _joined(group))
            yield group, body


def heartbeat(head: int) -> bytes:
    return b'{"type":"heartbeat","sequence":%d}' % head


def sse_heartbeat(head: int) -> bytes:
    return b"event: heartbeat\ndata: %b\n\n" % heartbeat(head)


def reset(head: int) -> bytes:
    return b'{"type":"reset","sequence":%d,"epoch":%d}' % (head, epoch(head))


def _joined(entries: Sequence[Recorded]) -> bytes:
    if len(entries) == 1:
        return numbered(entries[0].body, entries[0].sequence)
    return b",".join([numbered(entry.body, entry.sequence) for entry in entries])
