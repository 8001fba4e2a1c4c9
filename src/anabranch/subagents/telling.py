"""How a question under way is told as a step's results: what is worth a revision, and when."""

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from anabranch.domain.contracts import Clock
from anabranch.domain.events import AnswerEvent, RetrievalFinished, RetrievalStarted, SourceReplied, Token
from anabranch.domain.model import Status
from anabranch.domain.steps import Fragment
from anabranch.subagents.payloads import Object, closed

PENDING = 256
EVERY_S = 0.1


class Mailbox:
    """What an Answerer emits and a generator has not taken yet; when it is full, the Answerer waits."""

    def __init__(self) -> None:
        self._events: deque[AnswerEvent] = deque()
        self._bell = asyncio.Event()
        self._room = asyncio.Event()
        self._closed = False

    @property
    def over(self) -> bool:
        return self._closed and not self._events

    async def put(self, event: AnswerEvent) -> None:
        while len(self._events) >= PENDING:
            self._room.clear()
            await self._room.wait()
        self._events.append(event)
        self._bell.set()

    def close(self, answering: "asyncio.Task[object]") -> None:
        if not answering.cancelled():
            answering.exception()  # whoever left does not ask for it
        self._closed = True
        self._bell.set()

    async def news(self, patience_s: float | None) -> Sequence[AnswerEvent]:
        """What has come since the last time; nothing, if nothing comes within that time or it is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._bell.wait()
        self._bell.clear()
        events = tuple(self._events)
        self._events.clear()
        self._room.set()
        return events


class Telling:
    """Each source's part as it comes, and the text so far, at most ten times a second."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sources: list[Object] = []
        self._found = 0
        self._text: list[str] = []
        self._waiting = False
        self._told = float("-inf")

    def heard(self, event: AnswerEvent) -> Fragment | None:
        match event:
            case RetrievalStarted():
                self._sources = [{"source": path, "status": "pending", "passages": 0} for path in event.sources]
                return self._retrieval()
            case SourceReplied(index=index, reply=reply) if index < len(self._sources):
                here = {"source": reply.path, "status": reply.status, "passages": len(reply.passages)}
                self._sources[index] = here
                self._found += len(reply.passages)
                return self._retrieval()
            case RetrievalFinished():
                self._found = event.passages
                return self._retrieval(finished=True)
            case Token() if event.text and not self._in_vain:
                self._text.append(event.text)
                self._waiting = True
                return None
            case _:
                return None

    @property
    def _in_vain(self) -> bool:
        """No source could be asked: what is said then is not the beginning of an answer."""
        return bool(self._sources) and all(one["status"] != Status.SUCCESS for one in self._sources)

    @property
    def patience_s(self) -> float | None:
        """How long the text that waits may still wait for more."""
        return max(0.0, self._told + EVERY_S - self._clock.monotonic()) if self._waiting else None

    def due(self) -> Fragment | None:
        now = self._clock.monotonic()
        if not self._waiting or now < self._told + EVERY_S:
            return None
        self._told, self._waiting = now, False
        self._text = ["".join(self._text)]
        return Fragment(status="partial", payload=closed({"stage": "generation", "answer": self._text[0]}))

    def _retrieval(self, *, finished: bool = False) -> Fragment:
        said = {"stage": "retrieval", "sources": self._sources, "passages": self._found, "finished": finished}
        return Fragment(status="in_progress", payload=closed(said))
