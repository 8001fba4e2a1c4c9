"""Answers that survive a cut: ask once, and hear every word once."""

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any, Self

import aiohttp
import msgspec

from anabranch.client.connection import ServerConnection
from anabranch.client.events import AnswerFrame, Reset
from anabranch.client.reconnect import Pace, Reconnect, again
from anabranch.client.sse import Frame
from anabranch.domain.errors import Trouble, UpstreamError


class AnswerClient:
    """Use it as `async with`, or give it a session of your own and close that yourself."""

    def __init__(
        self,
        base_url: str,
        key: str | None = None,
        *,
        session: aiohttp.ClientSession | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._wire = ServerConnection(base_url, key, session, pace or Pace())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._wire.close()

    async def follow(self, stream_id: str, *, after: int = 0) -> AsyncGenerator[AnswerFrame | Reset]:
        """Every event of an answer behind the cursor exactly once, to its end, in the dialect it was asked in."""
        trail = _Trail(after)
        comeback = Reconnect(self._wire.pace, eager=True)
        async with aclosing(again(lambda: self._behind(stream_id, trail, comeback), comeback)) as frames:
            async for frame in frames:
                if (heard := trail.fresh(frame)) is not None:
                    yield heard
                    if isinstance(heard, AnswerFrame) and heard.ends_answer:
                        return

    async def ask_resumable(
        self, path: str, question: Mapping[str, Any], *, on_stream: Callable[[str], object] | None = None
    ) -> AsyncGenerator[AnswerFrame | Reset]:
        """Asks (`path` is that of a streaming surface, such as /api/v1/chat/stream) and follows the answer to its end.
        The question is sent once. `on_stream` gets the stream's id, for `follow` after a restart. Where the server does
        not keep the answer there is none, and a cut is the end: StreamUnavailable."""
        trail = _Trail()
        comeback = Reconnect(self._wire.pace, eager=True)
        response = await self._wire.asked(self._wire.address(*path.strip("/").split("/")), question)
        stream_id = response.headers.get("Stream-Id")
        unheard = [response]

        def connect() -> AsyncGenerator[Frame]:
            if unheard:
                return self._wire.answered(unheard.pop(), comeback, kept=stream_id is not None)
            return self._behind(stream_id or "", trail, comeback)

        async with response, aclosing(again(connect, comeback)) as frames:
            if stream_id is not None and on_stream is not None:
                on_stream(stream_id)
            async for frame in frames:
                if (heard := trail.fresh(frame)) is not None:
                    yield heard
                    if isinstance(heard, AnswerFrame) and heard.ends_answer:
                        return

    def _behind(self, stream_id: str, trail: "_Trail", comeback: Reconnect) -> AsyncGenerator[Frame]:
        return self._wire.listen(self._wire.address("v1", "streams", stream_id), trail.sequence, comeback)


class _Trail:
    """How far an answer has been heard."""

    def __init__(self, sequence: int = 0) -> None:
        self.sequence = sequence

    def fresh(self, frame: Frame) -> AnswerFrame | Reset | None:
        if frame.id is None:
            return self._reset(frame) if frame.event == "reset" else AnswerFrame(event=frame.event, data=frame.data)
        if not (frame.id.isascii() and frame.id.isdigit()):
            raise UpstreamError("The server sent an event whose id is no number.", Trouble.UNUSABLE)
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
