"""Server-sent events: a parser that accepts the bytes in whatever pieces they arrive."""

import asyncio
from collections.abc import AsyncIterator

from anabranch.domain.errors import FailureKind, UpstreamError
from anabranch.domain.model import Value

MAX_EVENT_BYTES = 1024 * 1024
# So much may hold a thousand events. After it, others have their turn.
PIECE_BYTES = 8 * 1024
BOM = b"\xef\xbb\xbf"


class Frame(Value, gc=False):
    """One event. `id` is None if the event has none of its own."""

    event: str
    data: str
    id: str | None = None


class FrameParser:
    """Parses bytes into frames. It never returns an event that was cut off before its blank line."""

    def __init__(self, max_event_bytes: int) -> None:
        self.retry_ms: int | None = None
        self._max_bytes = max_event_bytes
        self._is_first_line = True
        self._pending = bytearray()
        self._after_return = False
        self._event = ""
        self._data: list[str] = []
        self._id: str | None = None
        self._size = 0

    def feed(self, chunk: bytes) -> list[Frame]:
        if not chunk:
            return []
        # A carriage return ends a line at once. A line feed at the start of the next chunk belongs to it.
        fresh = chunk[1:] if self._after_return and chunk.startswith(b"\n") else chunk
        self._after_return = chunk.endswith(b"\r")
        *ends, rest = fresh.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        frames = []
        for end in ends:
            line = bytes(self._pending) + end if self._pending else end
            self._pending.clear()
            if self._is_first_line:
                line, self._is_first_line = line.removeprefix(BOM), False
            if line:
                self._field(line)
                continue
            self._check_size()
            if self._data:
                frames.append(Frame(event=self._event or "message", data="\n".join(self._data), id=self._id))
            self._event, self._data, self._id, self._size = "", [], None, 0
        self._pending += rest
        self._check_size()
        return frames

    def _field(self, line: bytes) -> None:
        field, _, value = line.partition(b":")
        if not field:
            return  # a comment, which is not kept
        self._size += len(line)
        text = value.removeprefix(b" ").decode(errors="replace")
        if field == b"data":
            self._data.append(text)
        elif field == b"event":
            self._event = text
        elif field == b"id" and "\0" not in text:
            self._id = text
        elif field == b"retry" and text.isascii() and text.isdigit() and len(text) < 10:
            self.retry_ms = int(text)

    def _check_size(self) -> None:
        if self._size + len(self._pending) > self._max_bytes:
            raise UpstreamError("The stream holds an event that is too long.", FailureKind.UNUSABLE)


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The `data` of each event, its lines joined. The last event counts even without its blank line."""
    parser = FrameParser(MAX_EVENT_BYTES)
    async for chunk in chunks:
        for start in range(0, len(chunk), PIECE_BYTES):
            for frame in parser.feed(chunk[start : start + PIECE_BYTES]):
                yield frame.data
            if len(chunk) > PIECE_BYTES:
                await asyncio.sleep(0)
    for frame in parser.feed(b"\n\n"):
        yield frame.data
