"""Letters between workers, and bells that ring in all of them: one connection that listens, and finds its way back."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import msgspec
from hiredis import pack_command

from anabranch.domain.contracts import Clock
from anabranch.domain.errors import AnabranchError, InvalidQuestion, StreamUnavailable
from anabranch.domain.model import Value
from anabranch.redis.client import Connections, Redis, RedisGone, Reply

if TYPE_CHECKING:
    from redis.asyncio.connection import AbstractConnection

Handler = Callable[[bytes], Awaitable[bytes]]

MAX_BYTES = 8 * 1024 * 1024
MAX_ANSWERING = 1_000
# A connection on which nothing is heard for this long, not even an echo, is given up for another.
PING_EVERY_S = 1.0
SILENCE_S = 3.0
AGAIN_S = 0.2

OWNER_UNREACHABLE = "The worker that holds this stream cannot be reached."
TOO_LARGE = "This is too large to be handed to another worker."


class RpcMessage(Value, array_like=True):
    """A question if somebody is to be answered; else the answer to one. One that `failed` has no answer."""

    number: str
    sender: str = ""
    body: bytes = b""
    failed: bool = False


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(RpcMessage).decode


class ChannelWatch:
    """Rings when something was published on a channel, and when something may have been missed there."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()

    def ring(self) -> None:
        self._rung.set()

    async def wait(self, wait_s: float) -> bool:
        """Whether it rang since the last time, or does within that time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._rung.wait()
        rung = self._rung.is_set()
        self._rung.clear()
        return rung


class WorkerRpc:
    """Nothing is delivered twice; what gets lost is not sent again, and whoever asked hears so after its time."""

    def __init__(self, url: str, redis: Redis, *, worker: str, clock: Clock) -> None:
        self._connections = Connections(url)
        self._redis = redis
        self._clock = clock
        self._address = _address(worker)
        self._worker = worker
        self._handler: Handler | None = None
        self._task: asyncio.Task[None] | None = None
        self._answering: set[asyncio.Task[None]] = set()
        self._asked: dict[str, asyncio.Future[RpcMessage]] = {}
        self._chimes: dict[str, set[ChannelWatch]] = {}
        # What is still to be said on the connection: channels to hear, or not to hear any more.
        self._unsaid: list[tuple[str, str]] = []
        self._something = asyncio.Event()
        self._connected = False
        self._heard_at = 0.0
        self.since: float | None = None
        # When it was last interrupted, or came back after that: all that Redis holds may be another since then.
        self.shaken_at = float("-inf")

    @property
    def up(self) -> bool:
        """Whether it listens; `since` is since when."""
        return self.since is not None

    def start(self, handler: Handler) -> None:
        self._handler = handler
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        tasks = [*self._answering, *([self._task] if self._task else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def ask(self, worker: str, body: bytes, wait_s: float = 2.0) -> bytes:
        """What that worker's handler says to this; StreamUnavailable if nobody is there or the answer is late, and then
        it is not known whether it was heard."""
        if len(body) > MAX_BYTES:
            raise InvalidQuestion(TOO_LARGE)
        if not self.up:
            raise StreamUnavailable(OWNER_UNREACHABLE)
        number = secrets.token_hex(8)
        answer: asyncio.Future[RpcMessage] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            async with asyncio.timeout(wait_s):
                letter = RpcMessage(number=number, sender=self._worker, body=body)
                if not await self._redis.execute("PUBLISH", _address(worker), _pack(letter)):
                    raise StreamUnavailable(OWNER_UNREACHABLE)
                said = await answer
        except (TimeoutError, RedisGone) as error:
            raise StreamUnavailable(OWNER_UNREACHABLE) from error
        finally:
            del self._asked[number]
        if said.failed:
            raise StreamUnavailable(OWNER_UNREACHABLE)
        return said.body

    @contextmanager
    def listen(self, channel: str) -> Iterator[ChannelWatch]:
        """A chime for what is published there. It also rings once it really listens, and after every interruption."""
        chime = ChannelWatch()
        chimes = self._chimes.get(channel)
        if chimes is None:
            chimes = self._chimes[channel] = set()
            self._say("SUBSCRIBE", channel)
        chimes.add(chime)
        try:
            yield chime
        finally:
            chimes.discard(chime)
            if not chimes:
                del self._chimes[channel]
                self._say("UNSUBSCRIBE", channel)

    def _say(self, verb: str, channel: str) -> None:
        if self._connected:
            self._unsaid.append((verb, channel))
            self._something.set()

    async def _run(self) -> None:
        while True:
            connection = self._connections.new()
            try:
                await self._listening(connection)
            except (self._connections.error, OSError, TimeoutError):
                pass
            finally:
                self._lost()
                await connection.disconnect(nowait=True)
            for chime in [chime for chimes in self._chimes.values() for chime in chimes]:
                chime.ring()
            await asyncio.sleep(AGAIN_S)

    async def _listening(self, connection: "AbstractConnection") -> None:
        """Until something goes wrong. One reads and one writes; whichever fails ends the other."""
        async with asyncio.timeout(SILENCE_S):
            await connection.connect()  # type: ignore[no-untyped-call]
        self._heard_at = asyncio.get_running_loop().time()
        self._unsaid = [("SUBSCRIBE", channel) for channel in (self._address, *self._chimes)]
        self._connected = True
        talking = asyncio.create_task(self._talk(connection))
        hearing = asyncio.create_task(self._hear(connection))
        try:
            done, _ = await asyncio.wait((talking, hearing), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (talking, hearing):
                task.cancel()
            await asyncio.gather(talking, hearing, return_exceptions=True)

    async def _talk(self, connection: "AbstractConnection") -> None:
        while True:
            unsaid, self._unsaid = self._unsaid, []
            self._something.clear()
            packed = b"".join([_packed(command) for command in unsaid]) or _packed(("PING",))
            async with asyncio.timeout(SILENCE_S):
                await connection.send_packed_command(packed, check_health=False)
            with suppress(TimeoutError):
                async with asyncio.timeout(PING_EVERY_S):
                    await self._something.wait()
            if asyncio.get_running_loop().time() - self._heard_at > SILENCE_S:
                raise TimeoutError

    async def _hear(self, connection: "AbstractConnection") -> None:
        while True:
            try:
                said: Reply = await connection.read_response(disable_decoding=True)
            except (self._connections.error, OSError):
                self._lost()  # At once, before anybody hears from the Redis that comes after this one.
                raise
            self._heard_at = asyncio.get_running_loop().time()
            if self.since is None:
                self.since = self._clock.monotonic()
                if self.shaken_at > float("-inf"):
                    self.shaken_at = self.since
            match said:
                case [b"message" | b"subscribe" as kind, bytes(channel), body]:
                    self._came(kind == b"message", channel.decode("utf-8", "surrogatepass"), body)

    def _lost(self) -> None:
        self._connected = False
        if self.since is not None:
            self.since = None
            self.shaken_at = self._clock.monotonic()

    def _came(self, message: bool, channel: str, body: Reply) -> None:
        if channel != self._address:
            for chime in self._chimes.get(channel, ()):
                chime.ring()
        elif message and isinstance(body, bytes):
            with suppress(msgspec.MsgspecError):  # Whatever that was, it was none of our letters.
                self._opened(_unpack(body))

    def _opened(self, letter: RpcMessage) -> None:
        if not letter.sender:
            answer = self._asked.get(letter.number)
            if answer is not None and not answer.done():
                answer.set_result(letter)
            return
        task = asyncio.create_task(self._answered(letter, busy=len(self._answering) >= MAX_ANSWERING))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answered(self, letter: RpcMessage, *, busy: bool) -> None:
        """Whatever becomes of a question, whoever asked hears of it."""
        answer = RpcMessage(number=letter.number, failed=True)
        try:
            if self._handler is not None and not busy:
                body = await self._handler(letter.body)
                if len(body) <= MAX_BYTES:
                    answer = RpcMessage(number=letter.number, body=body)
        except AnabranchError:
            return  # That there is no answer is said below.
        finally:
            with suppress(RedisGone):
                await self._redis.execute("PUBLISH", _address(letter.sender), _pack(answer))


def _address(worker: str) -> str:
    return f"anabranch:post:{worker}"


def _packed(command: tuple[str, ...]) -> bytes:
    packed: bytes = pack_command(tuple(part.encode("utf-8", "surrogatepass") for part in command))  # type: ignore[arg-type]
    return packed
