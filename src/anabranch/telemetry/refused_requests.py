"""Refused requests in the log: a line each, up to a limit for each address, because whoever is refused needs no key."""

import time
from collections import Counter
from collections.abc import Callable

from anabranch.telemetry.log import Log

# Lines in a second: of one address, and of all.
EACH, ALL = 20, 200


class RefusedRequests:
    """Writes refused requests to the log. The first line of a later second says how many were left out."""

    def __init__(self, log: Log, now: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._now = now
        self._second = 0
        self._written = 0
        self._left_out = 0
        self._of: Counter[str] = Counter()

    def add(self, peer: str, *, correlation_id: str, status: int, path: str) -> None:
        second = int(self._now())
        if second != self._second:
            self._second = second
            self._written = 0
            self._of.clear()
        if self._written >= ALL or self._of[peer] >= EACH:
            self._left_out += 1
            return
        self._written += 1
        self._of[peer] += 1
        omitted = {"left_out": self._left_out} if self._left_out else {}
        self._left_out = 0
        self._log.info("request_refused", correlation_id=correlation_id, status=status, path=path, peer=peer, **omitted)
