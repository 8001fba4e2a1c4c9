"""Reads lines of servers within limits, and repairs JSON that JavaScript cut in the middle of a surrogate pair."""

import re
import time
from collections.abc import Callable

SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
# Matches whole escapes, so that an escaped backslash does not start one.
ESCAPES = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.", re.DOTALL
)
REPLACEMENT = rb"\ufffd"


def repair_surrogates(text: bytes) -> bytes:
    """The text with U+FFFD in place of each lone surrogate."""
    if SURROGATE.search(text) is None:
        return text
    return ESCAPES.sub(lambda found: REPLACEMENT if found[1] else found[0], text)


class SurrogateRepair:
    """Repairs a stream of chunks, line by line. A line longer than `limit` bytes is passed on unchanged; its reader
    rejects it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = bytearray()

    def feed(self, chunk: bytes) -> bytes:
        end = max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1
        if not end and len(self._held) + len(chunk) <= self._limit:
            self._held += chunk
            return b""
        whole = bytes(self._held) + chunk[: end or None]
        self._held = bytearray(chunk[end:] if end else b"")
        return repair_surrogates(whole) if end else whole

    def rest(self) -> bytes:
        held, self._held = bytes(self._held), bytearray()
        return repair_surrogates(held)


MAX_OUTPUT_LINE = 2_000
BURST, PER_S = 100, 20.0
# Limit of unsolicited data: in lines, plus one for each kilobyte.
UNSOLICITED_BURST, UNSOLICITED_PER_S = 10_000.0, 500.0


class LineBuffer:
    """Joins chunks into lines. With `cap`, the rest of a longer line is dropped."""

    def __init__(self, cap: int | None = None) -> None:
        self._cap = cap
        self._held = bytearray()

    @property
    def held(self) -> int:
        return len(self._held)

    def rest(self) -> list[bytes]:
        """The text after the last line end."""
        return [bytes(self._held)] if self._held else []

    def feed(self, chunk: bytes) -> list[bytes]:
        first, *more = chunk.split(b"\n")
        self._held += first if self._cap is None else first[: max(0, self._cap - self.held)]
        if not more:
            return []
        lines = [bytes(self._held), *more[:-1]]
        self._held = bytearray(more[-1])
        return lines


class OutputLimiter:
    """Passes on printable lines of a process's output, at a limited rate."""

    def __init__(self, on_output: Callable[[str], None]) -> None:
        self._on_output = on_output
        self._left = float(BURST)
        self._at = time.monotonic()
        self._dropped = 0

    def __call__(self, line: bytes) -> None:
        now = time.monotonic()
        self._left = min(BURST, self._left + (now - self._at) * PER_S)
        self._at = now
        if self._left < 1:
            self._dropped += 1
            return
        if self._dropped:
            self._on_output(f"({self._dropped:,} lines dropped.)")
            self._dropped = 0
        text = line[: 4 * MAX_OUTPUT_LINE].decode("utf-8", "replace")[:MAX_OUTPUT_LINE].rstrip()
        if text:
            self._left -= 1
            self._on_output("".join(character if character.isprintable() else " " for character in text))


class UnsolicitedLimit:
    """Rate limit of data that is not the reply to a request."""

    def __init__(self) -> None:
        self._left = UNSOLICITED_BURST
        self._at = time.monotonic()

    def is_exceeded_by(self, size: int) -> bool:
        """Whether a line of so many bytes exceeds the limit now."""
        now = time.monotonic()
        self._left = min(UNSOLICITED_BURST, self._left + (now - self._at) * UNSOLICITED_PER_S) - 1 - size / 1024
        self._at = now
        return self._left < 0
