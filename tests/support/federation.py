"""A node that publishes, as those see it who ask it."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from anabranch import Anabranch
from anabranch.configuration.settings import Settings
from anabranch.entrypoints.cli.resources import alone
from anabranch.knowledge.model import Caller, NewDocument, Permissions
from anabranch.knowledge.records import keys
from anabranch.knowledge.records.sqlite import SqliteDatabase
from conftest import LOCAL, Server, running

PUBLIC = Permissions(visibility="public")
OPERATOR = Caller(operator=True)
PATIENCE_S = 30.0
OPENING = "When does the canteen open?"
# What is in alice's collection, by title.
SHELF = {
    "Canteen": ("The canteen opens at noon.", PUBLIC),
    "Staff canteen": (
        "The staff canteen opens at eleven.",
        Permissions(visibility="restricted", allowed_users=("carol",), allowed_groups=("board",)),
    ),
    "Secret canteen": ("The secret canteen opens at midnight.", Permissions(visibility="private")),
}
PUBLISHED = {"alice/docs": "shelf", "alice/canteen": "shelf", "bob/docs": "cellar", "Dora/attic": "cellar"}
KEYS: Mapping[str, dict[str, Any]] = {
    "bob": {"user": "bob"},
    "carol": {"user": "carol"},
    "erin": {"user": "erin", "groups": ("board",)},
    "root": {"user": "root", "operator": True},
}


class Seeded(NamedTuple):
    """A data folder with published collections, and the keys to it."""

    folder: Path
    models_dir: Path
    secrets: dict[str, str]

    def settings(self, **given: Any) -> Settings:
        chosen = {"data_dir": str(self.folder), "models_dir": str(self.models_dir), **given}
        return Settings(**{"endpoint_allowlist": LOCAL, "log_level": "ERROR", **chosen})

    def queries(self, transaction: str) -> list[dict[str, Any]]:
        """What the query log has under a transaction's token."""
        return logged(self.folder, "transaction_token", transaction)


class Reply(NamedTuple):
    status: int
    body: Any
    headers: Mapping[str, str]

    @property
    def documents(self) -> list[Any]:
        assert self.status == 200, self.body
        return list(self.body["references"]["documents"])

    @property
    def titles(self) -> list[str]:
        return sorted(document["metadata"]["title"] for document in self.documents)


class Node:
    def __init__(self, server: Server, secrets: Mapping[str, str]) -> None:
        self.server = server
        self.secrets = secrets

    @property
    def url(self) -> str:
        return self.server.url

    async def ask(self, path: str, messages: Any = OPENING, *, token: str | None = None, **more: Any) -> Reply:
        """Ask what is published under a slug or under owner/slug."""
        headers = {**more.pop("headers", {}), **({"Authorization": f"Bearer {token}"} if token is not None else {})}
        data = more.pop("data", None)
        sent = json.dumps({"messages": messages, **more}).encode() if data is None else data
        url = f"{self.url}/api/v1/endpoints/{path}/query"
        async with self.server.session.post(url, data=sent, headers=headers) as response:
            raw = await response.read()
            is_json = response.content_type == "application/json"
            return Reply(response.status, json.loads(raw) if is_json else raw.decode(), response.headers)

    async def raw(self, path: str, *lines: str, version: str = "1.1", body: str = "{}") -> Reply:
        """A request with exactly these header lines, answered with JSON."""
        status, sent = await self.sent(path, *lines, version=version, body=body)
        return Reply(status, json.loads(sent), {})

    async def sent(self, path: str, *lines: str, version: str = "1.1", body: str = "{}") -> tuple[int, str]:
        """A request with exactly these header lines: the status and the body, however it is written."""
        parts = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        head = [f"POST {path} HTTP/{version}", *lines, f"Content-Length: {len(body)}", "Connection: close"]
        writer.write("\r\n".join([*head, "", body]).encode("latin-1"))
        answer = (await reader.read()).decode()
        writer.close()
        head_text, _, sent = answer.partition("\r\n\r\n")
        return int(head_text.split(" ", 2)[1]), sent

    @property
    def host(self) -> str:
        return f"Host: {urlsplit(self.url).netloc}"


@pytest.fixture(scope="session")
def seeded(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> Iterator[Seeded]:
    """One folder for all of these tests, in whichever module they stand. Its lock is taken: nobody takes in more, so no
    node needs to start an indexer."""
    if _SEEDED:
        yield _SEEDED[0]
        return
    made = asyncio.run(seed(tmp_path_factory.mktemp("published"), models_dir))
    _SEEDED.append(made)
    with alone(made.folder):
        yield made


@asynccontextmanager
async def node(settings: Settings, secrets: Mapping[str, str] | None = None) -> AsyncIterator[Node]:
    async with running(settings) as server:
        yield Node(server, secrets or {})


_SEEDED: list[Seeded] = []


async def seed(folder: Path, models_dir: Path) -> Seeded:
    settings = Settings(data_dir=str(folder), models_dir=str(models_dir))
    async with Anabranch.open(settings=settings, indexing=True) as anabranch:
        room = await anabranch.knowledge()
        await room.create_collection(OPERATOR, "shelf", default_permissions=PUBLIC)
        await room.create_collection(OPERATOR, "cellar", default_permissions=PUBLIC)
        shelf = [
            NewDocument(source="text", data=content.encode(), title=title, identity=title, permissions=permissions)
            for title, (content, permissions) in SHELF.items()
        ]
        cellar = [
            NewDocument(
                source="text", data=f"Barrel {n} holds wine of the year {1900 + n}.".encode(), title=f"Barrel {n}"
            )
            for n in range(30)
        ]
        jobs = [await room.ingest(OPERATOR, "shelf", shelf), await room.ingest(OPERATOR, "cellar", cellar)]
        until = time.monotonic() + PATIENCE_S
        while not all([(await room.job(OPERATOR, job)).status == "completed" for job in jobs]):
            assert time.monotonic() < until
            await asyncio.sleep(0.02)
        for path, name in PUBLISHED.items():
            owner, _, slug = path.partition("/")
            await room.publish(OPERATOR, name, owner, slug)
    return Seeded(folder, models_dir, {name: new_key(folder, **given)[1] for name, given in KEYS.items()})


def new_key(folder: Path, **given: Any) -> tuple[str, str]:
    """A key's id and its secret."""
    database = SqliteDatabase.open(folder)
    try:
        key, secret = database.writing(lambda db: keys.create(db, **given))
        return key.id, secret
    finally:
        database.close()


def logged(folder: Path, column: str, value: str) -> list[dict[str, Any]]:
    database = SqliteDatabase.open(folder)
    try:
        wanted = f"SELECT * FROM queries JOIN responses ON responses.query = queries.id WHERE {column} = ?"
        return database.reading(lambda db: [dict(row) for row in db.execute(wanted, (value,))])
    finally:
        database.close()
