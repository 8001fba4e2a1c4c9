"""Workers that share a real Redis, a wire to it on which things happen, and time that passes there when told to."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec

from anabranch.domain.contracts import Clock, SystemClock
from anabranch.domain.errors import Conflict, NotFound, StreamUnavailable
from anabranch.domain.eventlog import LogLimits
from anabranch.domain.signals import Signal
from anabranch.eventlog.redis.log import RedisLog
from anabranch.eventlog.redis.store import RedisLogTiming
from anabranch.redis.client import Redis, Reply
from anabranch.redis.rpc import WorkerRpc
from anabranch.testing.fakes import Recorder

TIMEOUT_S = 0.25
WAIT_S = 20.0

TRAVEL = """
for _, key in ipairs(redis.call('KEYS', '*')) do
  local left = redis.call('PTTL', key)
  if left >= 0 and left <= tonumber(ARGV[1]) then
    redis.call('DEL', key)
  else
    if left >= 0 then redis.call('PEXPIRE', key, left - ARGV[1]) end
    if string.match(key, ':stream$') then redis.call('HINCRBY', key, 'lease', -ARGV[1]) end
  end
end
"""


class Worker(msgspec.Struct, kw_only=True):
    """One process' part in it."""

    redis: Redis
    post: WorkerRpc
    log: RedisLog
    signals: list[Signal]


async def nothing(body: bytes) -> bytes:
    return b""


@asynccontextmanager
async def worker(
    url: str,
    *,
    name: str = "here",
    clock: Clock | None = None,
    timeout_s: float = TIMEOUT_S,
    timing: RedisLogTiming = RedisLogTiming(),
    probe_every_s: float = 0.5,
    **limits: Any,
) -> AsyncIterator[Worker]:
    clock = clock or SystemClock()
    recorder = Recorder()
    redis = Redis(url, timeout_s=timeout_s, clock=SystemClock(), telemetry=recorder, probe_every_s=probe_every_s)
    post = WorkerRpc(url, redis, worker=name, clock=clock)
    bounds = LogLimits(**{"ttl_s": 60.0, "lease_s": 5.0, **limits})
    log = RedisLog(redis, post, worker=name, clock=clock, limits=bounds, timing=timing)
    post.start(nothing)
    log.start()
    try:
        await until(lambda: post.up)
        yield Worker(redis=redis, post=post, log=log, signals=recorder.signals)
    finally:
        await log.close()
        await post.close()
        await redis.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110  what is waited for happens in another process
            await asyncio.sleep(0.005)


async def eventually(condition: Callable[[], Awaitable[object]]) -> None:
    """Ask again until it is so, also as long as there is an error instead that passes."""
    async with asyncio.timeout(WAIT_S):
        while True:
            with suppress(StreamUnavailable, NotFound, Conflict):
                if await condition():
                    return
            await asyncio.sleep(0.005)


async def travel(redis: Redis, seconds: float) -> Reply:
    """What Redis holds becomes that much older."""
    return await redis.execute("EVAL", TRAVEL, 0, round(seconds * 1000))


class Wire:
    """The way to a Redis, on which things happen. `open`: nothing does. `cut`: nobody gets through. `deaf`: what is
    sent arrives, and then the line breaks before the reply. `late`: what is sent arrives only when it is let go, also
    if its sender has gone by then. With a `victim`, the last two happen only to what has these bytes in it."""

    def __init__(self, port: int) -> None:
        self.victim = b""
        self._port = port
        self._mode = "open"
        self._server: asyncio.Server | None = None
        self._lines: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._late: list[tuple[asyncio.StreamWriter, bytes]] = []
        self.swallowed = 0

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    @property
    def held(self) -> int:
        return len(self._late)

    async def __aenter__(self) -> "Wire":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.become("cut")
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def become(self, mode: str) -> None:
        self._mode = mode
        if mode == "cut":
            for line in list(self._lines):
                line.close()

    def let_go(self) -> None:
        for line, sent in self._late:
            line.write(sent)
        self._late.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self._mode == "cut":
            writer.close()
            return
        there, there_writer = await asyncio.open_connection("127.0.0.1", self._port)
        if self._mode == "cut":
            writer.close()
            there_writer.close()
            return
        self._lines |= {writer, there_writer}
        struck = asyncio.Event()
        back = asyncio.create_task(self._back(there, writer, struck))
        self._tasks.add(back)
        back.add_done_callback(self._tasks.discard)
        while sent := await _some(reader):
            struck.clear()
            if self.victim in sent:
                struck.set()
            if self._mode == "late" and struck.is_set():
                self._late.append((there_writer, sent))
            else:
                there_writer.write(sent)
        if not any(line is there_writer for line, _ in self._late):
            there_writer.close()
            self._lines.discard(there_writer)
        writer.close()
        self._lines.discard(writer)

    async def _back(self, there: asyncio.StreamReader, writer: asyncio.StreamWriter, struck: asyncio.Event) -> None:
        while said := await _some(there):
            if self._mode == "deaf" and struck.is_set():
                self.swallowed += 1
                writer.close()
            elif not writer.is_closing():
                writer.write(said)
        writer.close()


async def _some(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read(65536)
    except OSError:
        return b""
