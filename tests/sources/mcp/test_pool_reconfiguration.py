"""Changes while the pool runs: the configuration, a server's tools, and its session."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import psutil
import pytest
import uvicorn

from anabranch.domain.mcp import McpServer
from anabranch.domain.model import Status
from anabranch.domain.signals import McpServerStateChanged
from anabranch.testing import Recorder
from anabranch.testing.mcp import Scenario, ScenarioServer
from conftest import EndsAtOnce
from support.mcp_pool_fixtures import LIBRARIAN, ask, health, pooled, server, until

pytestmark = pytest.mark.xdist_group("mcp")


def processes() -> dict[str, psutil.Process]:
    """The servers that run, by name."""
    found = {}
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has just gone
            if LIBRARIAN in (line := child.cmdline())[1:3]:
                found[json.loads(line[-1])["name"]] = child
    return found


async def test_a_new_configuration_keeps_unchanged_connections() -> None:
    kept, changed, dropped = server("kept"), server("changed"), server("dropped", delay_ms=700)
    telemetry = Recorder()
    async with pooled(kept, changed, dropped, telemetry=telemetry) as pool:
        pool.warm()
        await pool.settled()
        assert [one.state for one in pool.health()] == ["ready"] * 3
        before = processes()
        in_flight = asyncio.create_task(ask(pool, "dropped", "still there"))
        await until(lambda: health(pool, "dropped").calls == 1)
        better = msgspec.structs.replace(kept, reputation=0.9)
        pool.update({"kept": better, "changed": server("changed", results=1), "fresh": server("fresh")}, 5.0)
        assert [one.name for one in pool.health()] == ["kept", "changed", "fresh"]
        # Whoever had chosen it a moment ago may still ask it.
        assert (await ask(pool, "dropped", "just chosen")).status is Status.SUCCESS
        assert (await in_flight).passages[0].text.startswith("dropped on <still there>")
        assert len((await ask(pool, "changed", "new")).passages) == 1
        assert (await ask(pool, "fresh", "new")).status is Status.SUCCESS
        await until(lambda: "dropped" not in processes())
        assert (await ask(pool, "dropped", "gone")).error == "There is no MCP server with this name."
        after = processes()
        assert after["kept"] == before["kept"]
        assert after["changed"] != before["changed"]
        assert health(pool, "kept").reconnects == 0
    moves = [(one.server, one.state) for one in telemetry.signals if isinstance(one, McpServerStateChanged)]
    assert [state for name, state in moves if name == "kept"] == ["connecting", "ready"]
    assert [state for name, state in moves if name == "dropped"] == ["connecting", "ready", "idle"]


async def test_another_server_in_the_configuration_does_not_connect_failed_ones_again() -> None:
    broken = McpServer(name="broken", url="http://127.0.0.1:9/mcp")
    telemetry = Recorder()
    async with pooled(broken, telemetry=telemetry) as pool:
        pool.warm()
        await pool.settled()
        attempts = [one for one in telemetry.signals if isinstance(one, McpServerStateChanged)]
        for number in range(5):
            other = McpServer(name="other", url=f"http://127.0.0.1:{number + 1}/mcp", enabled=False)
            pool.update({"broken": broken, "other": other}, 5.0, retry_failed=False)
        assert [one for one in telemetry.signals if getattr(one, "server", "") == "broken"] == attempts
        assert health(pool, "broken").state == "failed"


class Forgetful:
    """A server over HTTP that knows only the handshake, and forgets all sessions when told to."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._known: set[bytes] = set()
        self._forgotten: set[bytes] = set()
        self.sessions = 0

    def forget(self) -> None:
        self._forgotten |= self._known

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope.get("headers", ()))
        session = headers.get(b"mcp-session-id")
        if headers.get(b"mcp-method") == b"server/discover":
            await _answer(send, 400)
        elif session in self._forgotten:
            await _answer(send, 404)
        else:
            self.sessions += scope["type"] == "http" and session is None
            self._known |= {session} if session else set()
            await self._app(scope, receive, send)


async def _answer(send: Any, status: int) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@asynccontextmanager
async def over_http(scenario: Scenario) -> AsyncIterator[tuple[Forgetful, str]]:
    app = Forgetful(ScenarioServer(scenario, output=2).server.streamable_http_app())
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, lifespan="on")
    config.load()
    http = EndsAtOnce(config)
    http.lifespan = config.lifespan_class(config)
    await http.startup()
    try:
        yield app, f"http://127.0.0.1:{http.servers[0].sockets[0].getsockname()[1]}/mcp"
    finally:
        await http.shutdown()


async def test_an_expired_session_is_renewed_within_the_call() -> None:
    async with (
        over_http(Scenario(name="web")) as (app, url),
        pooled(McpServer(name="web", url=url), alone=False) as pool,
    ):
        assert (await ask(pool, "web", "first")).passages[0].text.startswith("web on <first>")
        assert (health(pool, "web").protocol, app.sessions) == ("2025-11-25", 1)
        app.forget()
        replies = await asyncio.gather(*(ask(pool, "web", f"call {number}") for number in range(5)))
        assert [reply.passages[0].text[:15] for reply in replies] == [f"web on <call {number}>" for number in range(5)]
        assert (health(pool, "web").reconnects, app.sessions) == (1, 2)
