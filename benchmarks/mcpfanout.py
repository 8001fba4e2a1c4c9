"""What `aggregate` costs on top of the slowest of five MCP servers over stdio."""

import argparse
import asyncio
import json
import re
import statistics
import sys
import tempfile
import time

import anabranch.testing.mcp
from anabranch import Anabranch
from anabranch.configuration.settings import Settings
from anabranch.domain.mcp import McpServer
from anabranch.domain.model import SourceReply

DELAYS_MS = (0, 5, 10, 20, 30)
TARGET_MS = 15.0
TOOK = re.compile(r"took ([\d.]+) ms$")


def servers(results: int) -> dict[str, McpServer]:
    found = {}
    for number, delay_ms in enumerate(DELAYS_MS):
        name = f"server-{number + 1}"
        scenario = {"name": name, "results": results, "delay_ms": delay_ms, "timed": True}
        args = ("-P", anabranch.testing.mcp.__file__, "--scenario", json.dumps(scenario))
        found[name] = McpServer(name=name, command=sys.executable, args=args)
    return found


class Clocked:
    """The slowest server of one aggregate, as the servers themselves report it in the titles of their results."""

    def __init__(self) -> None:
        self.slowest_ms = 0.0

    async def heard(self, reply: SourceReply, done: int, total: int) -> None:
        found = TOOK.search(reply.passages[0].title) if reply.passages else None
        if found is None:
            raise SystemExit(f"{reply.path} did not answer: {reply.error}")
        self.slowest_ms = max(self.slowest_ms, float(found[1]))


async def measure(calls: int, results: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(data_dir=folder, mcp_servers=servers(results))
        async with Anabranch.open(settings=settings) as ab:
            await ab.warm()
            await ab.servers_settled()
            over, slowest = [], []
            spent = 0.0
            for number in range(calls + 10):
                began, cpu = time.perf_counter(), time.process_time()
                clocked = Clocked()
                await ab.aggregate(f"river gauge number {number}", heard=clocked.heard)
                wall_ms = (time.perf_counter() - began) * 1000
                if number >= 10:
                    slowest.append(clocked.slowest_ms)
                    over.append(wall_ms - slowest[-1])
                    spent += time.process_time() - cpu
    print(f"{calls} aggregates, {len(DELAYS_MS)} servers that wait {DELAYS_MS} ms, {results} results each")
    print(f"slowest server, by its own account: median {statistics.median(slowest):.1f} ms")
    over_ms, p95_ms = statistics.median(over), sorted(over)[int(calls * 0.95)]
    print(f"on top of it (≤ {TARGET_MS:.0f} ms): median {over_ms:.1f} ms, p95 {p95_ms:.1f} ms")
    print(f"CPU of this process: {spent / calls * 1000:.1f} ms per aggregate")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--results", type=int, default=10, help="of each server")
    options = parser.parse_args()
    asyncio.run(measure(options.calls, options.results))


if __name__ == "__main__":
    main()
