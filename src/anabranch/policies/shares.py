"""Limits on what each caller may hold of a shared resource, and a fair queue for it."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from heapq import heappop, heappush
from typing import NoReturn

from anabranch.domain.errors import LimitReached, Overloaded
from anabranch.domain.model import Value
from anabranch.domain.shares import Claimant, Limit, claimant

RETRY_AFTER_S = 1


class ShareUsage(Value):
    """What one caller holds of a resource, and how many of its requests wait for more."""

    held: float
    waiting: int


class Held:
    """Units of a resource that one request holds, or waits for. Its holder must call `leave` in either state."""

    __slots__ = ("_account", "_share", "counted", "granted", "tag", "units", "wakes")

    def __init__(self, share: "Share", account: "Account", units: float) -> None:
        self._share: Share | None = share
        self._account = account
        self.units = units
        self.granted = self.counted = False
        # Of one that waits: whether for others' units, its place in the queue, and what wakes it.
        self.tag = 0.0
        self.wakes: asyncio.Future[None] | None = None

    @property
    def account(self) -> "Account":
        return self._account

    @property
    def gone(self) -> bool:
        return self._share is None

    async def turn(self) -> None:
        """Wait until the units are held."""
        if self.wakes is not None:
            await self.wakes

    def grow(self, units: float) -> None:
        """Hold more, at once; LimitReached or Overloaded if that is over a limit."""
        if self._share is not None:
            self._share.grow(self, units)

    def count(self, units: float) -> None:
        """Hold more, whatever the limit: it is in use already."""
        if self._share is not None:
            self._share.count(self, units)

    def leave(self) -> None:
        share, self._share = self._share, None
        if share is not None:
            share.release(self)


class Account:
    """What one caller holds here and, of the same resource, in other processes."""

    __slots__ = ("bound", "claimant", "elsewhere", "held", "parked", "tag", "waiting")

    def __init__(self, caller: Claimant, bound: float) -> None:
        self.claimant = caller
        self.bound = bound
        self.held = 0.0
        self.elsewhere = 0.0
        self.waiting = 0
        # The place in the queue of its latest request, and its requests that wait for its own earlier ones, in order.
        self.tag = 0.0
        self.parked: list[tuple[float, int, Held]] = []

    def fits(self, units: float) -> bool:
        """Whether its limit lets it hold more. What is larger than the limit itself may be held alone."""
        used = self.held + self.elsewhere
        return used + units <= self.bound or (used == 0 and self.bound > 0)


class Share:
    """One resource and who holds it. Requests that wait are served in fair order: callers take turns, however many
    requests one of them has (start-time fair queuing, with weights)."""

    def __init__(
        self, limit: Limit, changed: Callable[[], None] = lambda: None, pace: "LoopPace | None" = None
    ) -> None:
        self.limit = limit
        self.held = 0.0
        # All that wait, and those of them that wait for others' units.
        self.waiting = 0
        self._queued = 0
        self._changed = changed
        self._pace = pace
        if pace is not None:
            pace.notifies(self.recheck)
        self._unknown_held = 0.0
        self._accounts: dict[str, Account] = {}
        # Requests that wait for others' units, in fair order, and those that wait for a part that is not reserved.
        self._queue: list[tuple[float, int, Held]] = []
        self._unreserved: deque[Held] = deque()
        self._now = 0.0
        self._number = 0
        self._elsewhere: Mapping[str, float] = {}

    @property
    def full(self) -> bool:
        """Whether nobody could enter now."""
        return self.held >= self.limit.total and self._queued >= self.limit.queued

    def enter(self, units: float = 1.0, caller: Claimant | None = None) -> Held:
        """Hold units, or wait for them; LimitReached if the caller has its share, Overloaded if all is in use."""
        account = self._account(caller or claimant.get())
        if account.bound <= 0:
            self._forget(account)
            self._refuse(account)
        held = Held(self, account, units)
        if not account.waiting and not self._queue and self._fits(held):
            self._grant(held)
        else:
            self._wait(held)
        self._changed()
        return held

    @asynccontextmanager
    async def turn(self, units: float = 1.0) -> AsyncIterator[None]:
        """Hold units for the block, once it is this caller's turn."""
        held = self.enter(units)
        try:
            await held.turn()
            yield
        finally:
            held.leave()

    def usage(self, caller: Claimant) -> ShareUsage:
        account = self._accounts.get(caller.name)
        held = account.held if account is not None else 0.0
        elsewhere = self._elsewhere.get(caller.name, 0.0)
        return ShareUsage(held=held + elsewhere, waiting=account.waiting if account is not None else 0)

    def holders(self) -> dict[str, float]:
        """What each caller holds in this process."""
        return {name: account.held for name, account in self._accounts.items() if account.held}

    def counted_elsewhere(self, held: Mapping[str, float]) -> None:
        """What callers hold in other processes, which counts against their limits here."""
        self._elsewhere = held
        for name, account in self._accounts.items():
            account.elsewhere = held.get(name, 0.0)
        self.recheck()

    def recheck(self) -> None:
        """Admit requests whose callers may hold more by now."""
        for account in tuple(self._accounts.values()):
            self._unpark(account)
        self._admit()

    def grow(self, held: Held, units: float) -> None:
        account = held.account
        if account.held + account.elsewhere + units > max(account.bound, units):
            self._refuse(account)
        if self.held + units > max(self.limit.total, units):
            self._overloaded()
        self.count(held, units)

    def count(self, held: Held, units: float) -> None:
        held.units += units
        self._add(held.account, units)

    def release(self, held: Held) -> None:
        """Take back what a request holds, or its place in the queue; whoever is next gets it."""
        account = held.account
        if held.granted:
            self._add(account, -held.units)
        else:
            self._count(held, -1)
        self._unpark(account)
        self._next_unreserved(held)
        self._forget(account)
        self._admit()
        self._changed()

    def _account(self, caller: Claimant) -> Account:
        account = self._accounts.get(caller.name)
        if account is None:
            account = self._accounts[caller.name] = Account(caller, self.limit.of(caller))
            account.elsewhere = self._elsewhere.get(caller.name, 0.0)
        elif caller.limits is not account.claimant.limits:  # the same user with another key
            account.claimant, account.bound = caller, self.limit.of(caller)
        return account

    def _may_hold(self, account: Account, units: float) -> bool:
        return account.fits(units) and (self._is_ready(account) or self._pace is None or self._pace.keeps_up())

    def _is_ready(self, account: Account) -> bool:
        return account.held < self.limit.ready * account.claimant.weight

    def _fits(self, held: Held) -> bool:
        account = held.account
        return self._may_hold(account, held.units) and self._has_room(held.units) and self._is_unreserved(held)

    def _has_room(self, units: float) -> bool:
        return self.held + units <= self.limit.total or self.held == 0

    def _is_unreserved(self, held: Held) -> bool:
        """Whether it would leave what is reserved for known callers."""
        free = self.limit.total - self.limit.reserved
        return held.account.claimant.known or self._unknown_held + held.units <= free

    def _wait(self, held: Held) -> None:
        """Queue a request, or refuse it."""
        account, limit = held.account, self.limit
        may_hold = self._may_hold(account, held.units)
        if may_hold and self._queued >= limit.queued:
            self._forget(account)
            self._overloaded()
        if not may_hold and account.waiting >= limit.waiting * account.claimant.weight:
            self._forget(account)
            self._refuse(account)
        held.wakes = asyncio.get_running_loop().create_future()
        account.tag = held.tag = max(self._now, account.tag) + held.units / account.claimant.weight
        held.counted = may_hold
        self._count(held, 1)
        self._park(held)
        self._unpark(account)
        self._admit()

    def _forget(self, account: Account) -> None:
        if not account.held and not account.waiting:
            self._accounts.pop(account.claimant.name, None)

    def _admit(self) -> None:
        """Give what is free to those that wait, in fair order."""
        while self._queue:
            tag, _, held = self._queue[0]
            if not held.gone and not self._has_room(held.units):
                return
            heappop(self._queue)
            if held.gone:
                continue
            if not self._may_hold(held.account, held.units):
                self._park(held)
                self._next_unreserved(held)
            elif not self._is_unreserved(held):
                self._unreserved.append(held)
            else:
                self._now = max(self._now, tag)
                self._wake(held)

    def _next_unreserved(self, held: Held) -> None:
        """Queue the next request of an unknown caller, where one of them leaves or steps back."""
        while self._unreserved and not held.account.claimant.known:
            following = self._unreserved.popleft()
            if not following.gone:
                self._requeue(following)
                return

    def _wake(self, held: Held) -> None:
        account = held.account
        self._count(held, -1)
        self._grant(held)
        self._unpark(account)
        assert held.wakes is not None, "it waits"
        # One that was just cancelled leaves at once, which admits the one after it.
        if not held.wakes.done():
            held.wakes.set_result(None)
        self._changed()

    def _grant(self, held: Held) -> None:
        if self._pace is not None and not self._is_ready(held.account):
            self._pace.spend()
        held.granted = True
        self._add(held.account, held.units)

    def _add(self, account: Account, units: float) -> None:
        account.held += units
        self.held += units
        if not account.claimant.known:
            self._unknown_held += units

    def _count(self, held: Held, change: int) -> None:
        held.account.waiting += change
        self.waiting += change
        self._queued += change * held.counted

    def _requeue(self, held: Held) -> None:
        heappush(self._queue, (held.tag, self._next_number(), held))

    def _park(self, held: Held) -> None:
        heappush(held.account.parked, (held.tag, self._next_number(), held))

    def _next_number(self) -> int:
        """Heaps compare it before they would compare requests."""
        self._number += 1
        return self._number

    def _unpark(self, account: Account) -> None:
        """Queue the caller's next request, if it may hold more now. (The queue holds one or a few of each caller.)"""
        while account.parked:
            held = account.parked[0][2]
            if not held.gone and not self._may_hold(account, held.units):
                return
            heappop(account.parked)
            if not held.gone:
                self._requeue(held)
                return

    def _refuse(self, account: Account) -> NoReturn:
        raise limit_reached(self.limit, account.bound)

    def _overloaded(self) -> NoReturn:
        raise overloaded(self.limit)


def limit_reached(limit: Limit, bound: float) -> LimitReached:
    """The error of a caller that holds all that it may."""
    return LimitReached(
        f"{reached(limit, bound)}. Try again when some of them have ended.",
        limit=limit.name,
        allowed=round(bound),
        retry_after_s=RETRY_AFTER_S,
    )


def overloaded(limit: Limit) -> Overloaded:
    """The error of a caller where all callers together are at their limit."""
    return Overloaded(
        f"The server is at its limit of {_described(limit, limit.total)}"
        f"{_in_brackets(limit.total_setting)}; try again in a moment.",
        limit=limit.name,
        retry_after_s=RETRY_AFTER_S,
    )


def reached(limit: Limit, bound: float) -> str:
    return f"You have reached your limit of {_described(limit, bound)}{_in_brackets(limit.setting)}"


def _described(limit: Limit, bound: float) -> str:
    return f"{quantity(bound, limit.unit)} {'of ' if limit.unit else ''}{limit.description}"


def _in_brackets(setting: str) -> str:
    return f" ({setting})" if setting else ""


# A caller that runs more than its `ready` questions gets so many more in each tick, while the event loop is not late.
TICK_S = 0.01
PER_TICK = 8
LATE_S = 0.02
IDLE_TICKS = 100


class LoopPace:
    """Whether the event loop keeps up with what it has: while its callbacks run late, nothing is given out. It looks
    only while somebody asks."""

    def __init__(self, tick_s: float = TICK_S, per_tick: int = PER_TICK, late_s: float = LATE_S) -> None:
        self._tick_s = tick_s
        self._per_tick = per_tick
        self._late_s = late_s
        self._left = per_tick
        self._idle = 0
        self._timer: asyncio.TimerHandle | None = None
        self._recheck: Callable[[], None] = lambda: None

    def notifies(self, recheck: Callable[[], None]) -> None:
        """Call this after each tick."""
        self._recheck = recheck

    def keeps_up(self) -> bool:
        self._idle = 0
        if self._timer is None:
            self._left = self._per_tick
            self._start()
        return self._left > 0

    def spend(self) -> None:
        self._left -= 1

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._tick_s, self._tick, loop.time() + self._tick_s)

    def _tick(self, due: float) -> None:
        late_s = asyncio.get_running_loop().time() - due
        self._left = self._per_tick if late_s < self._late_s else 0
        self._idle += 1
        self._recheck()
        if self._idle > IDLE_TICKS:
            self._timer = None
        else:
            self._start()


MIB = 1024 * 1024


def quantity(count: float, unit: str) -> str:
    """A number with its unit, as a person reads it."""
    if unit == "bytes":
        return f"{count / MIB:,.0f} MiB" if count >= MIB else f"{count:,.0f} bytes"
    return f"{count:,.0f}"
