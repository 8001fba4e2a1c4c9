"""The Run: one supervised execution of a question, its listeners, and its single end."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Self

from anabranch.domain.contracts import Answerer, Clock, Span, SystemClock, Telemetry
from anabranch.domain.errors import OUT_OF_TIME, AnabranchError, Cancelled, DeadlineExceeded, InternalError
from anabranch.domain.events import TERMINAL, Answered, AnswerEvent, Failed
from anabranch.domain.model import Answer, Context, Question

PENDING_EVENTS = 256
SYSTEM_CLOCK = SystemClock()


class Listener:
    """One reader of a Run, with a bounded queue: a slow reader delays the Run and does not grow memory."""

    __slots__ = ("_events", "_leave", "_ready", "_room")

    def __init__(self, leave: Callable[["Listener"], None]) -> None:
        self._events: deque[AnswerEvent] = deque()
        self._leave = leave
        self._ready: asyncio.Future[None] | None = None
        self._room = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._leave(self)

    def put(self, event: AnswerEvent) -> None:
        self._events.append(event)
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(None)

    @property
    def full(self) -> bool:
        return len(self._events) >= PENDING_EVENTS

    async def room(self) -> None:
        while self.full:
            self._room.clear()
            await self._room.wait()

    def release(self) -> None:
        """Wake the emitters that wait for room: the reader has left."""
        self._events.clear()
        self._room.set()

    async def ready(self) -> list[AnswerEvent]:
        """All events since the last call; waits for the first."""
        while not self._events:
            self._ready = asyncio.get_running_loop().create_future()
            await self._ready
        events = list(self._events)
        self._events.clear()
        self._room.set()
        return events

    async def __aiter__(self) -> AsyncIterator[AnswerEvent]:
        while True:
            for event in await self.ready():
                yield event
                if isinstance(event, TERMINAL):
                    return


class Run:
    """Owns one execution. It ends in exactly one terminal event, whatever happens inside, and is cancelled, with
    everything upstream of it, when its last listener leaves."""

    def __init__(
        self,
        answerer: Answerer,
        question: Question,
        context: Context,
        telemetry: Telemetry,
        ended: Callable[["Run"], None] | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._clock = clock
        self._answerer = answerer
        self._question = question
        self._context = context
        self._telemetry = telemetry
        self._ended = ended
        self._listeners: set[Listener] = set()
        self._waiting = 0
        self._began = 0.0
        self._stop_reason: AnabranchError | None = None
        self._outcome: Answer | AnabranchError | None = None
        self._end: Answered | Failed | None = None
        self._asked = False
        self._over = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> Self:
        self._began = self._clock.monotonic()
        self._task = asyncio.create_task(self._main())
        self._task.add_done_callback(self._settle)
        return self

    def listen(self) -> Listener:
        """A listener for the events from now on: all of them if attached before the loop turns after `start`. After the
        end it still gets the terminal event."""
        listener = Listener(self._leave)
        self._listeners.add(listener)
        if self._end is not None:
            listener.put(self._end)
        return listener

    async def value(self) -> Answer:
        """The answer; raises the error if there is none."""
        assert self._task is not None, "a Run must be started first"
        self._waiting += 1
        try:
            await self._over.wait()
        finally:
            self._waiting -= 1
            self._abandon_if_alone()
        if isinstance(self._outcome, Answer):
            return self._outcome
        raise self._outcome or InternalError("The run ended without an outcome.")

    def stop(self, reason: AnabranchError) -> None:
        """Cancel it; its listeners get `reason` as the terminal event."""
        if self._task is not None and not self._task.done() and self._stop_reason is None:
            self._stop_reason = reason
            self._task.cancel()

    def _leave(self, listener: Listener) -> None:
        self._listeners.discard(listener)
        listener.release()
        self._abandon_if_alone()

    def _abandon_if_alone(self) -> None:
        if not self._listeners and not self._waiting and self._end is None:
            self.stop(Cancelled("All listeners have left."))

    async def _emit(self, event: AnswerEvent) -> None:
        for listener in tuple(self._listeners):
            if listener.full:
                await listener.room()
            listener.put(event)

    async def _main(self) -> None:
        with self._telemetry.span("question", self._context, **{"anabranch.surface": self._context.surface}) as span:
            self._context = span.context
            self._report_start()
            self._finish(await self._terminal_event(span))

    async def _terminal_event(self, span: Span) -> Answered | Failed:
        end: Answered | Failed
        try:
            self._outcome = await self._answer_in_time()
            end = Answered(answer=self._outcome)
        except asyncio.CancelledError:
            end = self._fail(self._stop_reason or Cancelled("The run was cancelled."))
        except AnabranchError as error:
            end = self._fail(error)
        except Exception as error:  # noqa: BLE001  task boundary: it becomes the terminal event
            self._telemetry.crashed(error, self._context)
            end = self._fail(_internal(self._context))
        if isinstance(end, Failed):
            span.set("error.type", end.code)
        return end

    def _report_start(self) -> None:
        self._asked = True
        self._telemetry.asked(self._question, self._context)

    def _finish(self, end: Answered | Failed) -> None:
        self._end = end
        self._telemetry.happened(end, self._context)
        for listener in self._listeners:
            listener.put(end)

    def _settle(self, _task: asyncio.Task[None]) -> None:
        """The task is over. If it was cancelled before its first step, it has not reported anything yet."""
        if self._end is None:
            if not self._asked:
                self._report_start()
            self._finish(self._fail(self._stop_reason or Cancelled("The run was cancelled.")))
        self._over.set()
        if self._ended is not None:
            self._ended(self)

    async def _answer_in_time(self) -> Answer:
        limit = asyncio.timeout_at(self._context.deadline)
        try:
            async with limit:
                return await self._answerer.answer(self._question, self._context, self._emit)
        except TimeoutError:
            if limit.expired():
                raise DeadlineExceeded(OUT_OF_TIME) from None
            raise

    def _fail(self, error: AnabranchError) -> Failed:
        self._outcome = error
        time_ms = round((self._clock.monotonic() - self._began) * 1000)
        return Failed(code=error.code, message=error.message, details=error.details, time_ms=time_ms)


def _internal(context: Context) -> InternalError:
    message = "Something went wrong on our side; the log has the details under this correlation id."
    return InternalError(message, correlation_id=context.correlation_id)
