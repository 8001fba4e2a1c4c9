"""JSON that was cut in the middle of a character ends in half of it: JavaScript writes that, and others refuse it."""

import re

LIKELY = re.compile(rb"\\u[dD][89a-fA-F]")
# An escape is looked at as a whole, so that a backslash that is escaped itself begins none.
ESCAPES = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.", re.DOTALL
)
UNKNOWN = rb"\ufffd"


def mended(text: bytes) -> bytes:
    """The same with a sign that stands for what is not known, in place of each half."""
    if LIKELY.search(text) is None:
        return text
    return ESCAPES.sub(lambda found: UNKNOWN if found[1] else found[0], text)


class Mending:
    """Mends what comes in pieces: no escape goes beyond the end of its line. A line beyond `most` bytes is passed on as
    it is, for others to refuse."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = bytearray()

    def mended(self, chunk: bytes) -> bytes:
        end = max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1
        if not end and len(self._held) + len(chunk) <= self._most:
            self._held += chunk
            return b""
        whole = bytes(self._held) + chunk[: end or None]
        self._held = bytearray(chunk[end:] if end else b"")
        return mended(whole) if end else whole

    def rest(self) -> bytes:
        held, self._held = bytes(self._held), bytearray()
        return mended(held)
