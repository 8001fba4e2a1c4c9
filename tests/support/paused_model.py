"""A model server in OpenAI's format that pauses in the middle of an answer until the test lets it go on."""

import asyncio

from aiohttp import web

from anabranch.testing.http_server import HttpServer
from anabranch.testing.model import DONE, event, open_stream


class PausedModel(HttpServer):
    """Says `first`, waits for `go`, then says `rest`; `asked` are the bodies of the requests."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.first, self.rest = "", ""
        self.go = asyncio.Event()
        self.asked: list[str] = []

    def says(self, first: str, rest: str = "", *, paused: bool = False) -> None:
        self.first, self.rest = first, rest
        self.go.clear()
        if not paused:
            self.go.set()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.asked.append((await request.content.read()).decode())
        response = await open_stream(request)
        await response.write(_part(self.first))
        await self.go.wait()
        if self.rest:
            await response.write(_part(self.rest))
        await response.write(event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}))
        await response.write(DONE)
        return response


def _part(text: str) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]})
