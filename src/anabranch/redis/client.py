"""The one way to Redis: the commands of one turn travel together, nobody loses more than one time-out, and while Redis
is gone nobody waits for it at all."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from hiredis import pack_command

from anabranch.domain.contracts import Clock, Telemetry
from anabranch.domain.errors import AnabranchError, ConfigurationError
from anabranch.domain.signals import RedisMoved, RedisSaidNo

if TYPE_CHECKING:
    from redis.asyncio.connection import AbstractConnection

Argument = str | bytes | int | float
Reply: TypeAlias = bytes | int | list["Reply"] | None
Sent = tuple[bytes, "asyncio.Future[Reply]"]

PROBE_EVERY_S = 0.5
MAX_CONNECTIONS = 16
MAX_BATCH = 512
QUARTERS = 4
TURNS = 10
LONGEST_NAME = 20
PING: bytes = pack_command(("PING",))

# What the address may not decide: time is judged here, replies stay bytes, and a new connection asks for nothing more
# than its password and its database.
OPTIONS: dict[str, Any] = {
    "socket_timeout": None,
    "socket_connect_timeout": None,
    "health_check_interval": 0,
    "retry": None,
    "retry_on_timeout": False,
    "decode_responses": False,
    "protocol": 2,
    "driver_info": None,
}
WRONG_ADDRESS = (
    "AGGREGATOR_REDIS_URL takes the address of a Redis: redis://[user:password@]host[:port][/database], the same with "
    "rediss://, or unix:///path; a password is percent-encoded."
)
UNREACHABLE = "Redis cannot be reached."
DENIED = "Redis asks for another user or password."
BROKEN = "Redis closed the connection before it answered."
LATE = "Redis did not answer in time."
CLOSED = "The connection to Redis has been closed."


class RedisGone(AnabranchError):
    """Redis cannot be reached or did not answer in time; whether it has run the command is not known. The message never
    has what the driver says, since a server that does not know AUTH repeats the password in its complaint."""


class RedisRefused(RedisGone):
    """Redis is there, but answered this one command with an error."""


class Redis:
    """Nothing connects before the first command. Replies are as Redis sends them: bytes, numbers, None and lists."""

    def __init__(self, url: str, *, timeout_s: float, clock: Clock, telemetry: Telemetry) -> None:
        self._connections = Connections(url)
        self._timeout_s = timeout_s
        self._clock = clock
        self._telemetry = telemetry
        self._reachable = True
        self._closed = False
        self._collected: list[Sent] = []
        self._flushing = False
        self._held_since: float | None = None
        self._carrying: set[asyncio.Task[None]] = set()
        self._idle: list[AbstractConnection] = []
        self._probing: asyncio.Task[None] | None = None

    @property
    def reachable(self) -> bool:
        """Whether the next command would be sent at all."""
        return self._reachable and not self._closed

    async def execute(self, *command: Argument, wait_s: float | None = None) -> Reply:
        """The reply to a command. Whoever is cancelled here, or has waited for `wait_s`, only stops waiting: the batch
        that the command travels in goes on, and nothing is held against Redis."""
        if not self.reachable:
            raise RedisGone(CLOSED if self._closed else UNREACHABLE)
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Reply] = loop.create_future()
        self._collected.append((_packed(command), reply))
        self._flush_soon(loop)
        if wait_s is None:
            return await reply
        patience = ReplyTimeout(wait_s, lambda: _fail(reply, RedisGone(LATE)))
        try:
            return await reply
        finally:
            patience.end()

    async def close(self) -> None:
        self._closed = True
        _fail_all(self._collected, CLOSED)
        self._collected = []
        tasks = [*self._carrying, *([self._probing] if self._probing else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._discard_idle()
        await asyncio.sleep(0)  # The sockets themselves are closed in the loop's next turn.

    def _flush_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._flushing:
            self._flushing = True
            loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Send what the turn has collected, or leave it to collect more if every connection is busy. Having been held
        back counts against a batch's time, but each gets a quarter of it at least, or it would never be tried."""
        self._flushing = False
        while self._collected and len(self._carrying) < MAX_CONNECTIONS:
            batch, self._collected = self._collected[:MAX_BATCH], self._collected[MAX_BATCH:]
            held_s = 0.0 if self._held_since is None else self._clock.monotonic() - self._held_since
            budget_s = max(self._timeout_s - held_s, self._timeout_s / QUARTERS)
            task = asyncio.create_task(self._carry(batch, budget_s))
            self._carrying.add(task)
            task.add_done_callback(partial(self._carried, batch))
        if not self._collected:
            self._held_since = None
        elif self._held_since is None:
            self._held_since = self._clock.monotonic()

    def _carried(self, batch: list[Sent], task: asyncio.Task[None]) -> None:
        """Whatever became of a batch, nobody is left waiting; a task that is cancelled before its first step has not
        even seen it."""
        self._carrying.discard(task)
        _fail_all(batch, CLOSED if self._closed else UNREACHABLE)
        if self._collected:
            self._flush_soon(task.get_loop())

    async def _carry(self, batch: list[Sent], budget_s: float) -> None:
        """One batch, one write, in a task that no caller can cancel. A connection on which anything went wrong is
        thrown away, so that no reply can ever reach the caller of another command."""
        task = asyncio.current_task()
        assert task is not None
        patience = ReplyTimeout(budget_s, task.cancel)
        connection: AbstractConnection | None = None
        used, failure = False, LATE
        try:
            connection = await self._unused()
            used = connection is not None
            if connection is None:
                connection = self._connections.new()
                await connection.connect()  # type: ignore[no-untyped-call]
            await self._exchange(connection, batch)
            self._idle.append(connection)
            connection = None
        except asyncio.CancelledError:
            if not patience.over:
                failure = CLOSED if self._closed else UNREACHABLE
                raise
            task.uncancel()
            self._lost(LATE)
        except (self._connections.error, OSError) as error:
            failure = BROKEN if used else UNREACHABLE
            # A connection that had worked before says little about Redis, which may have been restarted meanwhile: the
            # next command finds out on a fresh one. This one is not sent again: it has been written, so that Redis may
            # have run it and died before it could say so, and a limit would count it twice.
            await self._discard_idle()
            if not used:
                self._lost(DENIED if isinstance(error, self._connections.denial) else UNREACHABLE)
        finally:
            patience.end()
            _fail_all(batch, failure)
            if connection is not None:
                await connection.disconnect(nowait=True)

    async def _exchange(self, connection: "AbstractConnection", batch: list[Sent]) -> None:
        """Every reply has to be read, also those that nobody waits for any more."""
        waited_for = [sent for sent in batch if not sent[1].done()]
        await connection.send_packed_command(b"".join([packed for packed, _ in waited_for]), check_health=False)
        for _, reply in waited_for:
            try:
                said = await connection.read_response(disable_decoding=True)
            except self._connections.refusal as error:
                self._telemetry.noted(RedisSaidNo(why=_why(error)))
                _fail(reply, RedisRefused(f"Redis refused a command: {str(error)[:200]}"))
            else:
                if not reply.done():
                    reply.set_result(said)

    async def _unused(self) -> "AbstractConnection | None":
        """An idle connection that the other side has not closed. To write nothing finds out about a reset; by the time
        that this task runs, the loop has seen every close that came before the command."""
        while self._idle:
            connection = self._idle.pop()
            try:
                await connection.send_packed_command([], check_health=False)
                if not await connection.can_read():
                    return connection
            except (self._connections.error, OSError):
                pass
            await connection.disconnect(nowait=True)
        return None

    async def _discard_idle(self) -> None:
        while self._idle:
            await self._idle.pop().disconnect(nowait=True)

    def _lost(self, reason: str) -> None:
        """From now on everybody is told at once, those too who are waiting for other batches."""
        if not self.reachable:
            return
        self._reachable = False
        _fail_all(self._collected, UNREACHABLE)
        self._collected = []
        for task in self._carrying - {asyncio.current_task()}:
            task.cancel()
        self._probing = asyncio.create_task(self._until_back())
        self._telemetry.noted(RedisMoved(reachable=False, reason=reason))

    async def _until_back(self) -> None:
        loop = asyncio.get_running_loop()
        await self._discard_idle()
        while not self._reachable and not self._closed:
            await asyncio.sleep(PROBE_EVERY_S)
            pong: asyncio.Future[Reply] = loop.create_future()
            await self._carry([(PING, pong)], self._timeout_s)
            refused = isinstance(pong.exception(), RedisRefused)
            self._reachable = refused or (pong.exception() is None and pong.result() == b"PONG")
        if self._reachable:
            self._telemetry.noted(RedisMoved(reachable=True))


class ReplyTimeout:
    """Calls `give_up` once something has had its time. The time is Redis' and not ours: it is counted in quarters, of
    which one that a busy loop has drawn out counts once, and at the end come a few turns in which a reply that is
    already here can still be read."""

    __slots__ = ("_give_up", "_handle", "_left", "_loop", "_quarter_s", "over")

    def __init__(self, seconds: float, give_up: Callable[[], object]) -> None:
        self.over = False
        self._give_up = give_up
        self._quarter_s = seconds / QUARTERS
        self._left = QUARTERS + TURNS
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.Handle = self._loop.call_later(self._quarter_s, self._tick)

    def end(self) -> None:
        self._handle.cancel()

    def _tick(self) -> None:
        self._left -= 1
        if self._left > TURNS:
            self._handle = self._loop.call_later(self._quarter_s, self._tick)
        elif self._left > 0:
            self._handle = self._loop.call_soon(self._tick)
        else:
            self.over = True
            self._give_up()


class Connections:
    """Makes connections to one address, not yet connected. The driver is loaded here: most have no Redis."""

    def __init__(self, url: str) -> None:
        from redis.asyncio.connection import Connection, SSLConnection, parse_url  # noqa: PLC0415
        from redis.exceptions import AuthenticationError, RedisError, ResponseError  # noqa: PLC0415

        self.denial: type[Exception] = AuthenticationError
        self.error: type[Exception] = RedisError
        self.refusal: type[Exception] = ResponseError
        try:
            self._options: dict[str, Any] = {**parse_url(url), **OPTIONS}
            self._kind: type[AbstractConnection] = self._options.pop("connection_class", Connection)
            first = self._kind(**self._options)
        except (TypeError, ValueError, RedisError):
            raise ConfigurationError(WRONG_ADDRESS) from None
        # Reading the machine's certificates takes the loop longer than many a batch, so all connections share them.
        self._tls = first.ssl_context if isinstance(first, SSLConnection) else None

    def new(self) -> "AbstractConnection":
        connection: Any = self._kind(**self._options)
        if self._tls is not None:
            connection.ssl_context = self._tls
        return cast("AbstractConnection", connection)


def _why(error: Exception) -> str:
    """The name of its error, such as READONLY or OOM; what stands behind it may be anything."""
    name = str(error).partition(" ")[0]
    known = name if name.isascii() and name.isupper() and len(name) <= LONGEST_NAME else ""
    return known or type(error).__name__


def _packed(command: tuple[Argument, ...]) -> bytes:
    """Half a surrogate pair, which no UTF-8 can say, may stand in what a caller sends as its name."""
    try:
        packed: bytes = pack_command(command)  # type: ignore[arg-type]
    except UnicodeEncodeError:
        parts = (part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part for part in command)
        packed = pack_command(tuple(parts))  # type: ignore[arg-type]
    return packed


def _fail_all(batch: list[Sent], why: str) -> None:
    for _, reply in batch:
        if not reply.done():
            _fail(reply, RedisGone(why))


def _fail(reply: "asyncio.Future[Reply]", error: RedisGone) -> None:
    if not reply.done():
        reply.set_exception(error)
        reply.exception()  # Whoever waited may be gone in this very turn; that an error stays unseen is no news then.
