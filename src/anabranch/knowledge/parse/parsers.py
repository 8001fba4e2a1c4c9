"""Several parser processes that owners of documents share: none of them ever holds all."""

import math
from collections.abc import Callable, Mapping

from anabranch.domain.shares import Limit
from anabranch.knowledge.model import Parsed
from anabranch.knowledge.parse.builder import ParseLimits
from anabranch.knowledge.parse.sandbox import Sandbox
from anabranch.policies.shares import Share

# An owner has one at a time, so that owners with slow files must be as many as there are processes to hold all.
PROCESSES = 4
EACH = 1


class Parsers:
    """Parses files in up to `processes` processes, which start with the first files that need them. Files wait in fair
    order of their claimants. `started` gets the restrictions of the first process."""

    def __init__(
        self,
        limits: ParseLimits,
        processes: int = PROCESSES,
        started: Callable[[Mapping[str, str]], None] = lambda _: None,
    ) -> None:
        self._sandboxes = [Sandbox(limits) for _ in range(processes)]
        # The last one is used next: it is most likely to have a process.
        self._idle = list(self._sandboxes)
        self._started: Callable[[Mapping[str, str]], None] | None = started
        self._share = Share(
            Limit(
                name="parsers",
                description="files that are parsed at once",
                each=EACH,
                total=processes,
                waiting=math.inf,
                queued=math.inf,
            )
        )

    @property
    def pids(self) -> list[int]:
        """The processes that run."""
        return [sandbox.pid for sandbox in self._sandboxes if sandbox.pid is not None]

    async def parse(self, data: bytes, filename: str | None, media_type: str | None = None) -> Parsed:
        async with self._share.turn():
            sandbox = self._idle.pop()
            try:
                return await sandbox.parse(data, filename, media_type)
            finally:
                self._idle.append(sandbox)
                self._report(sandbox)

    async def close(self) -> None:
        """End the processes at once, with the files that they parse."""
        for sandbox in self._sandboxes:
            await sandbox.close()

    def _report(self, sandbox: Sandbox) -> None:
        if self._started is not None and sandbox.restrictions:
            report, self._started = self._started, None
            report(sandbox.restrictions)


async def restrictions() -> Mapping[str, str]:
    """What a parser process gives up on this machine, by name: `applied`, or the reason why not."""
    sandbox = Sandbox(ParseLimits())
    try:
        await sandbox.start()
        return sandbox.restrictions
    finally:
        await sandbox.close()
