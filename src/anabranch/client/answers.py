"""A client for resumable answers: it sends a question once and returns every event of the answer once."""

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

import msgspec

from anabranch.client.connection import Reconnect, StreamClient
from anabranch.client.events import AnswerFrame, Reset
from anabranch.domain.errors import FailureKind, UpstreamError
from anabranch.network.sse import Frame


class AnswerClient(StreamClient):
    """Use it as `async with`, or pass a session of your own and close that yourself."""

    async def follow(self, stream_id: str, *, after: int = 0) -> AsyncGenerator[AnswerFrame | Reset]:
        """Every event of an answer after the cursor exactly once, to its end, in the dialect of the question."""
        cursor = _AnswerCursor(after)
        reconnect = Reconnect(self._server.pace, eager=True)
        frames = reconnect.frames(lambda: self._listen(stream_id, cursor, reconnect))
        async with aclosing(cursor.read(frames)) as events:
            async for event in events:
                yield event

    async def ask_resumable(
        self, path: str, question: Mapping[str, Any], *, on_stream: Callable[[str], object] | None = None
    ) -> AsyncGenerator[AnswerFrame | Reset]:
        """Asks a question (`path` is a streaming surface, such as /api/v1/chat/stream) and follows the answer to its
        end. The question is sent once. `on_stream` is called with the stream id, for `follow` after a restart. If the
        server does not store the answer, there is no stream id, and a lost connection raises StreamUnavailable."""
        cursor = _AnswerCursor()
        reconnect = Reconnect(self._server.pace, eager=True)
        response = await self._server.ask(self._server.url(*path.strip("/").split("/")), question)
        stream_id = response.headers.get("Stream-Id")
        unread = [response]

        def connect() -> AsyncGenerator[Frame]:
            if unread:
                return self._server.answer(unread.pop(), reconnect, resumable=stream_id is not None)
            return self._listen(stream_id or "", cursor, reconnect)

        async with response, aclosing(cursor.read(reconnect.frames(connect))) as events:
            if stream_id is not None and on_stream is not None:
                on_stream(stream_id)
            async for event in events:
                yield event

    def _listen(self, stream_id: str, cursor: "_AnswerCursor", reconnect: Reconnect) -> AsyncGenerator[Frame]:
        return self._server.listen(self._server.url("v1", "streams", stream_id), cursor.sequence, reconnect)


class _AnswerCursor:
    """The client's position in an answer."""

    def __init__(self, sequence: int = 0) -> None:
        self.sequence = sequence

    async def read(self, frames: AsyncGenerator[Frame]) -> AsyncGenerator[AnswerFrame | Reset]:
        """The events that the client has not had yet, up to the one that ends the answer."""
        async with aclosing(frames):
            async for frame in frames:
                event = self._advance(frame)
                if event is not None:
                    yield event
                if isinstance(event, AnswerFrame) and event.ends_answer:
                    return

    def _advance(self, frame: Frame) -> AnswerFrame | Reset | None:
        if frame.id is None:
            return self._reset(frame) if frame.event == "reset" else AnswerFrame(event=frame.event, data=frame.data)
        if not (frame.id.isascii() and frame.id.isdigit()):
            raise UpstreamError("The server sent an event whose id is not a number.", FailureKind.UNUSABLE)
        if int(frame.id) <= self.sequence:
            return None
        self.sequence = int(frame.id)
        return AnswerFrame(event=frame.event, data=frame.data, id=self.sequence)

    def _reset(self, frame: Frame) -> Reset:
        self.sequence = 0
        try:
            return msgspec.json.decode(frame.data, type=Reset)
        except msgspec.DecodeError:
            return Reset()
