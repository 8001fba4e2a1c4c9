"""Parser of server-sent events: the data of each, however the bytes are chunked."""

from collections.abc import AsyncIterator

from anabranch.domain.errors import Trouble, UpstreamError

MAX_EVENT_BYTES = 1024 * 1024


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The `data` of each event, its lines joined. A last event without its blank line counts too."""
    pending = bytearray()
    data: list[str] = []
    size = 0
    after_return = False
    async for chunk in chunks:
        # A carriage return ends a line at once; a line feed at the start of the next chunk belongs to it.
        fresh = chunk[1:] if after_return and chunk.startswith(b"\n") else chunk
        after_return = chunk.endswith(b"\r")
        *ends, rest = fresh.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for end in ends:
            line = bytes(pending) + end if pending else end
            pending.clear()
            size += len(line)
            if line.startswith(b"data:"):
                data.append(_value(line))
            elif not line:
                if data:
                    yield "\n".join(data)
                data, size = [], 0
        pending += rest
        if size + len(pending) > MAX_EVENT_BYTES:
            raise UpstreamError("The stream holds an event that is too long.", Trouble.UNUSABLE)
    if pending.startswith(b"data:"):
        data.append(_value(bytes(pending)))
    if data:
        yield "\n".join(data)


def _value(line: bytes) -> str:
    return line[5:].removeprefix(b" ").decode(errors="replace")
