"""Resumable answers: a Run is written into the log as it goes, and everybody who wants to hear it reads it there."""

import asyncio
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from anabranch.domain.contracts import EventLog, Telemetry
from anabranch.domain.errors import AnabranchError, InternalError, LeaseLost, NotFound, StreamFull, StreamUnavailable
from anabranch.domain.eventlog import Entry, Page
from anabranch.domain.events import TERMINAL, AnswerEvent, Failed, Token
from anabranch.domain.model import Context
from anabranch.eventlog.reader import StreamReader, StreamReaders
from anabranch.pipeline.run import Listener, Run

Frame = Callable[[AnswerEvent], bytes]

# Whoever knows an id may, of some streams, read the answer.
ID_BYTES = 24
# Answers and planner steps are in one log; nobody must reach one under the name of the other.
PREFIX = "answer:"
FRAME_END = b"\n\n"
# Room that stays for what can come at the end beside words.
RESERVE = 16
MOST_PAUSE_S = 2.0
AGAIN_S = 0.5
LAST_WORDS_S = 5.0
TOO_LONG = "The answer is longer than what is kept of a resumable stream; ask again without `Prefer: resumable`."


class ResumableAnswers:
    """The answers that are being recorded here, and the way to those that are or were recorded anywhere."""

    def __init__(
        self,
        log: EventLog,
        *,
        telemetry: Telemetry,
        lease_s: float,
        max_events: int,
        max_bytes: int,
        readers: StreamReaders | None = None,
    ) -> None:
        self.log = log
        self._readers = readers
        self._telemetry = telemetry
        self._renewal_s = lease_s / 3
        self._max_events = max_events
        self._max_bytes = max_bytes
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def record(
        self, run: Run, listener: Listener, frame: Frame, *, identity: str, about: bytes, context: Context
    ) -> str:
        """Begin to record what the listener hears; from then on it is ours, and the Run goes on whoever leaves. The id
        under which it can be read. StreamUnavailable or StreamFull if the log takes no stream: then nothing has
        happened, and the listener is still the caller's."""
        stream = secrets.token_urlsafe(ID_BYTES)
        token = await self.log.open(PREFIX + stream, identity=identity, about=about)
        recording = _Recording(
            run=run,
            listener=listener,
            frame=frame,
            context=context,
            tape=_Tape(self.log, PREFIX + stream, token, context.deadline + LAST_WORDS_S),
            telemetry=self._telemetry,
            renewal_s=self._renewal_s,
            max_events=self._max_events,
        )
        self._tasks[stream] = task = asyncio.create_task(recording.main())
        task.add_done_callback(lambda _: self._tasks.pop(stream))
        return stream

    def holds(self, stream: str) -> bool:
        """Whether it is being recorded here: then it ends when this process does, at the latest."""
        return stream in self._tasks

    def reader(self, stream: str, after: int, lost: Callable[[Page], Entry]) -> StreamReader:
        """One who reads a recording; `lost` writes the end of one whose worker is gone. An answer's end has all of its
        sources and can be large: who was level with it must not be cut off for that, so all of a stream is allowed."""
        return StreamReader(
            self.log, PREFIX + stream, after, cap_bytes=self._max_bytes, lost=lost, readers=self._readers
        )

    async def settled(self, within_s: float = LAST_WORDS_S) -> None:
        """The Runs are over: wait until their ends are written. What the log does not take by then is lost."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(set(self._tasks.values()), timeout=within_s)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)


class _Tape:
    """A stream in the log, as its one writer has it."""

    def __init__(self, log: EventLog, stream: str, token: str, until: float) -> None:
        self._log = log
        self._stream = stream
        self._token = token
        self._until = until
        self.written = 0

    async def append(self, entries: Sequence[Entry]) -> None:
        """A log that is out of reach is tried again, for as long as there is time: what it has taken already, it takes
        no second time."""
        while True:
            try:
                await self._log.append(self._stream, self._token, entries)
            except StreamUnavailable:
                if asyncio.get_running_loop().time() > self._until:
                    raise
                await asyncio.sleep(AGAIN_S)
            else:
                self.written += len(entries)
                return

    def entries(self, frames: Sequence[bytes], *, final: bool) -> list[Entry]:
        """One for each frame. An end without a frame is an end all the same."""
        bodies = frames or [b""] * final
        last = len(bodies) - 1
        return [
            Entry(key=str(self.written + number), revision=1, body=body, final=final and number == last)
            for number, body in enumerate(bodies)
        ]


class _Recording:
    """Writes down one Run, from its first event to its end."""

    def __init__(
        self,
        *,
        run: Run,
        listener: Listener,
        frame: Frame,
        context: Context,
        tape: _Tape,
        telemetry: Telemetry,
        renewal_s: float,
        max_events: int,
    ) -> None:
        self._run = run
        self._listener = listener
        self._frame = frame
        self._context = context
        self._tape = tape
        self._telemetry = telemetry
        self._renewal_s = renewal_s
        self._max_events = max_events

    async def main(self) -> None:
        async with self._listener:
            try:
                await self._write()
            except (LeaseLost, NotFound, StreamUnavailable) as error:
                # Others have ended the stream, or nobody can reach it: there is no one left to whom it could be said.
                self._run.stop(error)
            except StreamFull as error:
                await self._break_off(StreamFull(TOO_LONG, **error.details))
            except Exception as error:  # noqa: BLE001  the task's boundary: it becomes the end of the stream
                self._telemetry.crashed(error, self._context)
                await self._break_off(_internal(self._context))

    async def _write(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._renewal_s):
                    events = await self._listener.ready()
            except TimeoutError:
                await self._tape.append(())
                continue
            over = isinstance(events[-1], TERMINAL)
            frames = [frame for event in merged(events) for frame in split(self._frame(event))]
            entries = self._tape.entries(frames, final=over)
            if entries:
                await self._tape.append(entries)
            if over:
                return
            await asyncio.sleep(self._pause_s(len(entries)))

    def _pause_s(self, written: int) -> float:
        """Once half of the stream is used up, the rest must last until the deadline: words that come during a pause
        are written as one."""
        if self._tape.written * 2 < self._max_events:
            return 0.0
        room = max(1, self._max_events - self._tape.written - RESERVE)
        time_s = self._context.deadline - asyncio.get_running_loop().time()
        return min(max(0.0, time_s * written / room), self._renewal_s, MOST_PAUSE_S)

    async def _break_off(self, error: AnabranchError) -> None:
        self._run.stop(error)
        with suppress(Exception):  # whoever reads will find a stream that nobody keeps, and end it
            frames = split(self._frame(Failed(code=error.code, message=error.message, details=error.details)))
            await self._tape.append(self._tape.entries(list(frames), final=True))


def merged(events: Sequence[AnswerEvent]) -> Iterator[AnswerEvent]:
    """Words that are there together, as one."""
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
    """One by one. Their data is JSON, which has no empty line."""
    start = 0
    while (end := frames.find(FRAME_END, start)) >= 0:
        yield frames[start : end + len(FRAME_END)]
        start = end + len(FRAME_END)


def _internal(context: Context) -> InternalError:
    message = "Something went wrong on our side; the log has the details under this correlation id."
    return InternalError(message, correlation_id=context.correlation_id)
