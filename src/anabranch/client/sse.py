"""Reading server-sent events as a browser does: whole events only, whatever pieces the bytes arrive in."""

from anabranch.domain.errors import Trouble, UpstreamError
from anabranch.domain.model import Value

# Five events of half a megabyte each fit, with room to spare.
MAX_EVENT_BYTES = 8 * 1024 * 1024
BOM = b"\xef\xbb\xbf"


class Frame(Value, gc=False):
    """One event as it came. `id` is None if the event had none of its own."""

    event: str
    data: str
    id: str | None = None


class FrameParser:
    """Takes bytes, gives frames. An event that was cut off before its blank line never was one: whoever comes back
    with the cursor gets it again, whole."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self.retry_ms: int | None = None
        self._max_bytes = max_event_bytes
        self._head: bytes | None = b""
        self._pending = bytearray()
        self._after_return = False
        self._event = ""
        self._data: list[str] = []
        self._id: str | None = None
        self._size = 0

    def feed(self, chunk: bytes) -> list[Frame]:
        if self._head is not None:
            chunk = self._without_mark(chunk)
        if not chunk:
            return []
        # A carriage return ends a line at once; the line feed that comes with the next piece belongs to it.
        fresh = chunk[1:] if self._after_return and chunk.startswith(b"\n") else chunk
        self._after_return = chunk.endswith(b"\r")
        *ends, rest = fresh.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        frames = []
        for end in ends:
            line = bytes(self._pending) + end if self._pending else end
            self._pending.clear()
            # Comments are not kept, however many there are.
            self._grow(0 if line.startswith(b":") else len(line))
            frame = self._line(line)
            if frame is not None:
                frames.append(frame)
        self._pending += rest
        self._grow(0)
        return frames

    def _without_mark(self, chunk: bytes) -> bytes:
        """The first bytes of a stream, once it is clear whether they are a byte order mark."""
        head = (self._head or b"") + chunk
        if len(head) < len(BOM) and BOM.startswith(head):
            self._head = head
            return b""
        self._head = None
        return head.removeprefix(BOM)

    def _grow(self, size: int) -> None:
        self._size += size
        if self._size + len(self._pending) > self._max_bytes:
            raise UpstreamError("The stream holds an event that is too long.", Trouble.UNUSABLE)

    def _line(self, line: bytes) -> Frame | None:
        if not line:
            return self._dispatched()
        field, _, value = line.partition(b":")
        text = value.removeprefix(b" ").decode(errors="replace")
        match field:
            case b"data":
                self._data.append(text)
            case b"event":
                self._event = text
            case b"id" if "\0" not in text:
                self._id = text
            case b"retry" if text.isascii() and text.isdigit() and len(text) < 10:
                self.retry_ms = int(text)
            case _:
                pass
        return None

    def _dispatched(self) -> Frame | None:
        frame = Frame(event=self._event or "message", data="\n".join(self._data), id=self._id) if self._data else None
        self._event, self._data, self._id, self._size = "", [], None, 0
        return frame
