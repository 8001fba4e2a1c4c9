"""A planner's desk: a server with keys for two people, and their clients."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from anabranch.app.event_streams import Timing
from anabranch.configuration.settings import Settings
from anabranch.knowledge.records import keys
from anabranch.knowledge.records.sqlite import SqliteDatabase
from conftest import Server, running


class Frame(NamedTuple):
    """One server-sent event."""

    id: str | None
    event: str
    data: dict[str, Any]


class Stream:
    """An open stream of server-sent events, as a client reads it."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        self.retry_ms = 0
        self._read = b""

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Frame:
        while True:
            while b"\n\n" not in self._read:
                more = await self.response.content.readany()
                if not more:
                    assert not self._read, "it broke off in the middle"
                    raise StopAsyncIteration
                self._read += more
            block, _, self._read = self._read.partition(b"\n\n")
            fields = dict(line.split(": ", 1) for line in block.decode().split("\n"))
            if "retry" in fields:
                self.retry_ms = int(fields["retry"])
                continue
            assert set(fields) <= {"id", "event", "data"}, block
            return Frame(fields.get("id"), fields["event"], json.loads(fields["data"]))

    async def events(self, count: int) -> list[dict[str, Any]]:
        """The next events, at least this many, whatever frames they come in."""
        found: list[dict[str, Any]] = []
        while len(found) < count:
            frame = await anext(self)
            if frame.event == "planner_stream":
                assert frame.id == str(frame.data["events"][-1]["sequence"])
                found += frame.data["events"]
        return found

    async def rest(self) -> list[Frame]:
        return [frame async for frame in self if frame.event != "heartbeat"]


class Desk:
    def __init__(self, server: Server, secrets: Mapping[str, str]) -> None:
        self.server = server
        self.url = server.url
        self.secrets = secrets
        self.session = server.session

    def headers(self, who: str | None) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.secrets[who]}"} if who is not None else {}

    async def ask(
        self, method: str, path: str, body: Any = None, who: str | None = None, **more: Any
    ) -> tuple[int, Any]:
        headers = {**self.headers(who), **more.pop("headers", {})}
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        async with self.session.request(method, self.url + path, data=data, headers=headers, **more) as response:
            text = await response.text()
            return response.status, json.loads(text) if text else None

    async def begin(self, session: str, step: str, *subagents: Any, who: str | None = None, **more: Any) -> Any:
        status, body = await self.ask(
            "POST", f"/planner/sessions/{session}/steps", envelope(step, *subagents, **more), who
        )
        assert status == 201, body
        return body

    async def push(self, session: str, step: str, key: str, who: str | None = None, **event: Any) -> tuple[int, Any]:
        path = f"/planner/sessions/{session}/steps/{step}/subagents/{key}/events"
        return await self.ask("POST", path, {"status": "success", **event}, who)

    async def events(self, session: str, step: str, query: str = "", who: str | None = None) -> Any:
        status, body = await self.ask("GET", f"/planner/sessions/{session}/steps/{step}/events{query}", who=who)
        assert status == 200, body
        return body

    @asynccontextmanager
    async def stream(
        self, session: str, step: str, query: str = "", who: str | None = None, **headers: str
    ) -> AsyncIterator[Stream]:
        path = f"/planner/sessions/{session}/steps/{step}/stream{query}"
        sent = {**self.headers(who), **{name.replace("_", "-"): value for name, value in headers.items()}}
        async with self.session.get(self.url + path, headers=sent) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            yield Stream(response)


def envelope(step: str, *subagents: Any, **more: Any) -> dict[str, Any]:
    expected = [one if isinstance(one, dict) else {"key": one} for one in subagents or ("lookup",)]
    return {"plan_step_id": step, "expected_subagents": expected, **more}


@asynccontextmanager
async def desk(
    folder: Path, *, people: Sequence[str] = (), timing: Timing = Timing(), **given: Any
) -> AsyncIterator[Desk]:
    """A server of its own, with a key for each of them; without a key one is the operator, at this very machine."""
    secrets = _keys(folder, people) if people else {}
    settings = {"log_level": "ERROR", "data_dir": str(folder), **given}
    async with running(Settings(**settings), timing=timing) as server:
        yield Desk(server, secrets)


def _keys(folder: Path, people: Sequence[str]) -> dict[str, str]:
    database = SqliteDatabase.open(folder)
    try:
        return {who: database.writing(partial(keys.create, user=who))[1] for who in people}
    finally:
        database.close()
