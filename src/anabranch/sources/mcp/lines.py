"""What a child writes: put together line by line, and bounded."""

import time
from collections.abc import Callable

MAX_HEARD = 2_000
BURST, PER_S = 100, 20.0
# What may come that nobody has asked for: in lines, of which one counts as many as it has kilobytes.
UNASKED_BURST, UNASKED_PER_S = 10_000.0, 500.0


class Lines:
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


class Bounded:
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


class Unasked:
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
