"""Request/reply and notifications between workers over Redis pub/sub, on one connection that reconnects by itself."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import msgspec

from anabranch.domain.contracts import Clock
from anabranch.domain.errors import AnabranchError, InvalidQuestion, StreamUnavailable
from anabranch.domain.model import Value
from anabranch.redis.client import PING, Connections, Redis, RedisGone, Reply, cancel_all, packed

if TYPE_CHECKING:
    from redis.asyncio.connection import AbstractConnection

Handler = Callable[[bytes], Awaitable[bytes]]

MAX_BYTES = 8 * 1024 * 1024
MAX_REPLYING = 1_000

CHANNEL = "anabranch:post:"
# All workers listen to it. No worker has this name.
EVERYBODY = CHANNEL + "*"
OWNER_UNREACHABLE = "The worker that holds this stream cannot be reached."


class RpcTiming(Value):
    """`ping_every_s`: how often an idle connection is pinged. `silence_s`: how long it may receive nothing before it is
    replaced. `reconnect_s`: the pause before that."""

    ping_every_s: float = 1.0
    silence_s: float = 3.0
    reconnect_s: float = 0.2


class RpcMessage(Value, array_like=True):
    """A request if it has a `sender`; else the reply to one. With `failed` there is no reply body."""

    number: str
    sender: str = ""
    body: bytes = b""
    failed: bool = False


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(RpcMessage).decode


class ChannelWatch:
    """Is notified when a message was published on a channel, and when one may have been missed."""

    def __init__(self) -> None:
        self._notified = asyncio.Event()
        self.notify = self._notified.set

    async def wait(self, wait_s: float) -> bool:
        """Whether it was notified since the last call, or is within that time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._notified.wait()
        notified = self._notified.is_set()
        self._notified.clear()
        return notified


class WorkerRpc:
    """Delivers at most once. A lost request is not sent again: its caller gets StreamUnavailable after the time-out.
    `since` is when the connection was made, or None. `interrupted_at` is when it was last lost or came back: Redis may
    hold other data since then."""

    def __init__(self, url: str, redis: Redis, *, worker: str, clock: Clock, timing: RpcTiming | None = None) -> None:
        self._connections = Connections(url)
        self._redis = redis
        self._clock = clock
        self._timing = timing or RpcTiming()
        self._address = CHANNEL + worker
        self._worker = worker
        self._handler: Handler | None = None
        self._handler_of_all: Handler | None = None
        self._task: asyncio.Task[None] | None = None
        self._replying: set[asyncio.Task[None]] = set()
        self._requests: dict[str, asyncio.Queue[RpcMessage]] = {}
        self._watches: dict[str, set[ChannelWatch]] = {}
        # Subscriptions to send on the connection.
        self._unsent: list[tuple[str, str]] = []
        self._to_send = asyncio.Event()
        self._connected = False
        self._received_at = 0.0
        self.since: float | None = None
        self.interrupted_at = float("-inf")

    @property
    def up(self) -> bool:
        """Whether it is connected."""
        return self.since is not None

    def start(self, handler: Handler) -> None:
        self._handler = handler
        self._task = asyncio.create_task(self._run())

    def handle_all(self, handler: Handler) -> None:
        """The handler of requests to all workers."""
        self._handler_of_all = handler

    async def close(self) -> None:
        await cancel_all([*self._replying, *filter(None, [self._task])])

    async def ask(self, worker: str, body: bytes, wait_s: float = 2.0) -> bytes:
        """The reply of that worker's handler. StreamUnavailable if it cannot be reached or is late; then it is not
        known whether it has handled the request."""
        replies = await self._ask(CHANNEL + worker, body, wait_s)
        if not replies:
            raise StreamUnavailable(OWNER_UNREACHABLE)
        return replies[0]

    async def ask_all(self, body: bytes, wait_s: float = 2.0) -> list[bytes]:
        """The replies of all workers, this one included. StreamUnavailable if one of them is late or has failed."""
        return await self._ask(EVERYBODY, body, wait_s)

    async def _ask(self, channel: str, body: bytes, wait_s: float) -> list[bytes]:
        """The replies of those who listen to the channel."""
        if len(body) > MAX_BYTES:
            raise InvalidQuestion(f"A command to another worker has at most {MAX_BYTES:,} bytes.")
        number = secrets.token_hex(8)
        answers = self._requests[number] = asyncio.Queue()
        request = RpcMessage(number=number, sender=self._worker, body=body)
        try:
            async with asyncio.timeout(wait_s):
                receivers = await self._redis.execute("PUBLISH", channel, _pack(request)) if self.up else 0
                replies = [await answers.get() for _ in range(receivers if isinstance(receivers, int) else 0)]
        except (TimeoutError, RedisGone) as error:
            raise StreamUnavailable(OWNER_UNREACHABLE) from error
        finally:
            del self._requests[number]
        if any(reply.failed for reply in replies):
            raise StreamUnavailable(OWNER_UNREACHABLE)
        return [reply.body for reply in replies]

    @contextmanager
    def listen(self, channel: str) -> Iterator[ChannelWatch]:
        """A watch on a channel. It is also notified once the subscription is active, and after every interruption."""
        watch = ChannelWatch()
        watches = self._watches.get(channel)
        if watches is None:
            watches = self._watches[channel] = set()
            self._send("SUBSCRIBE", channel)
        watches.add(watch)
        try:
            yield watch
        finally:
            watches.discard(watch)
            if not watches:
                del self._watches[channel]
                self._send("UNSUBSCRIBE", channel)

    def _send(self, verb: str, channel: str) -> None:
        if self._connected:
            self._unsent.append((verb, channel))
            self._to_send.set()

    async def _run(self) -> None:
        while True:
            connection = self._connections.new()
            try:
                await self._serve(connection)
            except* (self._connections.error, OSError, TimeoutError):
                pass
            finally:
                self._mark_interrupted()
                await connection.disconnect(nowait=True)
            for watch in [watch for watches in self._watches.values() for watch in watches]:
                watch.notify()
            await asyncio.sleep(self._timing.reconnect_s)

    async def _serve(self, connection: "AbstractConnection") -> None:
        """Until an error. One task reads and one writes; if one fails, the other is cancelled."""
        async with asyncio.timeout(self._timing.silence_s):
            await connection.connect()  # type: ignore[no-untyped-call]
        self._received_at = asyncio.get_running_loop().time()
        self._unsent = [("SUBSCRIBE", channel) for channel in (self._address, EVERYBODY, *self._watches)]
        self._connected = True
        async with asyncio.TaskGroup() as group:
            group.create_task(self._send_loop(connection))
            group.create_task(self._receive_loop(connection))

    async def _send_loop(self, connection: "AbstractConnection") -> None:
        while True:
            unsent, self._unsent = self._unsent, []
            self._to_send.clear()
            async with asyncio.timeout(self._timing.silence_s):
                await connection.send_packed_command(b"".join(map(packed, unsent)) or PING, check_health=False)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._timing.ping_every_s):
                    await self._to_send.wait()
            if asyncio.get_running_loop().time() - self._received_at > self._timing.silence_s:
                raise TimeoutError

    async def _receive_loop(self, connection: "AbstractConnection") -> None:
        while True:
            try:
                message: Reply = await connection.read_response(disable_decoding=True)
            except (self._connections.error, OSError):
                self._mark_interrupted()  # At once, before any command reaches the next Redis.
                raise
            self._received_at = asyncio.get_running_loop().time()
            if self.since is None:
                self.since = self._clock.monotonic()
                if self.interrupted_at > float("-inf"):
                    self.interrupted_at = self.since
            self._receive(message)

    def _mark_interrupted(self) -> None:
        self._connected = False
        if self.since is not None:
            self.since = None
            self.interrupted_at = self._clock.monotonic()

    def _receive(self, message: Reply) -> None:
        match message:
            case [b"message", bytes(channel), bytes(body)] if channel == self._address.encode("utf-8", "surrogatepass"):
                with suppress(msgspec.MsgspecError):  # Not a message of ours.
                    self._handle(_unpack(body), self._handler)
            case [b"message", bytes(channel), bytes(body)] if channel == EVERYBODY.encode():
                with suppress(msgspec.MsgspecError):
                    self._handle(_unpack(body), self._handler_of_all)
            case [b"message" | b"subscribe", bytes(channel), _]:
                for watch in self._watches.get(channel.decode("utf-8", "surrogatepass"), ()):
                    watch.notify()

    def _handle(self, message: RpcMessage, handler: Handler | None) -> None:
        if not message.sender:
            answers = self._requests.get(message.number)
            if answers is not None:
                answers.put_nowait(message)
            return
        task = asyncio.create_task(self._reply(message, handler if len(self._replying) < MAX_REPLYING else None))
        self._replying.add(task)
        task.add_done_callback(self._replying.discard)

    async def _reply(self, message: RpcMessage, handler: Handler | None) -> None:
        """Run the handler and send its reply, or that it failed."""
        answer = RpcMessage(number=message.number, failed=True)
        try:
            if handler is not None:
                body = await handler(message.body)
                if len(body) <= MAX_BYTES:
                    answer = RpcMessage(number=message.number, body=body)
        except AnabranchError:
            return  # The failure is sent below.
        finally:
            with suppress(RedisGone):
                await self._redis.execute("PUBLISH", CHANNEL + message.sender, _pack(answer))
