"""What goes on under an API key ends soon after the key is revoked, on every surface and in its own form."""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from anabranch.app.event_streams import Timing
from anabranch.app.revocations import EVERY_S, REVOKED, Revocations
from anabranch.configuration.settings import Settings
from anabranch.domain.errors import AnabranchError
from anabranch.domain.model import Endpoint
from anabranch.entrypoints.cli.resources import alone
from anabranch.knowledge.records import keys
from anabranch.knowledge.records.database import StoreFailed
from anabranch.testing import Space
from conftest import Server, running
from support.knowledge_fixtures import records_in
from support.planner_fixtures import Desk
from support.scripted_subagent import END, PATIENCE_S, Speaker, asking, resuming

pytestmark = pytest.mark.xdist_group("revoked")

CHAT = {"prompt": "Why?", "model": {"slug": "speaker"}}
ASKED = {"query": "Why?", "sources": ["docs"], "threshold": 0}
ASK = {"name": "ask", "arguments": {"question": "Why?", "sources": ["docs"]}}
# How a question is asked on each surface, and what is said at the end of its answer.
SURFACES: dict[str, tuple[str, dict[str, Any], Callable[[bytes], Any], Any]] = {
    "chat": (
        "/api/v1/chat/stream",
        CHAT,
        lambda end: (end.split(b"\n")[0], _data(end)["error"], _data(end)["message"]),
        (b"event: error", "unauthorized", REVOKED),
    ),
    "query": (
        "/v1/query",
        {"query": "Why?", "sources": ["docs"]},
        lambda end: (end.split(b"\n")[0], _data(end)["code"], _data(end)["message"]),
        (b"event: error", "UNAUTHORIZED", REVOKED),
    ),
    "rag": (
        "/rag/stream",
        ASKED,
        lambda end: (_data(end)["type"], _data(end)["data"]["error_code"], _data(end)["data"]["details"]["reason"]),
        ("error", "unauthorized", REVOKED),
    ),
    "endpoints": (
        "/api/v1/endpoints/alice/writer/query",
        {"messages": "Why?", "stream": True},
        lambda end: _data(end.split(b"\n\n")[0])["error"]["code"],
        "unauthorized",
    ),
    "mcp": (
        "/mcp",
        {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": ASK},
        lambda end: _data(end)["result"]["structuredContent"]["error"],
        "unauthorized",
    ),
}


TIMING = Timing(keys_every_s=0.01)


class Key(NamedTuple):
    id: str
    secret: str

    @property
    def headers(self) -> dict[str, str]:
        accept = "application/json, text/event-stream"
        return {"Authorization": f"Bearer {self.secret}", "Accept": accept}


class House:
    """A server whose model says what it is told, and the keys to it."""

    def __init__(self, server: Server, speaker: Speaker, folder: Path) -> None:
        self.server = server
        self.speaker = speaker
        self.folder = folder

    def key(self, user: str = "alice", *, operator: bool = False) -> Key:
        made, secret = self._write(lambda db: keys.create(db, user=user, operator=operator))
        return Key(made.id, secret)

    async def identified(self, key: Key) -> None:
        """Wait until the server has looked the key up for a request, and the moment for which that is enough."""
        assert self.server.service._anabranch is not None
        used = self.server.service._anabranch._parts.key_use
        async with asyncio.timeout(PATIENCE_S):
            while key.id not in used._noted:  # noqa: ASYNC110 (nothing announces it)
                await asyncio.sleep(0.002)
        await asyncio.sleep(2 * TIMING.keys_every_s)

    def expire(self, key: Key) -> None:
        """Let its time be over now, as if it had been made with an earlier one."""
        query = "UPDATE keys SET expires_at = ? WHERE id = ?"
        self._write(lambda db: db.execute(query, (time.time(), key.id)).rowcount)

    def rotate(self, key: Key, overlap_s: float) -> Key:
        made, secret = self._write(lambda db: keys.rotate(db, key.id, overlap_s))
        return Key(made.id, secret)

    def end_overlap(self, key: Key) -> None:
        query = "UPDATE keys SET previous_until = ? WHERE id = ?"
        self._write(lambda db: db.execute(query, (time.time(), key.id)).rowcount)

    def revoke(self, key: Key) -> None:
        """Over a connection of its own, as another process does."""
        assert self._write(lambda db: keys.revoke(db, key.id))

    def _write(self, work: Callable[[Any], Any]) -> Any:
        database = records_in(self.folder)
        try:
            return database.writing(work)
        finally:
            database.close()

    def used(self, key: Key) -> float | None:
        found: keys.ApiKey = self._write(lambda db: keys.by_id(db, key.id))
        return found.last_used_at

    async def asked(self, count: int = 1) -> None:
        """Wait until so many questions are under way."""
        assert self.server.service._anabranch is not None
        runs = self.server.service._anabranch.runs._running
        async with asyncio.timeout(PATIENCE_S):
            while len(runs) != count:  # noqa: ASYNC110 (nothing announces it)
                await asyncio.sleep(0.002)


@asynccontextmanager
async def house(folder: Path, **given: Any) -> AsyncIterator[House]:
    async with Speaker() as speaker, Space(everything=True) as space:
        chosen = {
            "auth": "api_key",
            "log_level": "ERROR",
            "rate_limit": 0,
            "model_retries": 0,
            "query_rewriting": False,
            "data_dir": str(folder),
            "sources": {"docs": Endpoint(slug="docs", url=space.url, operator=True)},
            "models": {"speaker": Endpoint(slug="speaker", url=speaker.url, kind="openai", operator=True)},
            "published_models": {"alice/writer": "speaker"},
        }
        with alone(folder):  # there is nothing to index
            async with running(Settings(**{**chosen, **given}), timing=TIMING) as server:
                yield House(server, speaker, folder)


def _data(block: bytes) -> Any:
    return json.loads(block.split(b"data: ", 1)[1])


def test_revoked_keys_are_polled_within_seconds() -> None:
    assert EVERY_S <= 5


@pytest.mark.parametrize("surface", SURFACES)
async def test_an_answer_ends_in_an_error_of_its_own_surface(tmp_path: Path, surface: str) -> None:
    path, body, end_of, expected = SURFACES[surface]
    async with house(tmp_path / "data") as there:
        key, other = there.key(), there.key("bob")
        url = there.server.url + path
        async with asyncio.timeout(PATIENCE_S):
            asked = asyncio.create_task(there.server.session.post(url, json=body, headers=key.headers))
            await there.asked()
            there.revoke(other)
            there.speaker.says("Because ")
            there.revoke(key)
            async with await asked as response:
                text = (await response.read()).replace(b"\r\n", b"\n")
        assert response.status == 200
        said = [block for block in text.removesuffix(b"data: [DONE]\n\n").split(b"\n\n") if b"data: " in block]
        assert end_of(said[-1]) == expected
        await there.asked(0)
        async with there.server.session.post(url, json=body, headers=key.headers) as refused:
            assert refused.status == 401


async def test_a_json_answer_of_a_revoked_key_is_401(tmp_path: Path) -> None:
    async with house(tmp_path / "data") as there:
        key = there.key()
        asking_ = asyncio.create_task(there.server.post("/api/v1/chat", CHAT, headers=key.headers))
        await there.asked()
        there.revoke(key)
        status, error, _ = await asking_
    assert (status, error["error"], error["message"]) == (401, "unauthorized", REVOKED)


BODIES: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", "/v1/keys", {"user": "mallory", "operator": True}),
    ("POST", "/v1/query", ASKED),
    ("POST", "/api/v1/chat", CHAT),
    ("POST", "/mcp", SURFACES["mcp"][1]),
    ("POST", "/v1/ingest", {"collection_id": "notes", "documents": [{"content": "Herons."}]}),
]


@pytest.mark.parametrize(("method", "path", "body"), BODIES, ids=[path for _, path, _ in BODIES])
@pytest.mark.parametrize("chunked", [False, True], ids=["sized", "chunked"])
async def test_a_body_that_ends_after_its_key_was_revoked_does_nothing(
    tmp_path: Path, method: str, path: str, body: dict[str, Any], *, chunked: bool
) -> None:
    async with house(tmp_path / "data") as there:
        key = there.key(operator=True)
        sent = json.dumps(body).encode()
        begun, revoked = asyncio.Event(), asyncio.Event()

        async def dawdling() -> AsyncIterator[bytes]:
            yield sent[:1]
            begun.set()
            await revoked.wait()
            yield sent[1:]

        length = {} if chunked else {"Content-Length": str(len(sent))}
        headers = {**key.headers, "Content-Type": "application/json", **length}
        url = there.server.url + path
        asked = asyncio.create_task(there.server.session.request(method, url, data=dawdling(), headers=headers))
        await begun.wait()
        await there.identified(key)
        there.revoke(key)
        revoked.set()
        async with await asked as refused:
            assert refused.status == 401


async def test_a_revoked_key_ends_its_stream_on_the_open_chat_surface(tmp_path: Path) -> None:
    async with house(tmp_path / "data", auth="auto", endpoint_allowlist=("127.0.0.0/8",)) as there:
        key = there.key()
        request = {**CHAT, "model": there.speaker.endpoint}
        async with asking(there.server, "/api/v1/chat/stream", request, **key.headers, Prefer="none") as line:
            await line.hear(3)
            there.revoke(key)
            assert [one.data["message"] for one in await line.rest()] == [REVOKED]


async def test_the_command_revokes_it_from_another_process(tmp_path: Path) -> None:
    async with house(tmp_path / "data") as there:
        key = there.key()
        async with asking(there.server, "/api/v1/chat/stream", CHAT, **key.headers, Prefer="none") as line:
            await line.hear(3)
            revoked = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "anabranch", "keys", "revoke", key.id),
                cwd=tmp_path,
                env={**os.environ, "AGGREGATOR_DATA_DIR": str(there.folder)},
                stdout=asyncio.subprocess.DEVNULL,
            )
            assert await revoked.wait() == 0
            assert [one.data["message"] for one in await line.rest()] == [REVOKED]


async def test_streams_of_other_keys_continue(tmp_path: Path) -> None:
    async with house(tmp_path / "data") as there:
        alice, twin = there.key(), there.key()
        async with asking(there.server, "/api/v1/chat/stream", CHAT, **twin.headers, Prefer="none") as line:
            await line.hear(3)
            async with asking(there.server, "/api/v1/chat/stream", CHAT, **alice.headers, Prefer="none") as ended:
                await ended.hear(3)
                there.revoke(alice)
                assert [one.name for one in await ended.rest()] == ["error"]
            there.speaker.says("Because.", END)
            assert [one.name for one in await line.rest()] == ["token", "done"]


async def test_a_revoked_key_ends_reading_a_resumable_answer_of_its_owner(tmp_path: Path) -> None:
    async with house(tmp_path / "data") as there:
        asks, reads = there.key(), there.key()
        async with asking(there.server, "/api/v1/chat/stream", CHAT, **asks.headers) as line:
            heard = await line.hear(3)
            async with resuming(there.server, line.stream, **reads.headers) as reader:
                assert await reader.hear(3) == heard
                there.revoke(reads)
                assert await reader.rest() == []
            async with resuming(there.server, line.stream, **reads.headers) as refused:
                assert refused.status == 401
            there.revoke(asks)
            assert [one.data["message"] for one in await line.rest()] == [REVOKED]


async def test_a_revoked_key_ends_a_planner_stream_and_the_step_continues(tmp_path: Path) -> None:
    async with house(tmp_path / "data") as there:
        follows, socket, owner = there.key(), there.key(), there.key()
        planner = Desk(there.server, {"follows": follows.secret, "socket": socket.secret, "owner": owner.secret})
        await planner.begin("s", "p", who="follows")
        url = f"{there.server.url.replace('http', 'ws')}/planner/sessions/s/steps/p/ws"
        async with (
            asyncio.timeout(PATIENCE_S),
            planner.stream("s", "p", who="follows") as stream,
            connect(url, additional_headers=planner.headers("socket")) as connection,
        ):
            await stream.events(1)
            await connection.recv()
            there.revoke(follows)
            assert await stream.rest() == []
            there.revoke(socket)
            with pytest.raises(ConnectionClosed):
                await connection.recv()
            assert connection.close_code == 1008
            assert (await planner.push("s", "p", "lookup", who="owner"))[0] == 202
        assert (await planner.ask("GET", "/planner/sessions/s/steps/p/events", who="follows"))[0] == 401


async def test_a_planner_step_without_streaming_is_401_when_its_key_is_revoked(tmp_path: Path) -> None:
    async with house(tmp_path / "data", planner_streaming=False) as there:
        key = there.key()
        planner = Desk(there.server, {"alice": key.secret})
        body = {"plan_step_id": "p", "expected_subagents": [{"key": "lookup"}]}
        begun = asyncio.create_task(planner.ask("POST", "/planner/sessions/s/steps", body, "alice"))
        async with asyncio.timeout(PATIENCE_S):
            while (await planner.ask("GET", "/planner/sessions/s/steps/p/events", who="alice"))[0] != 200:
                pass
            there.revoke(key)
            status, error = await begun
    assert (status, error["message"]) == (401, REVOKED)


@pytest.mark.parametrize("surface", SURFACES)
async def test_an_answer_ends_when_its_key_expires(tmp_path: Path, surface: str) -> None:
    path, body, end_of, expected = SURFACES[surface]
    async with house(tmp_path / "data") as there:
        key, url = there.key(), there.server.url + path
        async with asyncio.timeout(PATIENCE_S):
            asked = asyncio.create_task(there.server.session.post(url, json=body, headers=key.headers))
            await there.asked()
            there.speaker.says("Because ")
            there.expire(key)
            async with await asked as response:
                text = (await response.read()).replace(b"\r\n", b"\n")
        said = [block for block in text.removesuffix(b"data: [DONE]\n\n").split(b"\n\n") if b"data: " in block]
        assert end_of(said[-1]) == expected
        async with there.server.session.post(url, json=body, headers=key.headers) as refused:
            assert refused.status == 401


async def test_streams_of_a_rotated_secret_end_with_the_overlap(tmp_path: Path) -> None:
    async with house(tmp_path / "data") as there:
        old = there.key()
        new = there.rotate(old, 3_600)
        async with asking(there.server, "/api/v1/chat/stream", CHAT, **old.headers) as line:
            heard = await line.hear(3)
            async with resuming(there.server, line.stream, **new.headers) as reader:
                assert await reader.hear(3) == heard
                there.end_overlap(old)
                assert [one.data["message"] for one in await line.rest()] == [REVOKED]
                assert [one.data["message"] for one in await reader.rest()] == [REVOKED]
        for key, status in ((old, 401), (new, 200)):
            async with there.server.session.get(f"{there.server.url}/v1/sources", headers=key.headers) as response:
                assert response.status == status


async def test_a_web_socket_is_closed_when_its_key_expires(tmp_path: Path) -> None:
    async with house(tmp_path / "data") as there:
        socket, owner = there.key(), there.key()
        planner = Desk(there.server, {"owner": owner.secret, "socket": socket.secret})
        await planner.begin("s", "p", who="owner")
        url = f"{there.server.url.replace('http', 'ws')}/planner/sessions/s/steps/p/ws"
        async with (
            asyncio.timeout(PATIENCE_S),
            connect(url, additional_headers=planner.headers("socket")) as connection,
        ):
            await connection.recv()
            there.expire(socket)
            with pytest.raises(ConnectionClosed):
                await connection.recv()
            assert connection.close_code == 1008


async def test_when_a_key_was_used_last_is_written_now_and_then(tmp_path: Path) -> None:
    async with house(tmp_path / "data") as there:
        key, unused, began = there.key(), there.key("bob"), time.time()
        for _ in range(3):
            async with there.server.session.get(f"{there.server.url}/v1/sources", headers=key.headers) as response:
                assert response.status == 200
        assert there.used(key) is None
    assert (there.used(key) or 0) >= began  # what was not written yet is at the end
    assert there.used(unused) is None


async def test_without_a_key_nothing_is_looked_up(tmp_path: Path) -> None:
    async with house(tmp_path / "data", auth="auto") as there:
        there.key()
        there.speaker.says("Because.", END)
        await there.server.stream(**CHAT)
        assert there.server.service._anabranch is not None
        assert there.server.service._anabranch.revocations._task is None


# --- the records behind it


class Records:
    """Ids of keys that are valid; `reading` is set while they are read, which goes on when `read` is."""

    def __init__(self, *valid: str) -> None:
        self.valid = set(valid)
        self.fails = 0
        self.reading, self.read = asyncio.Event(), asyncio.Event()

    async def __call__(self) -> set[str]:
        if self.fails:
            self.fails -= 1
            raise StoreFailed("The records cannot be read.")
        seen = set(self.valid)
        self.reading.set()
        await self.read.wait()
        return seen


@pytest.fixture
async def stopped() -> AsyncIterator[asyncio.Queue[AnabranchError]]:
    async with asyncio.timeout(PATIENCE_S):
        yield asyncio.Queue()


async def test_a_key_made_while_the_records_are_read_is_not_taken_for_revoked(
    stopped: asyncio.Queue[AnabranchError],
) -> None:
    records, newer = Records(), asyncio.Queue[AnabranchError]()
    revocations = Revocations(records, every_s=0)
    revocations.add("old", stopped.put_nowait)
    await records.reading.wait()
    revocations.add("new", newer.put_nowait)
    records.valid.add("new")
    records.read.set()
    assert (await stopped.get()).message == REVOKED
    await stopped.get()  # it is said again until it is heard
    assert newer.empty()
    await revocations.close()


async def test_records_that_cannot_be_read_are_read_again(stopped: asyncio.Queue[AnabranchError]) -> None:
    records = Records()
    records.fails = 3
    records.read.set()
    revocations = Revocations(records, every_s=0)
    revocations.add("key", stopped.put_nowait)
    await stopped.get()
    revocations.discard("key", stopped.put_nowait)
    assert revocations._task is not None
    await revocations._task  # with nobody left, nothing is read any more
    await revocations.close()
