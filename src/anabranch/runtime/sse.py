"""Reading server-sent events: the data of each, whatever pieces the bytes arrive in."""

from collections.abc import AsyncIterator

from anabranch.domain.errors import UpstreamError

MAX_EVENT_BYTES = 1024 * 1024


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The `data` of each event, its lines joined. A last event without its blank line counts too."""
    pending = b""
    data: list[str] = []
    size = 0
    async for chunk in chunks:
        *lines, pending = _lines(pending + chunk)
        for line in lines:
            size += len(line)
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" ").decode(errors="replace"))
            elif not line and data:
                yield "\n".join(data)
                data, size = [], 0
        if size + len(pending) > MAX_EVENT_BYTES:
            raise UpstreamError("The stream holds an event that is too long.")
    if pending.startswith(b"data:"):
        data.append(pending[5:].removeprefix(b" ").decode(errors="replace"))
    if data:
        yield "\n".join(data)


def _lines(buffer: bytes) -> list[bytes]:
    """Whole lines and, last, what is not a whole line yet; a carriage return at the very end may be half a line end."""
    if buffer.endswith(b"\r"):
        return [*_lines(buffer[:-1])[:-1], _lines(buffer[:-1])[-1] + b"\r"]
    return buffer.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
