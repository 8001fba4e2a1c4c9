"""Fakes of the domain's contracts, for tests that need no network."""

# ruff: noqa: ARG002

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

from anabranch.domain.contracts import Attribute, Generator, Source
from anabranch.domain.errors import GenerationFailed
from anabranch.domain.events import AnswerEvent
from anabranch.domain.model import Context, Delta, Endpoint, Prompt, Query, Question, SourceReply, Usage
from anabranch.domain.signals import Signal


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
    """Yields the words as they are; `fail_after` is how many of them come before it fails."""

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
    """A Telemetry that keeps what it is told."""

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
    """Time that passes only when told to."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def monotonic(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds
