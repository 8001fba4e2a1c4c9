"""Resumable answers: a Run is recorded in the event log while it runs, and all clients read it there."""

import asyncio
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

from anabranch.domain.contracts import EventLog, Telemetry
from anabranch.domain.errors import AnabranchError, InternalError, LeaseLost, NotFound, StreamFull, StreamUnavailable
from anabranch.domain.eventlog import Entry, Page
from anabranch.domain.events import TERMINAL, AnswerEvent, Failed, Token
from anabranch.domain.model import Context, Value
from anabranch.eventlog.reader import StreamReader, StreamReaders
from anabranch.pipeline.run import Listener, Run

Frame = Callable[[AnswerEvent], bytes]

# Answers and planner steps share the log; the prefix keeps their names apart.
PREFIX = "answer:"
FRAME_END = b"\n\n"
# Entries reserved for the end of an answer.
RESERVE = 16
MAX_PAUSE_S = 2.0


class RecordingTiming(Value):
    """`rewrite_s`: pause before a failed write is tried again. `last_events_s`: time for that after the deadline, and
    for the ends of all Runs at shutdown."""

    rewrite_s: float = 0.5
    last_events_s: float = 5.0


class ResumableAnswers:
    """Records answers of this worker, and reads those of all workers."""

    def __init__(
        self,
        log: EventLog,
        *,
        telemetry: Telemetry,
        lease_s: float,
        max_events: int,
        max_bytes: int,
        readers: StreamReaders | None = None,
        timing: RecordingTiming = RecordingTiming(),
    ) -> None:
        self.log = log
        self.timing = timing
        self._readers = readers
        self.telemetry = telemetry
        self.renewal_s = lease_s / 3
        self.max_events = max_events
        self._max_bytes = max_bytes
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._runs: dict[str, Run] = {}

    async def record(
        self, run: Run, listener: Listener, frame: Frame, *, identity: str, about: bytes, context: Context
    ) -> str:
        """Start to record the listener's events; returns the id of the stream. From then on the recording owns the
        listener, and the Run continues if clients disconnect. StreamUnavailable or StreamFull if the log accepts no
        stream: then the caller still owns the listener."""
        # The id of some streams is all that a client needs to read the answer, so it must not be guessable.
        stream = secrets.token_urlsafe(24)
        token = await self.log.open(PREFIX + stream, identity=identity, about=about)
        recording = _Recording(self, run, listener, frame, context, stream=PREFIX + stream, token=token)
        self._tasks[stream] = task = asyncio.create_task(recording.main())
        self._runs[stream] = run
        task.add_done_callback(lambda _: (self._tasks.pop(stream), self._runs.pop(stream)))
        return stream

    def stop(self, stream: str, reason: AnabranchError) -> bool:
        """End the answer with an error, if this worker is recording it."""
        run = self._runs.get(stream)
        if run is not None:
            run.stop(reason)
        return run is not None

    def holds(self, stream: str) -> bool:
        """Whether this worker is recording it."""
        return stream in self._tasks

    def reader(self, stream: str, after: int, lost: Callable[[Page], Entry]) -> StreamReader:
        """A reader of a recording; `lost` makes the end of one whose worker is gone. The end of an answer has all of
        its sources and can be large, so the reader's cap is the size of a whole stream."""
        return StreamReader(
            self.log,
            PREFIX + stream,
            after,
            cap_bytes=self._max_bytes,
            lost=lost,
            held=partial(self.holds, stream),
            readers=self._readers,
        )

    async def settled(self, within_s: float | None = None) -> None:
        """Wait until the ends of all Runs are written, for a limited time."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(
            set(self._tasks.values()), timeout=self.timing.last_events_s if within_s is None else within_s
        )
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)


class _Recording:
    """Records one Run in its stream, from its first event to its end."""

    def __init__(
        self,
        answers: ResumableAnswers,
        run: Run,
        listener: Listener,
        frame: Frame,
        context: Context,
        *,
        stream: str,
        token: str,
    ) -> None:
        self._answers = answers
        self._run = run
        self._listener = listener
        self._frame = frame
        self._context = context
        self._stream = stream
        self._token = token
        self._written = 0

    async def main(self) -> None:
        async with self._listener:
            try:
                await self._write()
            except (LeaseLost, NotFound, StreamUnavailable) as error:
                # Another worker has ended the stream, or the log is unreachable: nobody could read the error.
                self._run.stop(error)
            except StreamFull as error:
                message = "The answer is longer than a resumable stream may be; ask again without `Prefer: resumable`."
                await self._break_off(StreamFull(message, **error.details))
            except Exception as error:  # noqa: BLE001  the task's boundary: it becomes the end of the stream
                self._answers.telemetry.crashed(error, self._context)
                message = "Something went wrong on our side; the log has the details under this correlation id."
                await self._break_off(InternalError(message, correlation_id=self._context.correlation_id))

    async def _write(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._answers.renewal_s):
                    events = await self._listener.ready()
            except TimeoutError:
                await self._append(())
                continue
            over = isinstance(events[-1], TERMINAL)
            frames = [frame for event in merged(events) for frame in split(self._frame(event))]
            entries = self._entries(frames, final=over)
            if entries:
                await self._append(entries)
            if over:
                return
            await asyncio.sleep(self._pause_s(len(entries)))

    async def _append(self, entries: Sequence[Entry]) -> None:
        """Retries while the log is unreachable, as long as there is time. The log ignores entries that it has
        already."""
        timing = self._answers.timing
        while True:
            try:
                await self._answers.log.append(self._stream, self._token, entries)
            except StreamUnavailable:
                if asyncio.get_running_loop().time() > self._context.deadline + timing.last_events_s:
                    raise
                await asyncio.sleep(timing.rewrite_s)
            else:
                self._written += len(entries)
                return

    def _entries(self, frames: Sequence[bytes], *, final: bool) -> list[Entry]:
        """One entry per frame; an end without a frame is an empty entry."""
        bodies = frames or [b""] * final
        return [
            Entry(key=str(self._written + number), revision=1, body=body, final=final and number == len(bodies) - 1)
            for number, body in enumerate(bodies)
        ]

    def _pause_s(self, written: int) -> float:
        """Once half of the stream is used, the rest must last until the deadline: tokens that arrive during a pause are
        written as one."""
        max_events = self._answers.max_events
        if self._written * 2 < max_events:
            return 0.0
        room = max(1, max_events - self._written - RESERVE)
        time_s = self._context.deadline - asyncio.get_running_loop().time()
        return min(max(0.0, time_s * written / room), self._answers.renewal_s, MAX_PAUSE_S)

    async def _break_off(self, error: AnabranchError) -> None:
        self._run.stop(error)
        with suppress(Exception):  # readers find an abandoned stream, and end it
            frames = split(self._frame(Failed(code=error.code, message=error.message, details=error.details)))
            await self._append(self._entries(list(frames), final=True))


def merged(events: Sequence[AnswerEvent]) -> Iterator[AnswerEvent]:
    """The events with consecutive tokens merged."""
    words: list[str] = []
    for event in events:
        if isinstance(event, Token):
            words.append(event.text)
            continue
        if words:
            yield Token(text="".join(words))
            words.clear()
        yield event
    if words:
        yield Token(text="".join(words))


def split(frames: bytes) -> Iterator[bytes]:
    """The single frames. Their data is JSON, which has no empty line."""
    start = 0
    while (end := frames.find(FRAME_END, start)) >= 0:
        yield frames[start : end + len(FRAME_END)]
        start = end + len(FRAME_END)
