"""The open connections of a process: a limit for each address, and for all together."""

import sys
from collections.abc import Callable
from heapq import nlargest
from itertools import islice
from typing import Protocol

from anabranch.domain.shares import Limit
from anabranch.policies.rate_limits import address_block
from anabranch.policies.shares import limit_reached, overloaded

# Where the application puts its OpenConnections into the state that the server gives to protocols and requests.
CONNECTIONS = "connections"
# What is used of a system that sets no limit, and what Windows permits.
MOST_FILES, WINDOWS_FILES = 65_536, 8_192
# Where all connections are in use: in which addresses, and at how many connections of each, an idle one is looked for.
ADDRESSES, LOOKED_AT = 8, 64


class Connection(Protocol):
    def is_idle(self) -> bool:
        """Whether it has no request in progress."""

    def drop(self) -> None:
        """Close it at once."""


class OpenConnections:
    """Counts connections by address. Where all are in use, a new one takes the place of an old idle one of the address
    that has the most. An address that `is_shared` stands for many callers and has no limit of its own."""

    def __init__(self, limit: Limit, is_shared: Callable[[str], bool]) -> None:
        self._limit = limit
        self._is_shared = is_shared
        # By block of addresses, the oldest first.
        self._blocks: dict[str, dict[Connection, None]] = {}
        self.count = 0
        # Connections that may not stay, and are open until their clients have had time to read why.
        self.refused = 0

    def add(self, address: str, connection: Connection) -> None:
        """Count a new connection; LimitReached or Overloaded if it may not stay."""
        block, limit = address_block(address), self._limit
        if len(self._blocks.get(block, ())) >= limit.each and not self._is_shared(address):
            raise limit_reached(limit, limit.each)
        if self.count >= limit.total and not self._make_room():
            raise overloaded(limit)
        self._blocks.setdefault(block, {})[connection] = None
        self.count += 1

    def remove(self, address: str, connection: Connection) -> None:
        """The connection has ended. One that was dropped is not counted any more."""
        self._remove(address_block(address), connection)

    def _remove(self, block: str, connection: Connection) -> None:
        found = self._blocks.get(block, {})
        if connection not in found:
            return
        del found[connection]
        self.count -= 1
        if not found:
            del self._blocks[block]

    def _make_room(self) -> bool:
        """Drop an idle connection; whether there was one."""
        for block in nlargest(ADDRESSES, self._blocks, key=lambda one: len(self._blocks[one])):
            found = self._blocks[block]
            for one in list(islice(found, LOOKED_AT)):
                if one.is_idle():
                    self._remove(block, one)
                    one.drop()
                    return True
                # The next look begins with others.
                del found[one]
                found[one] = None
        return False


def max_open_files() -> int:
    """How many files and connections this process may have open."""
    if sys.platform == "win32":
        return WINDOWS_FILES
    import resource  # noqa: PLC0415

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_FILES if soft == resource.RLIM_INFINITY else soft
