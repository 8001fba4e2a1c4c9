"""Decides from a recorded history whether a server kept its promises. It uses the standard library only: it knows of
HTTP, server-sent events and the words of the chat API, and of nothing else.

    python tests/support/fault_checker.py HISTORY.jsonl LIMITS.json

A history has one JSON object a line, in the order of time. `t` is in seconds; every line has a `kind`:

    asked     client, question, group                  a question was sent
    response  client, question, status, stream         the head of a response, also of a reconnection; `stream` or null
    event     client, question, id, name, data         a server-sent event; `id` or null
    answer    client, question, data                   a whole JSON answer
    broken    client, question                         the connection ended before the answer did
    left      client, question                         the client went away by itself
    sent      source, texts                            texts that a source has sent, or would send
    said      question, text                           what the model has said to a question
    memory    bytes                                    memory of all processes of the server
    fact      name, value                              anything else that was measured
    fault     what                                     what was done to the server"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

Line = Mapping[str, Any]

ENDS = ("done", "error")
RESET = "reset"
EPOCH = 2**32
MIB = 1024 * 1024


@dataclass
class Event:
    t: float
    id: int | None
    name: str
    data: Any


@dataclass
class Question:
    """One client's reading of one answer, over all of its connections."""

    client: str
    question: str
    group: str
    asked: float
    statuses: list[int] = field(default_factory=list)
    stream: str | None = None
    events: list[Event] = field(default_factory=list)
    answer: Any = None
    answered_at: float = 0.0
    left: bool = False

    @property
    def name(self) -> str:
        return f"{self.client}, question {self.question}"

    @property
    def accepted(self) -> bool:
        return 200 in self.statuses

    @property
    def kept(self) -> list[Event]:
        """What the client has after the last reset."""
        starts = [place for place, event in enumerate(self.events) if event.name == RESET]
        return self.events[starts[-1] + 1 :] if starts else self.events

    @property
    def end(self) -> Event | None:
        return next((event for event in reversed(self.kept) if event.name in ENDS), None)

    @property
    def answered(self) -> bool:
        return self.answer is not None or (self.end is not None and self.end.name == "done")

    @property
    def took_s(self) -> float | None:
        """From the question to the answer's end; None if there is none."""
        if self.answer is not None:
            return self.answered_at - self.asked
        return self.end.t - self.asked if self.end is not None else None

    @property
    def text(self) -> str:
        if self.answer is not None:
            return str(self.answer.get("response", ""))
        return "".join(event.data["content"] for event in self.kept if event.name == "token")

    @property
    def final(self) -> Mapping[str, Any]:
        found = self.answer if self.answer is not None else self.end.data if self.end is not None else {}
        return found if isinstance(found, Mapping) else {}


class History:
    def __init__(self, lines: Iterable[Line]) -> None:
        self.questions: dict[tuple[str, str], Question] = {}
        self.sent: dict[str, set[str]] = {}
        self.said: dict[str, list[str]] = {}
        self.memory: list[int] = []
        self.facts: dict[str, float] = {}
        for line in lines:
            self._read(line)

    def _read(self, line: Line) -> None:
        match line["kind"]:
            case "asked":
                found = Question(line["client"], line["question"], line["group"], line["t"])
                self.questions[found.client, found.question] = found
            case "response":
                question = self._of(line)
                question.statuses.append(line["status"])
                question.stream = line["stream"] or question.stream
            case "event":
                self._of(line).events.append(Event(line["t"], line["id"], line["name"], line["data"]))
            case "answer":
                question = self._of(line)
                question.answer, question.answered_at = line["data"], line["t"]
            case "left":
                self._of(line).left = True
            case "sent":
                self.sent.setdefault(line["source"], set()).update(line["texts"])
            case "said":
                self.said.setdefault(line["question"], []).append(line["text"])
            case "memory":
                self.memory.append(line["bytes"])
            case "fact":
                self.facts[line["name"]] = line["value"]
            case "broken" | "fault":
                pass
            case unknown:
                raise ValueError(f"unknown kind of line: {unknown}")

    def _of(self, line: Line) -> Question:
        return self.questions[line["client"], line["question"]]

    def group(self, name: str) -> list[Question]:
        return [one for one in self.questions.values() if name in ("all", one.group)]


# Rules that hold in every scenario.


def one_end(history: History) -> Iterator[str]:
    """Every accepted question ends in exactly one `done` or `error`, and nothing follows it."""
    for one in history.questions.values():
        ends = [place for place, event in enumerate(one.kept) if event.name in ENDS]
        if len(ends) > 1:
            yield f"{one.name}: {len(ends)} ends"
        elif ends and ends[0] != len(one.kept) - 1:
            yield f"{one.name}: {one.kept[ends[0] + 1].name} after the end"
        elif one.accepted and not ends and one.answer is None and not one.left:
            yield f"{one.name}: accepted, and has no end"


def order(history: History) -> Iterator[str]:
    """Ids of a client rise by one, over all of its connections, from the first event or a reset on."""
    for one in history.questions.values():
        before = 0
        for event in one.events:
            if event.name == RESET:
                before = 0
            elif event.id is not None:
                expected = before + 1 if before else event.id - event.id % EPOCH + 1
                if event.id <= before:
                    yield f"{one.name}: {event.id} after {before}"
                elif event.id != expected:
                    yield f"{one.name}: {expected} is missing, {event.id} came"
                before = event.id


def agreement(history: History) -> Iterator[str]:
    """One id of a stream is one event for all of its readers, and all who have the end have the same answer."""
    seen: dict[tuple[str, int], tuple[str, Any]] = {}
    texts: dict[str, tuple[str, str]] = {}
    for one in history.questions.values():
        if one.stream is None:
            continue
        for event in one.events:
            if event.id is not None:
                first = seen.setdefault((one.stream, event.id), (event.name, event.data))
                if first != (event.name, event.data):
                    yield f"{one.name}: {event.id} is {event.name}, and {first[0]} for another reader, or other data"
        if one.end is not None:
            whole = one.text, one.end.name
            if texts.setdefault(one.stream, whole) != whole:
                yield f"{one.name}: another answer than another reader of the stream has"


def whole_text(history: History) -> Iterator[str]:
    """The text of an answer is what the model has said to that question, from its first to its last character."""
    for one in history.questions.values():
        if one.answered and one.question in history.said and one.text not in history.said[one.question]:
            yield f"{one.name}: the answer is not what the model said: {one.text[:80]!r}"


def own_part(history: History) -> Iterator[str]:
    """The text of an answer that broke off is the beginning of what the model has said to that question."""
    for one in history.questions.values():
        said = history.said.get(one.question)
        if not one.answered and one.text and said and not any(text.startswith(one.text) for text in said):
            yield f"{one.name}: has words of another answer: {one.text[:80]!r}"


def citations(history: History) -> Iterator[str]:
    """Every document of an answer has been sent by the source that it names, and quotes stand where they say."""
    for one in history.questions.values():
        for title, document in one.final.get("sources", {}).items():
            sent = history.sent.get(document["slug"])
            if sent is None or document["content"] not in sent:
                yield f"{one.name}: {document['slug']} never sent the document {title!r}"
        for sentence in one.final.get("sentences") or ():
            for quote in sentence["citations"]:
                texts = history.sent.get(quote["source"], set())
                place = slice(quote["start_char"], quote["end_char"])
                if not any(text[place] == quote["quoted_text"] for text in texts):
                    yield f"{one.name}: {quote['quoted_text'][:60]!r} does not stand in {quote['source']}"


RULES: Sequence[Callable[[History], Iterator[str]]] = (one_end, order, agreement, whole_text, own_part, citations)


# Limits, which differ between scenarios.


def _statuses(history: History, allowed: Sequence[int]) -> Iterator[str]:
    """The statuses that a response may have; 500 is never one of them."""
    for one in history.questions.values():
        wrong = [status for status in one.statuses if status not in allowed or status == 500]
        if wrong:
            yield f"{one.name}: HTTP {wrong}"


def _errors(history: History, allowed: Sequence[str]) -> Iterator[str]:
    """The codes with which an accepted answer may end."""
    for one in history.questions.values():
        if one.end is not None and one.end.name == "error" and one.end.data["error"] not in allowed:
            yield f"{one.name}: ended with {one.end.data['error']}"


def _texts(history: History, expected: Mapping[str, str]) -> Iterator[str]:
    """What the answers of a group say, although they broke off."""
    for group, text in expected.items():
        yield from (f"{one.name}: {one.text[:80]!r}, not {text!r}" for one in history.group(group) if one.text != text)


def _answered(history: History, least: Mapping[str, float]) -> Iterator[str]:
    """The least share of each group's questions that have an answer."""
    for group, share in least.items():
        asked = history.group(group)
        found = sum(one.answered for one in asked) / len(asked) if asked else 0.0
        if found < share:
            yield f"{group}: {found:.1%} of {len(asked)} questions were answered, and {share:.1%} should be"


def _latency(rank: float) -> Callable[[History, Mapping[str, float]], Iterator[str]]:
    def within(history: History, most: Mapping[str, float]) -> Iterator[str]:
        for group, limit_s in most.items():
            found = percentile([one.took_s for one in history.group(group) if one.took_s is not None], rank)
            if found is None or found > limit_s:
                yield f"{group}: p{rank * 100:.0f} is {found} s, and the limit {limit_s} s"

    return within


def _memory(history: History, most_mb: float) -> Iterator[str]:
    """How much the memory of the server may grow over the first measurement."""
    grown = _grown_mb(history)
    if grown is None or grown > most_mb:
        yield f"memory grew by {grown} MB, and the limit is {most_mb} MB"


def _facts(history: History, limits: Mapping[str, Sequence[float]]) -> Iterator[str]:
    for name, (least, most) in limits.items():
        if name not in history.facts:
            yield f"{name} was not measured"
        elif not least <= history.facts[name] <= most:
            yield f"{name} is {history.facts[name]}, and must be from {least} to {most}"


LIMITS: Mapping[str, Callable[[History, Any], Iterator[str]]] = {
    "statuses": _statuses,
    "errors": _errors,
    "texts": _texts,
    "answered": _answered,
    "p50_s": _latency(0.5),
    "p99_s": _latency(0.99),
    "memory_mb": _memory,
    "facts": _facts,
}


def faults(history: History, limits: Mapping[str, Any]) -> list[str]:
    """Every promise that was broken. A limit that nobody knows is a mistake, not a promise kept."""
    found = [fault for rule in RULES for fault in rule(history)]
    if not history.questions:
        found.append("nobody asked anything")
    for name, limit in {"statuses": [200], "errors": [], **limits}.items():
        found += LIMITS[name](history, limit)
    return found


def measured(history: History) -> dict[str, Any]:
    """What there is to report."""
    groups = sorted({one.group for one in history.questions.values()})
    figures: dict[str, Any] = {group: _group(history.group(group)) for group in groups}
    if history.facts:
        figures["facts"] = dict(history.facts)
    if (grown := _grown_mb(history)) is not None:
        figures["memory_mb"] = grown
    return figures


def _group(asked: Sequence[Question]) -> dict[str, Any]:
    took_s = [one.took_s for one in asked if one.took_s is not None]
    refused = Counter(str(status) for one in asked for status in one.statuses if status not in (200, 204))
    errors = Counter(one.end.data["error"] for one in asked if one.end is not None and one.end.name == "error")
    found = {
        "asked": len(asked),
        "answered": sum(one.answered for one in asked),
        "p50_s": _rounded(percentile(took_s, 0.5)),
        "p99_s": _rounded(percentile(took_s, 0.99)),
        "refused": dict(sorted(refused.items())),
        "errors": dict(sorted(errors.items())),
        "left": sum(one.left for one in asked),
        "reconnections": sum(max(0, len(one.statuses) - 1) for one in asked),
        "resets": sum(event.name == RESET for one in asked for event in one.events),
    }
    return {name: value for name, value in found.items() if value or name in ("asked", "answered")}


def _grown_mb(history: History) -> float | None:
    return round((max(history.memory) - history.memory[0]) / MIB, 1) if history.memory else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def percentile(values: Iterable[float], rank: float) -> float | None:
    """The smallest value that at least this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, ceil(rank * len(ordered)) - 1)] if ordered else None


def read(path: Path) -> History:
    with path.open(encoding="utf-8") as file:
        return History(json.loads(line) for line in file)


def main(history: str, limits: str) -> int:
    read_history = read(Path(history))
    found = faults(read_history, json.loads(Path(limits).read_text(encoding="utf-8")))
    sys.stdout.write(json.dumps({"measured": measured(read_history), "faults": found}, indent=2) + "\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
