"""Fakes of the domain's contracts, for tests that need no network."""

# ruff: noqa: ARG002

import asyncio
import hashlib
import heapq
import itertools
import re
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import lru_cache
from typing import TypeVar, cast

import msgspec

from anabranch.domain.contracts import Attribute, Generator, Source, Subagent
from anabranch.domain.errors import GenerationFailed, InvalidQuestion
from anabranch.domain.events import AnswerEvent, SafetyVerdict, SubagentStatus
from anabranch.domain.evidence import AnswerSpan, EvidencePage, Reading, Verdict
from anabranch.domain.model import (
    Calibration,
    Context,
    Delta,
    Embedding,
    Endpoint,
    Message,
    Prompt,
    Query,
    Question,
    RelevanceCurve,
    SourceReply,
    Usage,
)
from anabranch.domain.signals import Signal
from anabranch.domain.steps import Breadcrumb, Directive, Expected, Fragment

WORD = re.compile(r"\w+")
TOKEN = re.compile(r"\w{1,6}|[^\w\s]")
T = TypeVar("T")
VERDICTS: dict[str, SafetyVerdict] = {"allow": "allow", "warn": "warn"}


class FakeSource:
    def __init__(self, reply: SourceReply | Callable[[Query, Context], SourceReply], *, delay_s: float = 0) -> None:
        self.queries: list[Query] = []
        self._reply = reply
        self._delay_s = delay_s

    async def search(self, query: Query, context: Context) -> SourceReply:
        self.queries.append(query)
        await asyncio.sleep(self._delay_s)
        return self._reply if isinstance(self._reply, SourceReply) else self._reply(query, context)


class FakeGenerator:
    """Yields the given words; with `fail_after` it fails after so many of them."""

    def __init__(
        self, words: Sequence[str], *, fail_after: int | None = None, delay_s: float = 0, usage: Usage | None = None
    ) -> None:
        self.prompts: list[Prompt] = []
        self._words = words
        self._fail_after = fail_after
        self._delay_s = delay_s
        self._usage = usage

    async def generate(self, prompt: Prompt, context: Context) -> AsyncGenerator[Delta, None]:
        self.prompts.append(prompt)
        for word in self._words[: self._fail_after]:
            await asyncio.sleep(self._delay_s)
            yield Delta(text=word)
        if self._fail_after is not None:
            raise GenerationFailed("the model broke")
        if self._usage is not None:
            yield Delta(text="", usage=self._usage)


class ScriptedGenerator:
    """Writes what `reply` makes of the messages, in parts of a few characters."""

    def __init__(self, reply: Callable[[Sequence[Message]], str], *, size: int = 7) -> None:
        self.prompts: list[Prompt] = []
        self._reply = reply
        self._size = size

    async def generate(self, prompt: Prompt, context: Context) -> AsyncGenerator[Delta, None]:
        self.prompts.append(prompt)
        text = self._reply(prompt.messages)
        for at in range(0, len(text), self._size):
            yield Delta(text=text[at : at + self._size])


class FakeDirectory:
    """Finds sources and generators by the path of their endpoint."""

    def __init__(self, sources: Mapping[str, Source], generators: Mapping[str, Generator] | None = None) -> None:
        self._sources = sources
        self._generators = generators or {}

    def source(self, endpoint: Endpoint) -> Source:
        return self._sources[endpoint.path]

    def generator(self, endpoint: Endpoint, *, retried: bool = True) -> Generator:
        return self._generators[endpoint.path]


class Recorder:
    """A Telemetry that records its calls."""

    def __init__(self) -> None:
        self.questions: list[Question] = []
        self.events: list[AnswerEvent] = []
        self.crashes: list[BaseException] = []
        self.signals: list[Signal] = []
        self.spans: list[RecordedSpan] = []

    def asked(self, question: Question, context: Context) -> None:
        self.questions.append(question)

    def happened(self, event: AnswerEvent, context: Context) -> None:
        self.events.append(event)

    def crashed(self, error: BaseException, context: Context) -> None:
        self.crashes.append(error)

    def noted(self, signal: Signal) -> None:
        self.signals.append(signal)

    def span(self, name: str, context: Context, **attributes: str | int | float) -> "RecordedSpan":
        self.spans.append(RecordedSpan(name, context, attributes))
        return self.spans[-1]


class RecordedSpan:
    def __init__(self, name: str, context: Context, attributes: Mapping[str, str | int | float]) -> None:
        self.name = name
        self.context = context
        self.attributes: dict[str, Attribute] = dict(attributes)
        self.ended = False

    def __enter__(self) -> "RecordedSpan":
        return self

    def __exit__(self, *_: object) -> None:
        self.ended = True

    def set(self, name: str, value: Attribute) -> None:
        self.attributes[name] = value


class ManualClock:
    """A clock that moves only by `advance`."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def monotonic(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


FAKE_CALIBRATION = Calibration(topic_threshold=0.35, relevance=RelevanceCurve(near=5.4, shared=2.0, bias=-1.9))


class FakeEmbedder:
    """An embedder without a model: texts are similar if they share words. A word's vector is ±1s from its hash; a text
    is the normalised sum of its words. Tokens are punctuation and parts of words of up to six letters."""

    def __init__(
        self, *, dimensions: int = 128, window: int = 256, calibration: Calibration = FAKE_CALIBRATION
    ) -> None:
        if dimensions % 8 or not 8 <= dimensions <= 512:
            raise ValueError("dimensions must be a multiple of 8, up to 512")
        self.calls: list[tuple[str, ...]] = []
        self.name = f"fake-{dimensions}"
        self.dimensions = dimensions
        self.window = window
        self.calibration = calibration

    def tokens(self, text: str) -> Sequence[tuple[int, int]]:
        return [found.span() for found in TOKEN.finditer(text)]

    async def embed(self, texts: Sequence[str]) -> Sequence[Embedding]:
        self.calls.append(tuple(texts))
        return [self._embedding(text) for text in texts]

    def _embedding(self, text: str) -> Embedding:
        import numpy as np  # noqa: PLC0415

        within = self.tokens(text)[: self.window]
        words = WORD.findall(text[: within[-1][1]].lower()) if within else []
        rows = b"".join(_signs(word, self.dimensions // 8) for word in words)
        bits = np.unpackbits(np.frombuffer(rows or bytes(self.dimensions // 8), np.uint8))
        vector = (2.0 * bits.reshape(-1, self.dimensions) - 1.0).sum(axis=0)
        length = float(np.linalg.norm(vector))
        # Vectors that cancel out have no direction.
        unit = vector / length if length else np.full(self.dimensions, self.dimensions**-0.5)
        return Embedding(vector=unit.astype(np.float32).tobytes(), tokens=rows)


@lru_cache(maxsize=65_536)
def _signs(word: str, size_bytes: int) -> bytes:
    return hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=size_bytes).digest()


class FakeEvidence:
    """Evidence without a model: what shares more of the question's words is more relevant. The answer is the longest
    run of words in the best unit that the question does not have. A claim is contradicted by pages that have all its
    words but not its numbers. At most `limit` inputs of a call are read."""

    def __init__(self, *, limit: int = 64, now: Callable[[], float] = time.monotonic) -> None:
        self.questions: list[str] = []
        self.claims: list[str] = []
        self._limit = limit
        self._now = now

    async def read(
        self, question: str, inputs: Sequence[tuple[EvidencePage, ...]], *, until: float | None = None
    ) -> Sequence[Reading | None]:
        self.questions.append(question)
        return self._each(lambda pages: _reading(question, pages), inputs, until)

    async def check(
        self, claim: str, inputs: Sequence[tuple[EvidencePage, ...]], *, until: float | None = None
    ) -> Sequence[Verdict | None]:
        self.claims.append(claim)
        return self._each(lambda pages: _verdict(claim, pages), inputs, until)

    def _each(
        self,
        judge: Callable[[tuple[EvidencePage, ...]], T],
        inputs: Sequence[tuple[EvidencePage, ...]],
        until: float | None,
    ) -> list[T | None]:
        read = self._limit if until is None or self._now() < until else 0
        return [judge(pages) if number < read else None for number, pages in enumerate(inputs)]


def _subject_words(text: str) -> set[str]:
    """Numbers, and words of more than three letters: others say little about the subject."""
    return {word for word in WORD.findall(text.lower()) if len(word) > 3 or word.isdigit()}


def _shared(wanted: set[str], text: str) -> float:
    """Log-odds from -4, no word is shared, to 4, all of them are."""
    return 8.0 * len(wanted & _subject_words(text)) / max(1, len(wanted)) - 4.0


def _text(page: EvidencePage) -> str:
    return " ".join((page.title, *(f"{unit.before} {unit.text}" for unit in page.units)))


def _reading(question: str, pages: tuple[EvidencePage, ...]) -> Reading:
    wanted = _subject_words(question)
    units = tuple(tuple(_shared(wanted, unit.text) for unit in page.units) for page in pages)
    places = [(page, unit) for page, scores in enumerate(units) for unit in range(len(scores))]
    best = max(places, key=lambda place: units[place[0]][place[1]], default=None)
    return Reading(
        relevance=_shared(wanted, " ".join(map(_text, pages))),
        answerable=units[best[0]][best[1]] if best else -4.0,
        units=units,
        answer=_longest_run(question, pages, *best, units[best[0]][best[1]]) if best else None,
    )


def _longest_run(
    question: str, pages: tuple[EvidencePage, ...], page: int, unit: int, score: float
) -> AnswerSpan | None:
    asked = set(WORD.findall(question.lower()))
    words = WORD.finditer(pages[page].units[unit].text)
    runs = [list(run) for new, run in itertools.groupby(words, lambda word: word[0].lower() not in asked) if new]
    if not runs:
        return None
    run = max(runs, key=len)
    return AnswerSpan(page=page, unit=unit, start=run[0].start(), end=run[-1].end(), score=score)


def _verdict(claim: str, pages: tuple[EvidencePage, ...]) -> Verdict:
    claimed, found = _subject_words(claim), _subject_words(" ".join(map(_text, pages)))
    share = len(claimed & found) / max(1, len(claimed))
    missing = claimed - found
    if missing and all(map(str.isdigit, missing)):
        return Verdict(supported=0.0, unknown=1 - share, contradicted=share)
    return Verdict(supported=share, unknown=1 - share, contradicted=0.0)


class FakeSubagent:
    """Follows a script for each attempt (the last one also for all later attempts): yields values, raises exceptions,
    waits for events. `stubborn` is how many cancellations it ignores. It accepts pushed payloads unchanged; if it
    `judges`, a payload's `decision` is its verdict."""

    def __init__(self, *attempts: Sequence[object], judges: bool = False, stubborn: int = 0) -> None:
        self.contexts: list[Context] = []
        self.closed = 0
        self._attempts = attempts or ((),)
        self._judges = judges
        self._stubborn = stubborn

    def convert(self, payload: bytes, status: SubagentStatus) -> Fragment:
        fragment = Fragment(status=status, payload=msgspec.Raw(payload))
        if not self._judges:
            return fragment
        try:
            decision = msgspec.json.decode(payload, type=dict[str, str])
        except msgspec.MsgspecError as error:
            raise InvalidQuestion("A verdict needs a decision.") from error
        verdict = VERDICTS.get(decision.get("decision", ""), "block")
        return msgspec.structs.replace(fragment, verdict=verdict, reason=decision.get("reason", ""))

    async def work(self, expected: Expected, directive: Directive, context: Context) -> AsyncGenerator[Fragment, None]:
        script = self._attempts[min(len(self.contexts), len(self._attempts) - 1)]
        self.contexts.append(context)
        try:
            for line in script:
                if isinstance(line, BaseException):
                    raise line
                if isinstance(line, asyncio.Event):
                    await self._wait(line)
                else:
                    yield cast("Fragment", line)  # a script may hold anything, like real subagents
        finally:
            self.closed += 1

    async def _wait(self, event: asyncio.Event) -> None:
        while True:
            try:
                await event.wait()
            except asyncio.CancelledError:
                if not self._stubborn:
                    raise
                self._stubborn -= 1
            else:
                return


class FakeSubagents:
    """Finds subagents by key; those that are missing count as disabled."""

    def __init__(self, subagents: Mapping[str, Subagent]) -> None:
        self._subagents = subagents

    def find(self, expected: Expected) -> Subagent | None:
        return self._subagents.get(expected.key)


class Crumbs:
    """Records breadcrumbs."""

    def __init__(self) -> None:
        self.dropped: list[Breadcrumb] = []

    def drop(self, crumb: Breadcrumb) -> None:
        self.dropped.append(crumb)


class ManualAlarm:
    def __init__(self, at: float, call: Callable[[], None]) -> None:
        self.at = at
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class ManualAlarms:
    """Timers that fire at their time when `advance` moves the clock."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self._count = itertools.count()
        self._set: list[tuple[float, int, ManualAlarm]] = []

    def later(self, seconds: float, call: Callable[[], None]) -> ManualAlarm:
        alarm = ManualAlarm(self._clock.monotonic() + seconds, call)
        heapq.heappush(self._set, (alarm.at, next(self._count), alarm))
        return alarm

    @property
    def pending(self) -> int:
        return sum(alarm.call is not None for _, _, alarm in self._set)

    def advance(self, seconds: float) -> None:
        until = self._clock.monotonic() + seconds
        while self._set and self._set[0][0] <= until:
            at, _, alarm = heapq.heappop(self._set)
            self._clock.advance(max(0.0, at - self._clock.monotonic()))
            if alarm.call is not None:
                alarm.call()
        self._clock.advance(until - self._clock.monotonic())
