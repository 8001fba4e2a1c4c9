"""JSON that was cut in the middle of a character ends in half of it: JavaScript writes that, and others refuse it."""

import re
import time
from collections.abc import Callable

LIKELY = re.compile(rb"\\u[dD][89a-fA-F]")
# An escape is looked at as a whole, so that a backslash that is escaped itself begins none.
ESCAPES = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.", re.DOTALL
)
UNKNOWN = rb"\ufffd"


def repaired(text: bytes) -> bytes:
    """The same with a sign that stands for what is not known, in place of each half."""
    if LIKELY.search(text) is None:
        return text
    return ESCAPES.sub(lambda found: UNKNOWN if found[1] else found[0], text)


class SurrogateRepair:
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
        return repaired(whole) if end else whole

    def rest(self) -> bytes:
        held, self._held = bytes(self._held), bytearray()
        return repaired(held)


MAX_HEARD = 2_000
BURST, PER_S = 100, 20.0
# What may come that nobody has asked for: in lines, of which one counts as many as it has kilobytes.
UNASKED_BURST, UNASKED_PER_S = 10_000.0, 500.0


class LineBuffer:
    """Puts lines together again. Of a line that goes on beyond a cap, what is beyond it is dropped."""

    def __init__(self, cap: int | None = None) -> None:
        self._cap = cap
        self._held = bytearray()

    @property
    def held(self) -> int:
        return len(self._held)

    def rest(self) -> list[bytes]:
        """What stands behind the last line's end."""
        return [bytes(self._held)] if self._held else []

    def whole(self, chunk: bytes) -> list[bytes]:
        first, *more = chunk.split(b"\n")
        self._held += first if self._cap is None else first[: max(0, self._cap - self.held)]
        if not more:
            return []
        lines = [bytes(self._held), *more[:-1]]
        self._held = bytearray(more[-1])
        return lines


class BoundedText:
    """Passes on what is heard, in lines that can be shown, and not more of them than somebody would read."""

    def __init__(self, heard: Callable[[str], None]) -> None:
        self._heard = heard
        self._left = float(BURST)
        self._at = time.monotonic()
        self._missed = 0

    def __call__(self, line: bytes) -> None:
        now = time.monotonic()
        self._left = min(BURST, self._left + (now - self._at) * PER_S)
        self._at = now
        if self._left < 1:
            self._missed += 1
            return
        if self._missed:
            self._heard(f"({self._missed:,} lines are left out here.)")
            self._missed = 0
        text = line[: 4 * MAX_HEARD].decode("utf-8", "replace")[:MAX_HEARD].rstrip()
        if text:
            self._left -= 1
            self._heard("".join(sign if sign.isprintable() else " " for sign in text))


class UnsolicitedText:
    """How much may still come that nobody has asked for."""

    def __init__(self) -> None:
        self._left = UNASKED_BURST
        self._at = time.monotonic()

    def is_too_much(self, size: int) -> bool:
        """Whether a line of so many bytes is more than may come now."""
        now = time.monotonic()
        self._left = min(UNASKED_BURST, self._left + (now - self._at) * UNASKED_PER_S) - 1 - size / 1024
        self._at = now
        return self._left < 0
