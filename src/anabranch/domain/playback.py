"""The contracts of a Run, implemented by a recording: a Directory, a Clock, an Evidence and a ClaimChecker without a
network."""

# ruff: noqa: ARG002

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Hashable, Sequence
from contextlib import aclosing
from functools import partial
from itertools import pairwise
from typing import NoReturn

import msgspec

from anabranch.domain.contracts import Generator
from anabranch.domain.errors import NotRecorded
from anabranch.domain.events import Failed, SourceReplied
from anabranch.domain.evidence import EvidencePage, Reading, Verdict
from anabranch.domain.model import Context, Delta, Endpoint, Prompt, Query, SourceReply
from anabranch.domain.recording import EvidenceCall, ModelCall, RecordedCall, RecordedPrompt, Recording, SourceCall

# The errors of a Run that was stopped from outside. Other errors come from a stage, and come again.
STOPPED = (
    "cancelled",
    "deadline_exceeded",
    "shutting_down",
    "unauthorized",
    "stream_full",
    "streams_full",
    "stream_unavailable",
    "worker_lost",
)
# A stage that emits an event takes less.
PATIENCE_S = 3.0
Pages = tuple[EvidencePage, ...]


class Interruption:
    """The point where a recorded Run was stopped. A replay waits there; `reached` says that it does."""

    def __init__(self, end: object) -> None:
        self.reached = asyncio.Event()
        self.stopped = isinstance(end, Failed) and end.code in STOPPED

    async def wait(self) -> NoReturn:
        if not self.stopped:
            raise NotRecorded("The replay makes a call that is not in the recording.")
        self.reached.set()
        await asyncio.get_running_loop().create_future()
        raise AssertionError


class EventOrder:
    """Holds back a recorded result until the events are emitted that came before it. If they do not come, the replay
    differs from the recording, and nothing is held back any more."""

    def __init__(self) -> None:
        self._emitted = 0
        self._waiting: list[asyncio.Future[None]] = []
        self._lost = False

    def happened(self) -> None:
        """An event is emitted."""
        self._emitted += 1
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
        self._waiting.clear()

    async def reached(self, events: int) -> None:
        while self._emitted < events and not self._lost:
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            done, _ = await asyncio.wait([waiter], timeout=PATIENCE_S)
            if not done:
                self._lost = True


def failure(call: RecordedCall) -> BaseException:
    """What a call that did not return raises."""
    if call.error is not None:
        return call.error.error()
    return TimeoutError() if call.ended == "cancelled" else RuntimeError("The recorded call crashed.")


class RecordedClock:
    """Returns the recorded readings to each task; tasks are known by the order in which they first read the clock.
    After the last one, time stands still."""

    def __init__(self, recording: Recording) -> None:
        readings = recording.clock
        self._readings = [deque(own) for own in readings]
        self._tasks: dict[asyncio.Task[object] | None, int] = {}
        self._last = readings[0][0] if readings and readings[0] else 0.0

    def monotonic(self) -> float:
        number = self._tasks.setdefault(asyncio.current_task(), len(self._tasks))
        if number < len(self._readings) and self._readings[number]:
            self._last = self._readings[number].popleft()
        return self._last


class RecordedEvidence:
    """Returns the recorded results, also for an input that is read together with others than before. An input without
    a result is not read; `unread` counts those."""

    def __init__(
        self, recording: Recording, interruption: Interruption | None = None, order: EventOrder | None = None
    ) -> None:
        self.unread = 0
        self._order = order
        self._interruption = interruption or Interruption(recording.end)
        self._results: dict[Hashable, deque[tuple[int, Reading | Verdict | None]]] = {}
        self._failed: dict[Hashable, EvidenceCall] = {}
        for call in recording.evidence_calls:
            if call.ended != "returned":
                self._failed[call.task, call.text, call.inputs] = call
            if not call.inputs:
                self._results.setdefault((call.task, call.text, ()), deque()).append((call.after_events, None))
            for pages, result in zip(call.inputs, (*call.readings, *call.verdicts), strict=False):
                self._results.setdefault((call.task, call.text, pages), deque()).append((call.after_events, result))

    async def read(
        self, question: str, inputs: Sequence[Pages], *, until: float | None = None
    ) -> Sequence[Reading | None]:
        found = await self._found("read", question, inputs)
        return [one if isinstance(one, Reading) else None for one in found]

    async def check(
        self, claim: str, inputs: Sequence[Pages], *, until: float | None = None
    ) -> Sequence[Verdict | None]:
        found = await self._found("check", claim, inputs)
        return [one if isinstance(one, Verdict) else None for one in found]

    async def _found(self, task: str, text: str, inputs: Sequence[Pages]) -> list[Reading | Verdict | None]:
        if (call := self._failed.get((task, text, tuple(inputs)))) is not None:
            if call.ended == "cancelled" and self._interruption.stopped:
                await self._interruption.wait()
            if self._order is not None:
                await self._order.reached(call.after_events)
            raise failure(call)
        # A call without inputs has no result, but its time.
        found = [self._result((task, text, pages)) for pages in inputs or [()]]
        if self._order is not None:
            await self._order.reached(max(after for after, _ in found))
        return [result for _, result in found][: len(inputs)]

    def _result(self, key: Hashable) -> tuple[int, Reading | Verdict | None]:
        results = self._results.get(key)
        if results is None:
            self.unread += 1
            return 0, None
        return results.popleft() if len(results) > 1 else results[0]


class RecordedSource:
    """Replies as the recorded source did, after those that replied before it."""

    def __init__(
        self,
        call: SourceCall | None,
        before: asyncio.Event | None,
        done: asyncio.Event,
        interruption: Interruption,
    ) -> None:
        self._call = call
        self._before = before
        self._done = done
        self._interruption = interruption

    async def search(self, query: Query, context: Context) -> SourceReply:
        if self._before is not None:
            await self._before.wait()
        self._done.set()
        if self._call is None:
            await self._interruption.wait()
        reply = self._call.reply
        if reply is None:
            raise failure(self._call)
        return msgspec.structs.replace(reply, passages=reply.passages[: max(0, query.limit)])


class RecordedModel:
    """Streams what the recorded model wrote."""

    def __init__(
        self,
        find: Callable[[Prompt], ModelCall | Generator | None],
        interruption: Interruption,
        order: EventOrder | None = None,
    ) -> None:
        self._find = find
        self._interruption = interruption
        self._order = order

    async def generate(self, prompt: Prompt, context: Context) -> AsyncGenerator[Delta, None]:
        call = self._find(prompt)
        if call is None:
            await self._interruption.wait()
        if not isinstance(call, ModelCall):
            async with aclosing(call.generate(prompt, context)) as deltas:
                async for delta in deltas:
                    yield delta
            return
        for timed in call.stream:
            await self._reached(timed.after_events)
            yield timed.delta
        await self._reached(call.after_events)
        if call.ended == "cancelled" and self._interruption.stopped:
            await self._interruption.wait()
        if call.ended != "returned":
            raise failure(call)

    async def _reached(self, events: int) -> None:
        if self._order is not None:
            await self._order.reached(events)


class RecordedDirectory:
    """The sources and models of a recording. A model's n-th call gets what its n-th call got. If `asked` has the
    prompts of such a replay, a prompt gets what the model wrote for the equal one. `otherwise` has the models that
    answer again. `prompts` are those that models were asked with."""

    def __init__(
        self,
        recording: Recording,
        *,
        asked: Sequence[tuple[Endpoint, Prompt]] | None = None,
        otherwise: Callable[[Endpoint], Generator | None] = lambda _: None,
        interruption: Interruption | None = None,
        order: EventOrder | None = None,
    ) -> None:
        self._order = order
        events = list(recording.decoded_events())
        replied = {event.index for event in events if isinstance(event, SourceReplied)}
        self.interruption = interruption or Interruption(events[-1])
        self.prompts: list[tuple[Endpoint, Prompt]] = []
        self._otherwise = otherwise
        self._model_calls = list(recording.model_calls)
        self._answers = (
            None
            if asked is None
            else [(endpoint.path, RecordedPrompt.of(prompt), self._next(endpoint.path)) for endpoint, prompt in asked]
        )
        # A call that was cancelled without a reply was still running when the Run was stopped.
        calls = [call for call in recording.source_calls if call.ended != "cancelled" or call.index in replied]
        self._source_calls = {call.index: call for call in calls}
        self._done = [asyncio.Event() for _ in recording.question.sources]
        self._before = {call.index: self._done[before.index] for before, call in pairwise(calls)}
        self._sources = 0

    def source(self, endpoint: Endpoint) -> RecordedSource:
        """The source of an endpoint; call it for the question's endpoints in their order."""
        index, self._sources = self._sources, self._sources + 1
        call = self._source_calls.get(index)
        before = self._before.get(index)
        if call is None and self._source_calls:  # it waits until all others have replied
            before = self._done[list(self._source_calls)[-1]]
        return RecordedSource(call, before, self._done[index], self.interruption)

    def generator(self, endpoint: Endpoint, *, retried: bool = True) -> RecordedModel:
        return RecordedModel(partial(self._found, endpoint), self.interruption, self._order)

    def _found(self, endpoint: Endpoint, asked: Prompt) -> ModelCall | Generator | None:
        self.prompts.append((endpoint, asked))
        call = self._otherwise(endpoint) or self._recorded(endpoint.path, RecordedPrompt.of(asked))
        if call is None and not self.interruption.stopped:
            raise NotRecorded(
                f"The recording does not have what {endpoint.path} would write for this prompt, which differs from the "
                "recorded one."
            )
        return call

    def _recorded(self, model: str, prompt: RecordedPrompt) -> ModelCall | None:
        if self._answers is None:
            return self._next(model)
        return next((call for path, asked, call in self._answers if (path, asked) == (model, prompt)), None)

    def _next(self, model: str) -> ModelCall | None:
        for index, call in enumerate(self._model_calls):
            if call.model == model:
                return self._model_calls.pop(index)
        return None
