"""Refused requests in the audit log: counted in memory, and written once a minute. A flood of them costs no time and
little space."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import NamedTuple

from anabranch.app.knowledge_opener import KnowledgeOpener
from anabranch.domain.audit import GUEST, Actor, AuditEntry
from anabranch.domain.errors import AnabranchError, Forbidden, NotFound, RateLimited, Unauthorized

# Of callers with a key, and as many of others: what a minute's refusals take in memory. The rest is only counted.
MAX_COUNTED = 1_000
# How many records may be written at once, and how many an hour in the long run: of callers with a key, and of others.
BURST, PER_HOUR = 1_000, 200
SEVERAL = Actor(name="several", address="", surface="")


def is_refused_access(error: Exception, *, identified: bool = True) -> bool:
    """Whether a caller was refused something. What an identified caller may not see does not exist for it."""
    return isinstance(error, Unauthorized | Forbidden | RateLimited) or (identified and isinstance(error, NotFound))


class Refused(NamedTuple):
    """Who was refused what. `code` is that of the error."""

    by: Actor
    operation: str
    code: str


class Refusals:
    """Counts refusals by caller, operation and reason. Callers with a key have places of their own, so that strangers
    cannot hide what a known caller tries."""

    def __init__(self, knowledge: KnowledgeOpener, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._knowledge = knowledge
        self._every_s = every_s
        self._clock = clock
        self._known: Counter[Refused] = Counter()
        self._unknown: Counter[Refused] = Counter()
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None
        self._may_write = [float(BURST), float(BURST)]
        self._written_at = clock()

    def add(self, by: Actor, operation: str, code: str) -> None:
        """Count a refusal; the `request` of the caller is not kept."""
        self._count(
            Refused(Actor(name=by.name, address=by.address, surface=by.surface, key=by.key), operation, code), 1
        )
        if self._timer is None:
            # Not in the context of the request: its caller has no part in what is written.
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._every_s, self._start_writing, context=Context())

    async def close(self) -> None:
        """Write what is counted."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._writing is not None:
            await asyncio.wait([self._writing])
        await self._write()

    def _count(self, refused: Refused, count: int) -> None:
        counts = self._known if refused.by.name != GUEST else self._unknown
        if refused not in counts and len(counts) >= MAX_COUNTED:
            refused = refused._replace(by=SEVERAL)
        counts[refused] += count

    def _start_writing(self) -> None:
        self._timer = None
        self._writing = asyncio.create_task(self._write())

    async def _write(self) -> None:
        counted, self._known, self._unknown = [self._known, self._unknown], Counter(), Counter()
        try:
            if not any(counted) or not self._knowledge.exists:
                return
            await (await self._knowledge()).audit(self._entries(counted))
        except AnabranchError:  # the records cannot be written now
            for refused, count in (*counted[0].items(), *counted[1].items()):
                self._count(refused, count)

    def _entries(self, counted: Sequence[Counter[Refused]]) -> list[tuple[AuditEntry, Actor]]:
        """The most frequent ones each, of callers with a key and of others; the rest together."""
        now = self._clock()
        gained = (now - self._written_at) * PER_HOUR / 3_600
        self._written_at = now
        each: Counter[Refused] = Counter()
        for group, counts in enumerate(counted):
            left = min(BURST, self._may_write[group] + gained)
            for refused, count in counts.most_common():
                if left >= 1:
                    left -= 1
                    each[refused] += count
                else:
                    each[refused._replace(by=SEVERAL)] += count
            self._may_write[group] = left
        return [(_entry(refused, count), refused.by) for refused, count in each.items()]


def _entry(refused: Refused, count: int) -> AuditEntry:
    details = {"code": refused.code, "count": count}
    return AuditEntry(
        action="access.refused", object=f"operation:{refused.operation}", details=details, outcome="refused"
    )
