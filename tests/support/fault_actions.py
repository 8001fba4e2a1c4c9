"""What happens in each fault scenario."""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import psutil

from support.fault_clients import Asking, Reader
from support.fault_world import LEASE_S, World, tiny_disk, world

FEW, SOME = 40, 100
# How long something is frozen, killed or cut off, once.
OUTAGE_S = 3.0
PACE_S = 0.03
STORM_STREAMS, STORM_READERS = 100, 5_000

# Sources.


async def with_sources(slugs: Sequence[str], folder: Path, *, count: int = FEW) -> None:
    async with world(folder) as there:
        await beside(there, [there.asking(slug) for slug in slugs], count)


async def beside(there: World, faulty: Sequence[Asking], count: int) -> None:
    """So many of each faulty question, while victims ask the good source only."""
    victims = asyncio.create_task(there.clients.many(there.asking(group="victims"), SOME, every_s=PACE_S))
    await asyncio.gather(*(there.clients.many(asking, count, every_s=PACE_S) for asking in faulty))
    await victims


async def lying_sources(folder: Path) -> None:
    async with world(folder) as there:
        lies = there.upstreams.lies()
        verified = there.asking(*lies, model="scribe", group="verified", verify=True)
        await beside(there, [there.asking(*lies), there.asking(*lies, whole=True, group="whole")], FEW)
        await there.clients.many(verified, 4)


async def flapping_source(folder: Path) -> None:
    """A second broken, a second whole, again and again, and then whole. Half seconds were tried first: 61% of the calls
    went to a broken source, because the breaker looks at a window of 2 s and finds it as often whole as broken."""
    settings = {"breaker_window": 1, "breaker_calls": 4, "breaker_pause": 0.5}
    async with world(folder, settings=settings) as there:
        source = there.upstreams.flapping("flapping")
        asking = there.asking("flapping")
        broken_calls = broken_asked = 0
        for turn in range(8):
            source.broken, before = turn % 2 == 0, source.calls
            there.history.fault(f"source broken: {source.broken}")
            await there.clients.many(asking, 50, every_s=0.02)
            broken_calls += source.broken * (source.calls - before)
            broken_asked += source.broken * 50
        there.history.fact("share_of_calls_to_a_broken_source", broken_calls / broken_asked)
        began = time.monotonic()
        while (before := source.calls) is not None:
            await there.clients.ask(asking)
            if source.calls > before:
                break
            await asyncio.sleep(0.05)
        there.history.fact("closed_again_after_s", time.monotonic() - began)


# The model, and clients.


async def dying_model(folder: Path) -> None:
    # Or the circuit breaker spares most of them the call.
    async with world(folder, settings={"breaker_calls": 10_000}) as there:
        dying = [
            there.asking(model="stream-break", group="breaks off"),
            there.asking(model="stream-error", group="reports an error"),
            there.asking(model="stream-endless-line", group="endless line"),
        ]
        await beside(there, dying, 20)


async def clients_gone(folder: Path) -> None:
    """Clients leave after their first events, before, while and after the model writes."""
    async with world(folder) as there:
        leaving = [there.asking(model="slow-writer", group="gone", leaves_after=number) for number in (1, 3, 5, 9)]
        await beside(there, leaving, FEW)
        began = time.monotonic()
        with suppress(TimeoutError):
            async with asyncio.timeout(10):
                while await there.metric("anabranch_questions_running") or not _all_left(there):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        there.history.fact("upstreams_free_after_s", time.monotonic() - began)


def _all_left(there: World) -> bool:
    return all(one.finished or one.disconnected for one in there.space.requests)


# Redis.


async def during(there: World, fault: Callable[[], Awaitable[None]]) -> None:
    """Streams are being read when the fault comes, and answers are kept from before it. Victims ask questions that need
    no Redis, and others prefer a resumable answer. Afterwards every stream is read once more, from a server in turn."""
    clients = there.clients
    ended = await clients.many(there.asking(resumable=True, group="before"), 12)
    running = asyncio.create_task(
        clients.many(there.asking(model="slow-writer", resumable=True, group="during"), 24, every_s=0.02)
    )
    await asyncio.sleep(1.0)
    victims = asyncio.create_task(clients.many(there.asking(group="victims"), SOME, every_s=PACE_S))
    asked = asyncio.create_task(clients.many(there.asking(resumable=True, group="resumable"), SOME, every_s=PACE_S))
    await asyncio.gather(fault(), _moved(there, ended, "moved"))
    await victims
    await _moved(there, [*ended, *await running, *await asked], "after")


async def _moved(there: World, readers: Sequence[Reader], group: str) -> None:
    """Read each of these streams from the server that was not asked for it."""
    kept = [one for one in readers if one.stream is not None]
    others = [there.clients.reader(group, one.question, at=one.at + 1) for one in kept]
    await asyncio.gather(*(other.follow(str(one.stream)) for other, one in zip(others, kept, strict=True)))


async def redis_killed(folder: Path) -> None:
    async with world(folder, servers=2, redis=True) as there:

        async def fault() -> None:
            there.history.fault("Redis killed")
            there.valkey.kill()
            await asyncio.sleep(OUTAGE_S)
            await asyncio.to_thread(there.valkey.start)
            there.history.fault("Redis started, empty")

        await during(there, fault)


async def redis_frozen(folder: Path) -> None:
    async with world(folder, servers=2, redis=True) as there:

        async def fault() -> None:
            there.history.fault("Redis frozen")
            there.valkey.freeze()
            await asyncio.sleep(OUTAGE_S)
            there.valkey.thaw()
            there.history.fault("Redis thawed")

        await during(there, fault)


async def redis_emptied(folder: Path) -> None:
    async with world(folder, servers=2, redis=True) as there:

        async def fault() -> None:
            for _ in range(3):
                there.history.fault("Redis emptied")
                there.valkey.send("FLUSHALL")
                await asyncio.sleep(0.5)

        await during(there, fault)


async def redis_evicting(folder: Path) -> None:
    options = ("--maxmemory", "4mb", "--maxmemory-policy", "volatile-lru", "--maxmemory-samples", "10")
    async with world(folder, servers=2, redis=options) as there:

        async def fault() -> None:
            there.history.fault("Redis full of other keys")
            for turn in range(10):
                junk = (f"SET junk-{turn}-{number} {'x' * 1000} EX 600" for number in range(600))
                await asyncio.to_thread(there.valkey.send, *junk)
                await asyncio.sleep(0.1)
            there.history.fact("evicted_keys", int(there.valkey.info("stats")["evicted_keys"]))

        await during(there, fault)


async def redis_late(folder: Path) -> None:
    """Redis answers later than the time-out again and again, while clients leave and their commands are cancelled."""
    async with world(folder, servers=2, redis=True, proxied=True) as there:

        async def fault() -> None:
            for seconds in (0.1, 0.19, 0.21, 0.25, 0.4, 0.8):
                there.history.fault(f"replies of Redis stalled for {seconds} s")
                there.redis_proxy.stall()
                leaving = there.asking(model="slow-writer", resumable=True, group="gone", leaves_after=1)
                gone = asyncio.create_task(there.clients.many(leaving, 10))
                await asyncio.sleep(seconds)
                there.redis_proxy.resume()
                await gone
                await asyncio.sleep(0.2)

        await during(there, fault)


# Workers and clocks.


async def worker_killed(folder: Path) -> None:
    async with world(folder, workers=2, redis=True) as there:
        asking = there.asking(model="slow-writer", resumable=True, group="during")
        running = asyncio.create_task(there.clients.many(asking, FEW, every_s=0.02))
        await asyncio.sleep(1.5)
        there.kill(there.workers[0])
        killed = time.monotonic()
        streams = [one for one in there.clients.readers if one.stream is not None and not one.ended.is_set()]
        others = [there.clients.reader("other readers", one.question) for one in streams]
        await asyncio.gather(*(other.follow(str(one.stream)) for other, one in zip(others, streams, strict=True)))
        readers = [*await running, *others]
        there.history.fact("all_streams_ended_after_s", time.monotonic() - killed)
        there.history.fact("streams_without_an_end", sum(not one.ended.is_set() for one in readers))
        while len(there.workers) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await there.clients.many(there.asking(group="after"), SOME, every_s=PACE_S)


async def worker_paused(folder: Path) -> None:
    """One of two servers is stopped for longer than its lease, and wakes. Its streams are read from both."""
    async with world(folder, servers=2, redis=True) as there:
        asking = there.asking(model="slow-writer", resumable=True, group="paused")
        running = asyncio.create_task(there.clients.many(asking, 20, every_s=0.02, at=0))
        await asyncio.sleep(1.0)
        streams = [one for one in there.clients.readers if one.stream is not None and not one.ended.is_set()]
        with there.frozen(psutil.Process(there.programs[0].pid)):
            others = [there.clients.reader("other server", one.question, at=1) for one in streams]
            following = [other.follow(str(one.stream)) for other, one in zip(others, streams, strict=True)]
            asked = there.clients.many(there.asking(group="victims"), SOME, every_s=PACE_S, at=1)
            await asyncio.gather(asked, *following, asyncio.sleep(LEASE_S + 1.5))
        await running
        await there.clients.many(there.asking(group="after"), FEW, every_s=PACE_S)


async def clock_stepped(seconds: int, folder: Path) -> None:
    async with world(folder, servers=2, redis=True, stepped=True) as there:

        async def fault() -> None:
            there.step_clock(seconds)
            await asyncio.sleep(1.0)
            there.history.fact("redis_stepped_by_s", int(there.valkey.send("TIME").split()[2]) - time.time())
            logged = datetime.fromisoformat(there.programs[0].log[-1]["timestamp"])
            there.history.fact("server_stepped_by_s", logged.timestamp() - time.time())

        await during(there, fault)


# Disk, load and the end.


async def disk_full(folder: Path) -> None:
    """The data folder is on a disk of its own. While it is full, questions cannot be recorded."""
    disk = folder / "disk"
    wrapper = tiny_disk(disk, 12)
    # Callers of this machine are its operator: they have no proxy.
    settings = {"data_dir": disk / "data", "trusted_proxies": "[]"}
    async with world(folder, wrapper=wrapper, settings=settings) as there:
        url, (program,) = there.clients.urls[0], there.programs
        async with there.clients.request("POST", f"{url}/v1/collections", json={"name": "shop"}) as response:
            assert response.status in (200, 201), await response.text()
        await there.clients.many(there.asking(group="before"), 10)
        there.history.fault("disk full")
        ballast = Path(f"/proc/{program.pid}/root{disk}/ballast")
        await asyncio.to_thread(_fill, ballast)
        await there.clients.many(there.asking(group="full"), SOME, every_s=PACE_S)
        await there.clients.many(there.asking(group="full", resumable=True), 20, every_s=PACE_S)
        await asyncio.to_thread(ballast.unlink)
        there.history.fault("disk has room")
        await asyncio.sleep(1.1)  # times of the log are in whole seconds
        began = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        await there.clients.many(there.asking(group="after"), 20, every_s=PACE_S)
        there.history.fact("recorded_after", await _recorded(there, began, 20))
        missed = sum(line["event"] == "question_not_recorded" for line in program.log)
        there.history.fact("warnings_question_not_recorded", missed)


def _fill(ballast: Path) -> None:
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        for size in (65536, 512):
            with suppress(OSError):
                while file.write(b"x" * size):
                    pass


async def _recorded(there: World, since: str, count: int) -> int:
    """How many questions are in the log, or `count` as soon as there are as many."""
    began, found = time.monotonic(), 0
    while found < count and time.monotonic() - began < 5:
        async with there.clients.request(
            "GET", f"{there.clients.urls[0]}/v1/queries?limit=200&since={since}"
        ) as response:
            found = len((await response.json())["queries"])
        await asyncio.sleep(0.05)
    return found


async def ten_times(folder: Path) -> None:
    """The server can run 20 questions of a second each. 200 a second come, first from one caller, then from many."""
    settings = {"max_running": 20, "max_waiting": 0, "caller_running": 10, "caller_waiting": 10}
    async with world(folder, settings=settings) as there:
        there.upstreams.model("second-writer", words=4, every_s=0.1)
        victims = asyncio.create_task(there.clients.many(there.asking(group="victims"), 40, every_s=0.2))
        flood = [there.clients.reader("one caller") for _ in range(1_600)]
        for reader in flood:
            reader.share_address("10.200.0.1")
        await _flooded(there, flood)
        await victims
        many = [there.clients.reader("many callers") for _ in range(800)]
        await _flooded(there, many)
        refused = sorted(one.refused_after_s for one in (*flood, *many) if one.refused_after_s is not None)
        there.history.fact("p99_refusal_s", refused[int(0.99 * len(refused))])
        there.history.fact("refusals_without_retry_after", sum(one.refused_without_hint for one in (*flood, *many)))
        await there.clients.many(there.asking(group="after"), 10, every_s=0.1)


async def _flooded(there: World, readers: Sequence[Reader]) -> None:
    asking, tasks = there.asking(model="second-writer"), []
    for reader in readers:
        tasks.append(asyncio.create_task(reader.ask(asking)))
        await asyncio.sleep(1 / 200)
    await asyncio.gather(*tasks)


async def reconnect_storm(folder: Path) -> None:
    """Readers of a hundred running answers lose their connections at once, and all come back at once."""
    async with world(folder, settings={"generation_timeout": 60}) as there:
        there.upstreams.model("long-writer", words=15, every_s=1.5)
        streams = [there.clients.reader("askers") for _ in range(STORM_STREAMS)]
        asking = there.asking(model="long-writer", resumable=True)
        asked = [asyncio.create_task(one.ask(asking)) for one in streams]
        await asyncio.gather(*(one.opened.wait() for one in streams))
        readers = [there.clients.reader("storm", one.question) for one in streams for _ in range(50)]
        following = []
        for number, reader in enumerate(readers):
            following.append(asyncio.create_task(reader.follow(str(streams[number // 50].stream))))
            if number % 100 == 99:
                await asyncio.sleep(0.05)
        await asyncio.gather(*(one.opened.wait() for one in readers))
        await asyncio.gather(*(one.seen.wait() for one in readers))
        there.history.fact("readers_before", await there.metric("anabranch_stream_readers"))
        there.history.fault("all connections of readers lost")
        began = time.monotonic()
        for reader in readers:
            reader.cut()
        await asyncio.gather(*(one.reopened.wait() for one in readers))
        there.history.fact("all_back_after_s", time.monotonic() - began)
        waited = sorted(one.reopened_after_s for one in readers)
        there.history.fact("p99_reconnect_s", waited[int(0.99 * len(waited))])
        await asyncio.gather(*asked, *following)


async def sigterm(folder: Path) -> None:
    """Answers of 3 s are being written at the SIGTERM, and some that take longer than the drain timeout."""
    settings = {"drain_timeout": 4, "heartbeat_interval": 1}
    async with world(folder, settings=settings) as there:
        there.upstreams.model("long-writer", words=100, every_s=0.1)
        short, long = there.asking(model="slow-writer"), there.asking(model="long-writer", group="long")
        kept = there.asking(model="slow-writer", resumable=True, group="resumable")
        running = [asyncio.create_task(there.clients.many(one, 20)) for one in (short, long, kept)]
        await asyncio.sleep(1.0)
        (program,) = there.programs
        there.history.fault("SIGTERM")
        began = time.monotonic()
        program.send(signal.SIGTERM)
        await asyncio.sleep(1.0)
        there.history.fact("still_listening", await _listens(program.host, program.port))
        await asyncio.gather(*running)
        code = await program.ended()
        there.history.fact("exit_status", code)
        there.history.fact("ended_after_s", time.monotonic() - began)


async def _listens(host: str, port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    writer.close()
    return True
