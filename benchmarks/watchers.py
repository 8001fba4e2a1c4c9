"""python -m benchmarks.watchers: two thousand clients watch one step, and fifty of them read nothing."""

import argparse
import asyncio
import socket
import time
from pathlib import Path
from statistics import median
from typing import cast

import msgspec
import uvloop
from rich.console import Console

from benchmarks.servers import Server, on_terminate_as_on_interrupt, serving
from benchmarks.streams import raise_open_files
from benchmarks.wire import Pool, post, post_head

CLIENTS = 2_000
DEAF = 50
PAIRS = 5
EVENTS = 20
EVERY_S = 0.35
BACKLOG = 400
BACKLOG_BYTES = 4_000
OPENING_AT_ONCE = 64
CAP_BYTES = 1024 * 1024
MOST_RATIO = 1.25
MARK = b'"sent":'
SESSION = "/planner/sessions/bench/steps"
RESULT = Path(__file__).parent / "results" / "watchers.json"


class Watcher(asyncio.Protocol):
    """One client. It notes how long each event was on its way; a deaf one asks and never reads."""

    def __init__(self, request: bytes, *, deaf: bool) -> None:
        self._request = request
        self._deaf = deaf
        self._tail = b""
        self.late_ms: list[float] = []
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        if self._deaf:
            self.transport.pause_reading()
            self.begun.set_result(None)
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        data = self._tail + data
        if not self.begun.done() and b"retry:" in data:
            self.begun.set_result(None)
        *whole, self._tail = data.split(b"\n\n")
        for block in whole:
            at = block.find(MARK)
            while at >= 0:
                sent = float(block[at + len(MARK) : block.index(b"}", at)])
                self.late_ms.append((now - sent) * 1000)
                at = block.find(MARK, at + 1)


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What those who read saw, and what the server took."""

    readers: int
    deaf: int
    p50_ms: float
    p99_ms: float
    events: int
    cpu_us_per_delivery: float
    rss_mb: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    runs: list[Run]
    ratio_median: float
    idle_mb: float
    most_mb: float
    kb_per_client: float


async def watch(server: Server, step: str, count: int, *, after: int, deaf: bool) -> list[Watcher]:
    head = f"GET {SESSION}/{step}/stream HTTP/1.1\r\nHost: {server.authority}\r\nLast-Event-ID: {after}\r\n\r\n"
    host, _, port = server.authority.partition(":")
    gate = asyncio.Semaphore(OPENING_AT_ONCE)

    async def one() -> Watcher:
        async with gate:
            connection = socket.socket()
            if deaf:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            connection.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(connection, (host, int(port)))
            _, watcher = await loop.create_connection(lambda: Watcher(head.encode(), deaf=deaf), sock=connection)
            await watcher.begun
            return watcher

    return await asyncio.gather(*(one() for _ in range(count)))


class Planner:
    """Who hands over steps, and pushes what they bring."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._pool = Pool(server.authority)

    async def send(self, path: str, body: object) -> dict[str, object]:
        request = post(post_head(self._server.authority, path), msgspec.json.encode(body))
        reply = await (await self._pool.send(request))
        assert reply.status in (200, 201, 202), (reply.status, reply.body[:300])
        return msgspec.json.decode(reply.body, type=dict[str, object])

    async def begin(self, step: str) -> int:
        """A step with a backlog that is larger than what a client may fall behind: the cursor after it."""
        subagents = [{"key": "talker", "deadline_ms": 600_000}, {"key": "backlog", "deadline_ms": 600_000}]
        await self.send(SESSION, {"plan_step_id": step, "expected_subagents": subagents})
        last = 0
        for number in range(1, BACKLOG + 1):
            body = {"status": "partial", "revision": number, "payload": {"text": "x" * BACKLOG_BYTES}}
            said = await self.send(f"{SESSION}/{step}/subagents/backlog/events", body)
            last = cast("int", said["sequence"])
        return last

    async def talk(self, step: str) -> None:
        for number in range(1, EVENTS + 1):
            payload = {"text": "y" * 200, "sent": time.monotonic()}
            body = {"status": "partial", "revision": number, "payload": payload}
            await self.send(f"{SESSION}/{step}/subagents/talker/events", body)
            await asyncio.sleep(EVERY_S)


async def run(server: Server, step: str, readers: int, deaf: int) -> Run:
    planner = Planner(server)
    after = await planner.begin(step)
    silent = await watch(server, step, deaf, after=0, deaf=True)
    clients = await watch(server, step, readers, after=after, deaf=False)
    await asyncio.sleep(1.0)
    before = server.cpu_s()
    await planner.talk(step)
    async with asyncio.timeout(60):
        while any(len(client.late_ms) < EVENTS for client in clients):  # noqa: ASYNC110  the clients have no bell
            await asyncio.sleep(0.05)
    used, rss = server.cpu_s() - before, server.rss_bytes()
    late = sorted(late for client in clients for late in client.late_ms)
    for client in (*clients, *silent):
        if client.transport is not None:
            client.transport.abort()
    await planner.send(f"{SESSION}/{step}/safety", {"decision": "block", "reason": "over"})
    await asyncio.sleep(0.5)
    return Run(
        readers=readers,
        deaf=deaf,
        p50_ms=round(median(late), 2),
        p99_ms=round(late[int(len(late) * 0.99)], 2),
        events=len(late),
        cpu_us_per_delivery=round(used / len(late) * 1e6, 1),
        rss_mb=round(rss / 2**20, 1),
    )


async def measure(server: Server, pairs: int, console: Console) -> Report:
    await run(server, "warm-up", 100, 5)
    idle = server.rss_bytes()
    runs: list[Run] = []
    ratios: list[float] = []
    for pair in range(pairs):
        without = await run(server, f"without-{pair}", CLIENTS - DEAF, 0)
        beside = await run(server, f"with-{pair}", CLIENTS - DEAF, DEAF)
        runs += [without, beside]
        ratios.append(beside.p50_ms / without.p50_ms)
        console.print(
            f"pair {pair + 1}: p50 {without.p50_ms:.1f} ms without, {beside.p50_ms:.1f} ms with the {DEAF} "
            f"(x {ratios[-1]:.2f}); p99 {without.p99_ms:.0f} / {beside.p99_ms:.0f} ms; CPU per delivery "
            f"{without.cpu_us_per_delivery:.0f} / {beside.cpu_us_per_delivery:.0f} µs; RSS {beside.rss_mb:.0f} MB"
        )
    most = max(each.rss_mb for each in runs)
    return Report(
        runs=runs,
        ratio_median=round(median(ratios), 3),
        idle_mb=round(idle / 2**20, 1),
        most_mb=most,
        kb_per_client=round((most - idle / 2**20) * 1024 / CLIENTS, 1),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/watchers.json")
    options = parser.parse_args()
    on_terminate_as_on_interrupt()
    raise_open_files()
    console = Console()
    with serving("anabranch", {"AGGREGATOR_LOG_LEVEL": "WARNING"}) as server:
        report = uvloop.run(measure(server, options.pairs, console))
    size = f"{report.kb_per_client:.0f} KB a client over the idle server's {report.idle_mb:.0f} MB"
    verdicts = {
        f"median of the pairs x {report.ratio_median:.2f} (at most {MOST_RATIO})": report.ratio_median <= MOST_RATIO,
        f"{size} (at most {CAP_BYTES // 1024} KB)": report.kb_per_client * 1024 <= CAP_BYTES,
    }
    for text, met in verdicts.items():
        console.print(f"{'[green]PASS[/]' if met else '[red]FAIL[/]'} {text}")
    if options.keep:
        RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


if __name__ == "__main__":
    main()
