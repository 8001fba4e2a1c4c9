"""Following steps over a WebSocket: the same events and cursors, and the same answers to those who may not."""

import asyncio
import itertools
import json
import socket as socketlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from anabranch.configuration.settings import Settings
from anabranch.entrypoints.http.server import HeadCapped, Socket
from conftest import running
from support.planner_fixtures import Desk, desk

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("planner-socket")]

SESSIONS = itertools.count()
PATIENCE_S = 20.0
ORIGIN = "https://app.example"
UPGRADE = (
    b"Host: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def planner(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Desk]:
    folder = tmp_path_factory.mktemp("data")
    async with desk(folder, people=("alice", "bob"), heartbeat_interval=0.1, cors_origins=("*", ORIGIN)) as opened:
        yield opened


class ImpatientHttp(HeadCapped):
    stall_s = 0.0


class ImpatientSocket(Socket):
    stall_s = 0.0


@pytest_asyncio.fixture(loop_scope="module")
async def impatient(tmp_path: Path) -> AsyncIterator[Desk]:
    """A server that does not wait for clients that do not read."""
    settings = Settings(log_level="ERROR", data_dir=str(tmp_path), heartbeat_interval=0.1)
    async with running(settings, ImpatientHttp, ImpatientSocket) as server:
        yield Desk(server, {})


@pytest.fixture
def session() -> str:
    return f"sess-{next(SESSIONS)}"


@pytest.fixture(autouse=True)
async def patience() -> AsyncIterator[None]:
    async with asyncio.timeout(PATIENCE_S):
        yield


@asynccontextmanager
async def socket(
    planner: Desk, session: str, step: str, query: str = "", who: str | None = None, **more: Any
) -> AsyncIterator[ClientConnection]:
    url = f"{planner.url.replace('http', 'ws')}/planner/sessions/{session}/steps/{step}/ws{query}"
    headers = {**planner.headers(who), **more.pop("headers", {})}
    async with connect(url, additional_headers=headers, **{"max_size": None, **more}) as connection:
        yield connection


async def read(connection: ClientConnection, count: int) -> list[dict[str, Any]]:
    """The next events, at least this many."""
    found: list[dict[str, Any]] = []
    while len(found) < count:
        message = json.loads(await connection.recv(decode=True))
        if message["type"] == "event_batch":
            found += message["events"]
    return found


async def rest(connection: ClientConnection) -> tuple[list[dict[str, Any]], int | None]:
    """All messages up to the end but heartbeats, and with what code it was closed."""
    messages: list[dict[str, Any]] = []
    with suppress(ConnectionClosed):
        while True:
            messages.append(json.loads(await connection.recv()))
    return [message for message in messages if message["type"] != "heartbeat"], connection.close_code


async def refusal(planner: Desk, session: str, step: str, query: str = "", **more: Any) -> tuple[int, Any]:
    with pytest.raises(InvalidStatus) as refused:
        async with socket(planner, session, step, query, **more):
            pass
    response = refused.value.response
    assert response.headers["X-Correlation-ID"]
    return response.status_code, json.loads(response.body)


async def test_a_planner_websocket_sends_the_events_of_the_stream(planner: Desk, session: str) -> None:
    await planner.begin(session, "p")
    async with socket(planner, session, "p") as connection:
        assert connection.response is not None
        assert connection.response.headers["X-Correlation-ID"]
        assert connection.subprotocol is None
        first = json.loads(await connection.recv())
        assert (first["type"], first["batch_sequence"]) == ("event_batch", 1)
        assert json.loads(await connection.recv()) == {"type": "heartbeat", "sequence": 2}
        for n in range(6):
            await planner.push(session, "p", "lookup", status="partial", payload={"n": n})
        await planner.push(session, "p", "lookup")
        messages, code = await rest(connection)
    assert code == 1000
    assert all(1 <= len(message["events"]) <= 5 for message in messages)
    numbers = [message["batch_sequence"] for message in messages]
    assert numbers == list(range(2, len(numbers) + 2))
    found = first["events"] + [event for message in messages for event in message["events"]]
    assert found == (await planner.events(session, "p"))["events"]
    for cursor in (0, 3, len(found)):
        async with socket(planner, session, "p", f"?last_event_id={cursor}") as connection:
            messages, code = await rest(connection)
        assert [event for message in messages for event in message["events"]] == found[cursor:]
        assert code == 1000
    async with socket(planner, session, "p", "?last_event_id=1000") as connection:
        messages, _ = await rest(connection)
    assert messages[0] == {"type": "reset", "sequence": len(found), "epoch": 0}


async def test_a_planner_websocket_continues_with_the_next_step(planner: Desk, session: str) -> None:
    await planner.begin(session, "p", next_step_id="q")
    async with socket(planner, session, "p") as connection:
        await planner.push(session, "p", "lookup")
        last = (await read(connection, 7))[-1]["sequence"]
        await planner.begin(session, "q")
        await planner.push(session, "q", "lookup")
        messages, code = await rest(connection)
    events = [event for message in messages for event in message["events"]]
    assert {event["plan_step_id"] for event in events} == {"q"}
    assert [event["sequence"] for event in events] == list(range(last + 1, last + len(events) + 1))
    assert code == 1000


async def test_a_web_page_sends_its_key_as_a_websocket_subprotocol(planner: Desk, session: str) -> None:
    await planner.begin(session, "p", who="alice")
    offered = ["anabranch.planner", f"bearer.{planner.secrets['alice']}"]
    async with socket(planner, session, "p", subprotocols=offered, origin=ORIGIN) as connection:
        assert connection.subprotocol == "anabranch.planner"
        assert await read(connection, 1)
    bobs = ["anabranch.planner", f"bearer.{planner.secrets['bob']}"]
    assert (await refusal(planner, session, "p", subprotocols=bobs))[0] == 404
    assert (await refusal(planner, session, "p", subprotocols=["anabranch.planner", "bearer.ab_none"]))[0] == 401
    assert (await refusal(planner, session, "p", who="alice", subprotocols=bobs))[0] == 401, "two keys are none"


async def test_only_pages_of_this_site_or_a_named_one_get_in(planner: Desk, session: str) -> None:
    await planner.begin(session, "p", who="alice")
    for origin in (ORIGIN, planner.url):
        async with socket(planner, session, "p", who="alice", origin=origin) as connection:
            assert await read(connection, 1)
    for origin in ("https://evil.example", "null", f"{planner.url}.evil.example", "*"):
        status, refused = await refusal(planner, session, "p", who="alice", origin=origin)
        assert (status, refused["error"]) == (403, "forbidden")


async def test_a_planner_websocket_of_another_caller_is_refused_as_unknown(planner: Desk, session: str) -> None:
    await planner.begin(session, "p", who="alice")
    found = await refusal(planner, session, "p", who="bob")
    assert found == await refusal(planner, session, "none", who="bob")
    assert found[0] == 404
    assert found == await refusal(planner, session, "p"), "nor does the operator"
    assert (await refusal(planner, session, "p", "?last_event_id=abc", who="bob"))[0] == 422
    assert (await refusal(planner, session, "x" * 201))[0] == 422


async def test_other_addresses_refuse_websockets(planner: Desk) -> None:
    for path, status in (("/health", 404), ("/v1/query", 404), ("/planner/sessions/s/steps/p/stream", 405)):
        with pytest.raises(InvalidStatus) as refused:
            async with connect(planner.url.replace("http", "ws") + path):
                pass
        assert refused.value.response.status_code == status
        assert json.loads(refused.value.response.body)["error"]


async def test_messages_of_a_websocket_client_are_ignored_and_limited(planner: Desk, session: str) -> None:
    await planner.begin(session, "p")
    async with socket(planner, session, "p") as connection:
        for _ in range(100):
            await connection.send("hello")
        assert await read(connection, 1)
        await connection.send("x" * 70_000)
        assert (await rest(connection))[1] == 1009


async def test_a_websocket_client_that_sends_too_much_is_disconnected(planner: Desk, session: str) -> None:
    await planner.begin(session, "p")
    async with socket(planner, session, "p", ping_interval=None) as connection:
        with suppress(ConnectionClosed):
            for number in range(2_000):
                await connection.ping(str(number).ljust(100))
        assert (await rest(connection))[1] == 1006


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"X-Long: " + b"x" * 20_000, 431),
        (b"\r\n".join(b"X-%d: x" % n for n in range(300)), 431),
        (b"Sec-WebSocket-Version: 1", 400),
        (b"Sec-WebSocket-Protocol: \xff\xfe", 400),
        (b"Origin: \xff", 403),
        (b"Host: evil.example", 401),
    ],
    ids=["long", "many", "version", "protocol", "origin", "host"],
)
async def test_an_invalid_websocket_handshake_is_refused(
    planner: Desk, session: str, head: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    await planner.begin(session, "p")
    host, port = planner.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    version = b"" if b"Version" in head else b"Sec-WebSocket-Version: 13\r\n"
    writer.write(b"GET /planner/sessions/%b/steps/p/ws HTTP/1.1\r\n" % session.encode() + UPGRADE + version + head)
    writer.write(b"\r\n\r\n")
    answer = await reader.readline()
    await reader.read()
    writer.close()
    assert answer.split()[1] == b"%d" % status, answer
    assert not [record for record in caplog.records if record.exc_info], "nothing broke"


@pytest.mark.parametrize(
    ("head", "goodbye"),
    [
        (b"stream HTTP/1.1\r\nHost: localhost\r\n", b"0\r\n\r\n"),
        (b"ws HTTP/1.1\r\nSec-WebSocket-Version: 13\r\n" + UPGRADE, b"\x88\x02\x03\xf5"),
    ],
    ids=["stream", "socket"],
)
async def test_a_client_that_reads_nothing_is_disconnected(
    impatient: Desk, session: str, head: bytes, goodbye: bytes
) -> None:
    """A proper end would have to wait until all is read."""
    planner = impatient
    await planner.begin(session, "p")
    host, port = planner.url.removeprefix("http://").split(":")
    loop = asyncio.get_running_loop()
    with socketlib.socket() as lazy:
        lazy.setsockopt(socketlib.SOL_SOCKET, socketlib.SO_RCVBUF, 4_096)
        lazy.setblocking(False)
        await loop.sock_connect(lazy, (host, int(port)))
        await loop.sock_sendall(lazy, b"GET /planner/sessions/%b/steps/p/" % session.encode() + head + b"\r\n")
        assert await loop.sock_recv(lazy, 1)
        path, sent = f"/planner/sessions/{session}/steps/p/progress", {"payload": {"text": "x" * 400_000}}
        for _ in range(30):
            assert (await planner.ask("POST", path, sent))[0] == 202
        received = bytearray()
        with suppress(ConnectionResetError):
            while not received.endswith(goodbye) and (part := await loop.sock_recv(lazy, 65_536)):
                received += part
    assert len(received) < 30 * 400_000
    assert not received.endswith(goodbye)
