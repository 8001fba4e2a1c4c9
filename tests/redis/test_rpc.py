"""Request/reply between workers over a real Redis that is killed and frozen."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from anabranch.domain.contracts import SystemClock
from anabranch.domain.errors import Conflict, InvalidQuestion, StreamUnavailable
from anabranch.redis.client import Redis
from anabranch.redis.rpc import MAX_BYTES, Handler, RpcTiming, WorkerRpc
from anabranch.testing.fakes import Recorder
from support.shared_log import WAIT_S, eventually, until
from support.valkey_server import Valkey, running_valkey

NOISE_S = 0.8
QUICK = RpcTiming(ping_every_s=0.05, silence_s=0.3, reconnect_s=0.02)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    with running_valkey(tmp_path_factory.mktemp("valkey")) as started:
        yield started


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Valkey]:
    with running_valkey(tmp_path) as started:
        yield started


async def echo(body: bytes) -> bytes:
    return b"heard " + body


@asynccontextmanager
async def open_rpc(
    url: str, name: str, handler: Handler = echo, timing: RpcTiming | None = None
) -> AsyncIterator[WorkerRpc]:
    redis = Redis(url, timeout_s=2.0, clock=SystemClock(), telemetry=Recorder(), probe_every_s=0.02)
    rpc = WorkerRpc(url, redis, worker=name, clock=SystemClock(), timing=timing)
    rpc.start(handler)
    try:
        await until(lambda: rpc.up)
        yield rpc
    finally:
        await rpc.close()
        await redis.close()


async def test_each_request_gets_its_own_reply(server: Valkey) -> None:
    async with open_rpc(server.url, "a") as a, open_rpc(server.url, "b") as b:
        questions = [str(number).encode() for number in range(100)]
        asked = [rpc.ask(worker, body) for body in questions for rpc, worker in ((a, "b"), (b, "a"))]
        answers = await asyncio.gather(*asked)
        assert answers == [b"heard " + body for body in questions for _ in range(2)]
        assert await a.ask("a", b"\x00\xff") == b"heard \x00\xff"
        assert await a.ask("b", bytes(MAX_BYTES - 10)) == b"heard " + bytes(MAX_BYTES - 10)


async def test_a_request_to_a_missing_worker_fails_at_once(server: Valkey) -> None:
    async with open_rpc(server.url, "a") as a:
        began = time.monotonic()
        with pytest.raises(StreamUnavailable):
            await a.ask("nobody", b"hello", wait_s=WAIT_S)
        with pytest.raises(InvalidQuestion):
            await a.ask("a", bytes(MAX_BYTES + 1))
        assert time.monotonic() - began < NOISE_S


async def test_a_late_or_failed_reply_is_stream_unavailable(server: Valkey) -> None:
    never = asyncio.Event()

    async def unreliable(body: bytes) -> bytes:
        if body == b"sleep":
            await never.wait()
        if body == b"too much":
            return bytes(MAX_BYTES + 1)
        if body == b"fail":
            raise Conflict("no")
        return body

    async with open_rpc(server.url, "a") as a, open_rpc(server.url, "b", unreliable):
        for body in (b"fail", b"too much"):
            began = time.monotonic()
            with pytest.raises(StreamUnavailable):
                await a.ask("b", body, wait_s=WAIT_S)
            assert time.monotonic() - began < WAIT_S / 2
        with pytest.raises(StreamUnavailable):
            await a.ask("b", b"sleep", wait_s=0.05)
        assert await a.ask("b", b"awake") == b"awake"


async def test_rpc_ignores_foreign_messages(server: Valkey) -> None:
    redis = Redis(server.url, timeout_s=2.0, clock=SystemClock(), telemetry=Recorder())
    async with open_rpc(server.url, "a") as a:
        for body in (b"", b"\xff\xff", b"{}", b"\x94\xa1x\xc0\xc0\xc0", b"\x91\xa1x"):
            assert await redis.execute("PUBLISH", "anabranch:post:a", body) == 1
        assert await a.ask("a", b"still here") == b"heard still here"
    await redis.close()


async def test_a_channel_watch_is_notified_of_messages_and_interruptions(server: Valkey) -> None:
    redis = Redis(server.url, timeout_s=2.0, clock=SystemClock(), telemetry=Recorder())
    async with open_rpc(server.url, "a") as a:
        with a.listen("news") as one, a.listen("news") as two, a.listen("other") as other:
            for watch in (one, two, other):
                assert await watch.wait(WAIT_S)  # it really listens now
            assert not await one.wait(0)
            assert await redis.execute("PUBLISH", "news", "") == 1
            assert await one.wait(WAIT_S)
            assert await two.wait(WAIT_S)
            assert not await other.wait(0.02)
            await redis.execute("CLIENT", "KILL", "TYPE", "pubsub")
            for watch in (one, two, other):
                assert await watch.wait(WAIT_S)
        await eventually(lambda: _has_no_subscriber(redis, "news"))
        with a.listen("news") as again:
            assert await again.wait(WAIT_S)
    await redis.close()


async def _has_no_subscriber(redis: Redis, channel: str) -> bool:
    return await redis.execute("PUBLISH", channel, "") == 0


async def test_rpc_reconnects_after_redis_was_killed(own_server: Valkey) -> None:
    async with open_rpc(own_server.url, "a", timing=QUICK) as a, open_rpc(own_server.url, "b", timing=QUICK):
        with a.listen("news") as watch:
            assert await watch.wait(WAIT_S)
            own_server.kill()
            await until(lambda: not a.up)
            began = time.monotonic()
            with pytest.raises(StreamUnavailable):
                await a.ask("b", b"hello", wait_s=WAIT_S)
            assert time.monotonic() - began < NOISE_S
            own_server.start()
            await until(lambda: a.up)
            assert await watch.wait(WAIT_S)

            async def heard() -> bool:
                return await a.ask("b", b"back") == b"heard back"

            await eventually(heard)


async def test_rpc_detects_a_frozen_redis(own_server: Valkey) -> None:
    async with open_rpc(own_server.url, "a", timing=QUICK) as a:
        interrupted_at = a.interrupted_at
        own_server.freeze()
        await until(lambda: not a.up)
        assert a.interrupted_at > interrupted_at
        own_server.thaw()
        await until(lambda: a.up)
        await eventually(lambda: a.ask("a", b"back"))


async def test_all_workers_are_asked_at_once(server: Valkey) -> None:
    async with open_rpc(server.url, "a") as a, open_rpc(server.url, "b") as b, open_rpc(server.url, "c") as c:
        for name, rpc in (("a", a), ("b", b), ("c", c)):
            rpc.handle_all(partial(named, name))
        assert sorted(await a.ask_all(b"x")) == [b"a x", b"b x", b"c x"]
        assert await a.ask("b", b"x") == b"heard x"


@pytest.mark.parametrize("trouble", ["late", "failed", "none"])
async def test_one_worker_without_a_reply_is_told_from_none_that_has_it(server: Valkey, trouble: str) -> None:
    async with open_rpc(server.url, "a") as a, open_rpc(server.url, "b") as b:
        a.handle_all(partial(named, "a"))
        if trouble != "none":
            b.handle_all(late if trouble == "late" else failing)
        with pytest.raises(StreamUnavailable):
            await a.ask_all(b"x", wait_s=0.2)


async def named(name: str, body: bytes) -> bytes:
    return name.encode() + b" " + body


async def late(body: bytes) -> bytes:
    await asyncio.sleep(1)
    return body


async def failing(body: bytes) -> bytes:
    raise Conflict("No.")
