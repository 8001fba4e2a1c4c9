"""Documents that take long: a PDF of two kilobytes that is parsed for minutes, and a server that sends byte by byte."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

DRIP_S = 0.2


def slow_pdf(name: str, depth: int = 8, times: int = 10) -> bytes:
    """One page that shows a form, which shows a form `times` times, and so on: `times ** depth` lines of text."""
    shown = b"/F Do " * times
    forms = [
        _stream(
            b"/Type /XObject /Subtype /Form /BBox [0 0 9 9] /Resources << /XObject << /F %d 0 R >> >>" % below, shown
        )
        for below in range(5, 4 + depth)
    ]
    font = b"/Font << /T << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >>"
    text = b"BT /T 9 Tf (%s) Tj ET" % name.encode()
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 9 9] /Contents %d 0 R /Resources << /XObject << /F 4 0 R >> >> >>"
        % (4 + depth),
        *forms,
        _stream(b"/Type /XObject /Subtype /Form /BBox [0 0 9 9] /Resources << %s >>" % font, text),
        _stream(b"", shown),
    ]
    document, offsets = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        offsets.append(len(document))
        document += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    size = len(objects) + 1
    trailer = b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % (size, len(document))
    return document + b"xref\n0 %d\n0000000000 65535 f \n%s" % (size, table) + trailer


def _stream(dictionary: bytes, content: bytes) -> bytes:
    return b"<< %s /Length %d >>\nstream\n%s\nendstream" % (dictionary, len(content), content)


@asynccontextmanager
async def dripping() -> AsyncIterator[str]:
    """The address of a server whose pages never end."""
    open_: set[asyncio.Task[None]] = set()

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        open_.add(task)
        with suppress(ConnectionError, asyncio.CancelledError):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 1000000\r\n\r\n")
            while True:
                writer.write(b"a")
                await writer.drain()
                await asyncio.sleep(DRIP_S)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in open_:
            task.cancel()
        await asyncio.gather(*open_, return_exceptions=True)
