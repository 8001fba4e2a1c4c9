"""What clients saw and producers were told, and whether it can be true: order, gaps, doubles, agreement, and one end.

A history is what one client applied, connection by connection. The checker knows nothing of how streams are made; it
holds clients' histories against each other, against what producers were told, and against what the log says in the
end."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

EPOCH = 2**32
FINAL = "plan_step_completed"
RESULT = "subagent_result"
REPLACEABLE = ("pending", "in_progress", "partial")
CLOSING = ("timeout", "degraded")

Event = Mapping[str, Any]
Key = tuple[str | None, str, str | None]


@dataclass
class Reset:
    """The server said that the cursor means nothing; `head` is how far the log was, as the server said."""

    head: int = 0


@dataclass
class Joined:
    """One came without a cursor when the log was that far: what had been trimmed away by then is not missing."""

    head: int


@dataclass
class Beat:
    """The server said how far the log is."""

    sequence: int


Item = Event | Reset | Joined | Beat


@dataclass
class History:
    """One client's: what it applied, in order, over all of its connections."""

    name: str
    applied: list[Item] = field(default_factory=list)
    finished: bool = False

    def lives(self) -> Iterator[tuple[int, list[Event]]]:
        """What was applied between resets, and up to where it was a snapshot."""
        life: list[Event] = []
        snapshot = 0
        for each in self.applied:
            if isinstance(each, Reset):
                yield snapshot, life
                life, snapshot = [], each.head
            elif isinstance(each, Joined):
                snapshot = snapshot if life else each.head
            elif not isinstance(each, Beat):
                life.append(each)
        yield snapshot, life

    @property
    def numbers(self) -> list[int]:
        """The sequences of what it has in the end."""
        *_, (_, life) = self.lives()
        return [event["sequence"] for event in life]

    @property
    def resets(self) -> int:
        return sum(isinstance(each, Reset) for each in self.applied)


@dataclass
class Told:
    """What a producer sent under a result key, and every reply that it got. `mark` stands in the payload and nowhere
    else; of two with the same key, the one with the higher `place` replaces the other. `unsure` says that there was a
    time when it got no reply, or one that left it open."""

    plan_step_id: str | None
    result_key: str
    place: tuple[int, ...]
    mark: str
    accepted: list[int] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    unsure: bool = False

    @property
    def is_in(self) -> bool:
        return bool(self.accepted) or "duplicate" in self.ignored


def step_of(event: Event) -> str | None:
    step: str | None = event.get("plan_step_id")
    return step


def key_of(event: Event) -> Key:
    return step_of(event), event["type"], event["content"].get("result_key")


def revision_of(event: Event) -> int:
    revision: int = event["content"]["revision"]
    return revision


def mark_of(event: Event) -> str | None:
    mark: str | None = event["content"]["payload"].get("mark")
    return mark


def replaceable(event: Event) -> bool:
    return event["type"] == RESULT and event["content"]["status"] in REPLACEABLE


def state(events: Iterable[Event]) -> dict[Key, Event]:
    """What is left when every event has been applied as an upsert."""
    return {key_of(event): event for event in events}


def faults(
    histories: Sequence[History],
    truth: Sequence[Event] | None = None,
    told: Sequence[Told] = (),
    *,
    losses: bool = False,
) -> list[str]:
    """Everything that cannot be; `truth` is the whole log as it was read at the end. With `losses`, what was accepted
    may be missing: whoever kept it has died, and nobody else had it."""
    everybody = [*histories, *([History("the log", [*truth], finished=True)] if truth is not None else [])]
    wrong: list[str] = []
    bodies: dict[int, Event] = {}
    revisions: dict[tuple[Key, int], Event] = {}
    for history in reversed(everybody):
        wrong += _beats(history)
        for _, life in history.lives():
            wrong += _order(history.name, life)
            wrong += _agreement(history.name, life, bodies)
            wrong += _revisions(history.name, life, revisions)
    for history in everybody:
        trimmed = history.name == "the log"
        for snapshot, life in history.lives():
            wrong += _gaps(history.name, life, bodies, max(bodies, default=0) if trimmed else snapshot)
        wrong += _end(history, [*history.lives()][-1][1], truth)
    if truth is not None:
        wrong += _receipts(told, truth, bodies, losses)
    return wrong


def _beats(history: History) -> Iterator[str]:
    cursor = 0
    for each in history.applied:
        match each:
            case Reset():
                cursor = 0
            case Beat(sequence):
                if sequence < cursor:
                    yield f"{history.name}: has {cursor}, and the log is said to be at {sequence}"
            case Joined():
                pass
            case event:
                cursor = event["sequence"]


def _order(name: str, life: Sequence[Event]) -> Iterator[str]:
    """Within a step; the next step begins when the one before has ended."""
    before = 0
    step: str | None = None
    ended = False
    revisions: dict[Key, int] = {}
    over: set[tuple[str | None, str]] = set()
    for event in life:
        sequence, kind, key = event["sequence"], event["type"], event["content"].get("result_key")
        another = bool(before) and step_of(event) != step
        if sequence <= before:
            yield f"{name}: {sequence} came after {before}"
        if before and not another and sequence // EPOCH != before // EPOCH:
            yield f"{name}: epoch changed from {before} to {sequence} without a reset"
        if another and not ended:
            yield f"{name}: {sequence} is of another step, and the one before has not ended"
        if revision_of(event) <= revisions.get(key_of(event), 0):
            yield f"{name}: {sequence} brings {key_of(event)} back to revision {revision_of(event)}"
        if ended and not another:
            yield f"{name}: {sequence} came after the end"
        if (step_of(event), key) in over:
            yield f"{name}: {sequence} ({kind}) came although {key} is over"
        if key is not None and (
            kind in CLOSING or (kind, event["content"]["status"]) == ("subagent_completed", "success")
        ):
            over.add((step_of(event), key))
        ended = kind == FINAL
        before, step = sequence, step_of(event)
        revisions[key_of(event)] = revision_of(event)


def _agreement(name: str, life: Sequence[Event], bodies: dict[int, Event]) -> Iterator[str]:
    for event in life:
        known = bodies.setdefault(event["sequence"], event)
        if known != event:
            yield f"{name}: {event['sequence']} is {event!r} here and {known!r} elsewhere"


def _revisions(name: str, life: Sequence[Event], known: dict[tuple[Key, int], Event]) -> Iterator[str]:
    """Whatever its number in another epoch: a revision is one and the same for everybody, and so is the end."""
    for event in life:
        other = known.setdefault((key_of(event), revision_of(event)), event)
        if {**other, "sequence": 0} != {**event, "sequence": 0}:
            yield f"{name}: revision {revision_of(event)} of {key_of(event)} is {event!r} here and {other!r} elsewhere"


def _gaps(name: str, life: Sequence[Event], bodies: Mapping[int, Event], snapshot: int) -> Iterator[str]:
    """A number that was not delivered must be a partial that a later, delivered revision replaced; in a snapshot, it
    may be anything that was replaced. Whoever was cut off in between has not had the later one yet."""
    delivered: dict[Key, int] = {key_of(event): event["sequence"] for event in life}
    last = life[-1] if life else None
    if last is not None and last["type"] != FINAL:
        behind = [event for sequence, event in bodies.items() if sequence > last["sequence"] and _near(event, last)]
        delivered |= {key_of(event): event["sequence"] for event in behind}
    seen = {event["sequence"] for event in life}
    reached = {(step_of(event), event["sequence"] // EPOCH): event["sequence"] for event in life}
    first = life[0]["sequence"] if life else 0
    for sequence, event in sorted(bodies.items()):
        if sequence in seen or sequence > reached.get((step_of(event), sequence // EPOCH), 0):
            continue
        replaced = delivered.get(key_of(event), 0) > sequence
        if not (replaced and (replaceable(event) or sequence <= snapshot)):
            status = event["content"]["status"]
            yield f"{name}: {sequence} ({key_of(event)}, {status}) was never delivered, from {first} on"


def _near(event: Event, last: Event) -> bool:
    return step_of(event) == step_of(last) and event["sequence"] // EPOCH == last["sequence"] // EPOCH


def _end(history: History, life: Sequence[Event], truth: Sequence[Event] | None) -> Iterator[str]:
    ends = [step_of(event) for event in life if event["type"] == FINAL]
    if len(ends) > len(set(ends)):
        yield f"{history.name}: {len(ends)} ends"
    if history.finished and not (life and life[-1]["type"] == FINAL):
        yield f"{history.name}: finished without an end"
    if history.finished and life and life[0]["type"] != "step_started" and truth and truth[0]["type"] == "step_started":
        yield f"{history.name}: does not begin with the beginning"
    if history.finished and truth is not None and _shapes(state(life)) != _shapes(state(truth)):
        yield f"{history.name}: ends with another state than the log"


def _shapes(found: Mapping[Key, Event]) -> dict[Key, Any]:
    return {key: event["content"] for key, event in found.items()}


def _receipts(told: Sequence[Told], truth: Sequence[Event], bodies: Mapping[int, Event], losses: bool) -> Iterator[str]:
    """What was accepted is there, in its place, or something later is; what was not is nowhere."""
    places = {one.mark: one.place for one in told}
    shown = {mark for event in bodies.values() if (mark := mark_of(event)) is not None}
    latest: dict[tuple[str | None, str | None], tuple[int, ...]] = {}
    for event in truth:
        if event["type"] == RESULT and (mark := mark_of(event)) is not None:
            latest[step_of(event), event["content"]["result_key"]] = places.get(mark, ())
    there = {mark_of(event) for event in truth}
    for one in told:
        for sequence in one.accepted:
            found = bodies.get(sequence)
            if found is not None and mark_of(found) != one.mark and step_of(found) == one.plan_step_id:
                yield f"{one.mark}: was said to be {sequence}, which is {found!r}"
        is_there = one.mark in there or latest.get((one.plan_step_id, one.result_key), ()) > one.place
        if one.is_in and not is_there and not losses:
            yield f"{one.mark}: was accepted ({one.accepted}, {one.ignored}), and is lost"
        if not one.is_in and not one.unsure and one.mark in shown:
            yield f"{one.mark}: was ignored ({one.ignored}), and is in the stream"
