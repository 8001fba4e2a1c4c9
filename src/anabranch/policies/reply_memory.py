"""The memory of one request's large replies: what its sources and its model send, and the response made of it."""

import asyncio

from anabranch.domain.shares import waits_for_own
from anabranch.policies.shares import Held, Share

# Less than this is not counted: most requests never wait.
FREE_BYTES = 64 * 1024


class HeldReplies:
    """The bytes that one request holds of a share, from its first large reply until its response is sent and its Run
    has ended. Each of the two is a user, which must `leave`."""

    __slots__ = ("_bytes", "_held", "_share", "_turn", "_users")

    def __init__(self, share: Share) -> None:
        self._share = share
        self._bytes = 0
        self._users = 1
        self._held: Held | None = None
        self._turn: asyncio.Lock | None = None

    def join(self) -> None:
        self._users += 1

    def leave(self) -> None:
        self._users -= 1
        if not self._users:
            held, self._held, self._bytes = self._held, None, 0
            if held is not None:
                held.leave()

    def fits(self, count: int) -> bool:
        if self._bytes + count > FREE_BYTES and self._users > 0:
            return False
        self._bytes += count
        return True

    async def add(self, count: int) -> None:
        """Count bytes of a reply. The first large ones wait for their turn. What comes after them does not, because the
        request would hold them while it waits: LimitReached or Overloaded if it is over a limit."""
        if self.fits(count):
            return
        self._turn = self._turn or asyncio.Lock()
        async with self._turn:
            if self._held is None:
                await self._enter(self._bytes + count)
            else:
                self._held.grow(count)
            self._bytes += count

    async def add_response(self, size: int) -> None:
        """Count a response that is to be sent. One that is not made of counted replies waits for its turn."""
        if self._held is None:
            await self.add(max(0, size - self._bytes))
        else:
            self.count_response(size)

    def count_response(self, size: int) -> None:
        """Count a response that is made of counted replies. It may be larger than they are; it is there already."""
        if self._held is not None and size > self._held.units:
            self._held.count(size - self._held.units)

    async def _enter(self, count: int) -> None:
        held = self._share.enter(count)
        waits_for_own.set(True)
        try:
            await held.turn()
        except BaseException:
            held.leave()
            raise
        waits_for_own.set(False)
        if self._users > 0:
            self._held = held
        else:
            held.leave()
