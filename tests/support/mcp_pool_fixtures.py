"""Real MCP servers, and a pool that must leave no task and no process."""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

from anabranch.domain.contracts import SystemClock
from anabranch.domain.mcp import McpServer, ServerHealth
from anabranch.domain.model import Context, Query, SourceReply
from anabranch.network.addresses import AddressGuard
from anabranch.network.outbound import AiohttpOutbound
from anabranch.sources.mcp.pool import Pool
from anabranch.sources.mcp.services import PoolServices
from anabranch.testing import Recorder

LIBRARIAN = str(Path(__file__).parent / "mcp_scenario_server.py")
MISHAPS = {word: word for word in ("hang", "freeze", "die", "error", "refuse", "garbage", "misfit", "ask", "rename")}


def server(name: str, *, env: dict[str, str] | None = None, **scenario: Any) -> McpServer:
    given = json.dumps({"name": name, "mishaps": MISHAPS, **scenario})
    args = ("-P", LIBRARIAN, "--scenario", given)
    return McpServer(name=name, command=sys.executable, args=args, env=env or {})


@asynccontextmanager
async def pooled(*servers: McpServer, timeout_s: float = 10.0, alone: bool = True, **more: Any) -> AsyncIterator[Pool]:
    """A pool of these; when it is closed, no process and no task is left, if there was nobody else to begin one."""
    tasks, children = asyncio.all_tasks(), set(psutil.Process().children(recursive=True))
    outbound = AiohttpOutbound(guard=AddressGuard(), max_reply_bytes=1_000_000)
    shared = {"outbound": outbound, "clock": SystemClock(), "telemetry": Recorder(), "max_reply_bytes": 1_000_000}
    pool = Pool({one.name: one for one in servers}, PoolServices(**{**shared, **more}), timeout_s)
    try:
        yield pool
    finally:
        await pool.close()
        await outbound.close()
    left = {one for one in asyncio.all_tasks() - tasks if not one.done()}
    assert not (left and alone)
    assert set(psutil.Process().children(recursive=True)) <= children


def context(seconds: float = 60.0) -> Context:
    return Context(correlation_id="test", deadline=time.monotonic() + seconds)


async def ask(pool: Pool, name: str, text: str, limit: int = 10) -> SourceReply:
    return await pool.source(name).search(Query(text=text, limit=limit, similarity_threshold=0.5), context())


def health(pool: Pool, name: str) -> ServerHealth:
    return next(one for one in pool.health() if one.name == name)


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  it is another process that changes it
            await asyncio.sleep(0.01)
