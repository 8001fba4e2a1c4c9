"""A running Anabranch with collections, and the people who have keys to it."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext, suppress
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import jwt
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import rsa

from anabranch.app.event_streams import Timing
from anabranch.app.indexer import indexer
from anabranch.app.records import open_records
from anabranch.configuration.settings import Settings
from anabranch.entrypoints.cli.resources import alone, is_indexed
from anabranch.knowledge.records import keys
from anabranch.knowledge.records.database import Database
from anabranch.testing.http_server import HttpServer
from conftest import LOCAL, PATIENT, Server, SseEvent, parse_sse, running
from support.opensearch_client import index_for
from support.postgres_server import database_for

PEOPLE: Mapping[str, tuple[str, ...]] = {"alice": ("staff",), "bob": (), "carol": ("staff", "board")}
PATIENCE_S = 30.0
OVER = ("completed", "failed", "cancelled")


class Reply(NamedTuple):
    status: int
    body: Any
    headers: Mapping[str, str]

    @property
    def code(self) -> Any:
        return self.body["code"]


class Library:
    """Calls as a person (by their key), or, without one, as the operator at this machine."""

    def __init__(self, server: Server, folder: Path, secrets: dict[str, str]) -> None:
        self.server = server
        self.folder = folder
        self.secrets = secrets

    async def call(self, method: str, path: str, body: Any = None, *, who: str | None = None, **options: Any) -> Reply:
        headers = {**options.pop("headers", {}), **self.key(who)}
        if body is not None:
            options["data"] = BytesIO(json.dumps(body).encode())
            headers = {"Content-Type": "application/json", **headers}
        async with self.server.session.request(method, self.server.url + path, headers=headers, **options) as response:
            raw = await response.read()
            is_json = response.content_type == "application/json" and raw
            return Reply(response.status, json.loads(raw) if is_json else raw.decode(), response.headers)

    async def good(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        reply = await self.call(method, path, body, **options)
        assert reply.status in (200, 201), reply
        return reply.body

    async def ask(self, query: str, *, who: str | None = None, **more: Any) -> Any:
        return await self.good("POST", "/v1/query", {"query": query, **more}, who=who)

    async def stream(self, query: str, *, who: str | None = None, **more: Any) -> list[SseEvent]:
        headers = {"Accept": "text/event-stream"}
        reply = await self.call("POST", "/v1/query", {"query": query, **more}, who=who, headers=headers)
        assert reply.status == 200, reply
        return parse_sse(reply.body)

    async def collection(self, name: str, *, who: str | None = None, **settings: Any) -> str:
        made = await self.good("POST", "/v1/collections", {"name": name, "settings": settings}, who=who)
        return str(made["id"])

    async def ingest(self, collection: str, *documents: dict[str, Any], who: str | None = None) -> list[Any]:
        """Take documents in and wait for what becomes of them."""
        body = {"collection_id": collection, "documents": list(documents)}
        accepted = await self.good("POST", "/v1/ingest", body, who=who)
        assert accepted["documents_queued"] == len(documents)
        return list((await self.job(accepted["job_id"], who=who))["documents"])

    async def job(self, job: str, *, who: str | None = None) -> Any:
        """The job, once it is over."""
        until = time.monotonic() + PATIENCE_S
        while True:
            found = await self.good("GET", f"/v1/ingest/{job}", who=who)
            if found["status"] in OVER:
                return found
            assert time.monotonic() < until, found
            await asyncio.sleep(0.02)

    def key(self, who: str | None) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.secrets[who]}"} if who is not None else {}


def text(content: str, **more: Any) -> dict[str, Any]:
    filename = more.pop("filename", None)
    return {"source": {"type": "text", "content": content, "filename": filename}, **more}


@asynccontextmanager
async def indexing(settings: Settings) -> AsyncIterator[None]:
    """The indexer in this process. It holds the lock of the data folder, so that no server and no command starts one: a
    process that loads everything again takes longer than most tests."""
    with alone(Path(settings.data_dir)):
        async with indexer(settings) as opened:
            work = asyncio.create_task(opened.run())
            try:
                yield
            finally:
                work.cancel()
                with suppress(asyncio.CancelledError):
                    await work


@asynccontextmanager
async def library(folder: Path, models_dir: Path, **given: Any) -> AsyncIterator[Library]:
    """A server of its own, with a key for everybody. Documents are indexed in this process, unless the folder's lock is
    taken already."""
    timing = given.pop("timing", Timing())
    settings = _settings(folder, models_dir, given)
    async with (
        nullcontext() if is_indexed(folder) else indexing(settings),
        _library(folder, settings, timing) as opened,
    ):
        yield opened


@asynccontextmanager
async def library_with_indexer(folder: Path, models_dir: Path, **given: Any) -> AsyncIterator[Library]:
    """The same with the indexer in a process of its own, as outside of tests."""
    async with _library(folder, _settings(folder, models_dir, given)) as opened:
        yield opened


def _settings(folder: Path, models_dir: Path, given: Mapping[str, Any]) -> Settings:
    # Most tests are about something else than what is private by default, or the evidence model, which loads slowly.
    quiet = {
        "endpoint_allowlist": LOCAL,
        "log_level": "ERROR",
        "evidence": "off",
        "aggregation": PATIENT,
        "default_visibility": "public",
    }
    place: dict[str, Any] = {
        "data_dir": str(folder),
        "database_url": database_for(folder),
        "models_dir": str(models_dir),
    }
    if (index := index_for(folder)) is not None:
        place |= {"index_url": index, "index_replicas": 0}
    return Settings(**{**quiet, **place, **given})


@asynccontextmanager
async def _library(folder: Path, settings: Settings, timing: Timing = Timing()) -> AsyncIterator[Library]:
    database = open_records(settings)
    try:
        secrets = {name: _secret(database, user=name, groups=groups) for name, groups in PEOPLE.items()}
        secrets["root"] = _secret(database, user="root", operator=True)
    finally:
        database.close()
    async with running(settings, timing=timing) as server:
        yield Library(server, folder, secrets)


def _secret(database: Database, **given: Any) -> str:
    return database.writing(lambda db: keys.create(db, **given))[1]


@cache
def _signing_key() -> rsa.RSAPrivateKey:
    """Made once: it takes a tenth of a second."""
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


class Issuer(HttpServer):
    """A hub that signs tokens."""

    def __init__(self) -> None:
        self._key = _signing_key()
        super().__init__(self._respond)

    def token(self, **claims: Any) -> str:
        said = {"aud": "library", "exp": int(time.time()) + 600, **claims}
        return jwt.encode(said, self._key, algorithm="RS256", headers={"kid": "one"})

    async def _respond(self, _request: web.BaseRequest) -> web.StreamResponse:
        public = jwt.algorithms.RSAAlgorithm.to_jwk(self._key.public_key(), as_dict=True)
        return web.json_response({"keys": [{**public, "kid": "one", "alg": "RS256"}]})


def form(*files: tuple[str, bytes], **fields: str) -> aiohttp.FormData:
    made = aiohttp.FormData(quote_fields=False, default_to_multipart=True)
    for name, value in fields.items():
        made.add_field(name, value)
    for filename, data in files:
        made.add_field("files", BytesIO(data), filename=filename, content_type="application/octet-stream")
    return made
