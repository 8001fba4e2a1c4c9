"""GET /v1/cluster: the nodes that share the records, for operators; where nothing is shared, the one node."""

import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from anabranch.app import records as where_records_are
from anabranch.configuration.settings import Settings
from anabranch.knowledge.model import Erased
from anabranch.knowledge.records import erasures, nodes
from anabranch.knowledge.records.erasures import ErasureTimes
from anabranch.knowledge.records.nodes import Node
from anabranch.knowledge.records.postgres import PostgresDatabase
from support.collection_server import Library, library, library_with_indexer, text
from support.postgres_server import PostgresServer, running_postgres, shared_postgres

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("postgres-cluster")]

FIELDS = {
    *("id", "name", "version", "started_at", "seen_at", "age_s", "is_alive", "leads", "is_this", "behind"),
    "erased_pass",
}


@pytest.fixture
def url() -> Iterator[str]:
    made = shared_postgres().create_database()
    yield made
    shared_postgres().drop(made)


def beat(url: str, name: str, **given: Any) -> str:
    """Another node says that it is alive; its id."""
    identifier = f"00000000-0000-4000-8000-{secrets.token_hex(6)}"
    known = {"version": "0.9", "started_at": 1e9, "seen_at": 0.0, "seq": 0, "erased_pass": 0, **given}
    with closing(PostgresDatabase.open(url)) as database:
        database.writing(partial(nodes.beat, node=Node(id=identifier, name=name, **known)))
    return identifier


async def cluster(shelf: Library) -> dict[str, Any]:
    found: dict[str, Any] = await shelf.good("GET", "/v1/cluster", who="root")
    return found


async def test_without_a_shared_database_there_is_one_node(tmp_path: Path, models_dir: Path) -> None:
    async with library(tmp_path / "data", models_dir, database_url=None) as shelf:
        collection = await shelf.collection("animals")
        await shelf.ingest(collection, text("Herons eat fish."))
        found = await cluster(shelf)
        (one,) = found["nodes"]
        assert set(one) == FIELDS
        assert (found["records"]["kind"], found["records"]["is_reachable"]) == ("sqlite", True)
        assert (one["id"], one["version"], one["is_alive"], one["leads"], one["is_this"]) == (
            *("local", version("anabranch"), True, True, True),
        )
        assert (found["leader"], found["waiting_documents"], found["last_pass"]) == ("local", 0, 0)
        assert one["age_s"] == 0
        assert one["started_at"] is not None
        assert one["behind"] <= found["head"]
        assert found["head"] >= 2


async def test_asking_makes_no_records(tmp_path: Path, serve: Any) -> None:
    async with serve() as server, server.session.get(f"{server.url}/v1/cluster") as reply:
        assert reply.status == 200
        found = await reply.json()
    assert (found["head"], found["records"]["server_version"], len(found["nodes"])) == (0, None, 1)
    assert not (tmp_path / "data").exists()


async def test_only_operators_read_it(tmp_path: Path, models_dir: Path) -> None:
    async with library(tmp_path / "data", models_dir) as shelf:
        reply = await shelf.call("GET", "/v1/cluster", who="alice")
        assert (reply.status, reply.code) == (403, "FORBIDDEN")
        described = await shelf.good("GET", "/openapi.json")
        operation = described["paths"]["/v1/cluster"]["get"]
        assert operation["operationId"] == "get_cluster"
        assert {"200", "401", "403", "503"} <= set(operation["responses"])


async def test_nodes_that_share_a_database_are_shown_with_what_they_lack(
    tmp_path: Path, models_dir: Path, url: str
) -> None:
    folder = tmp_path / "data"
    async with library(folder, models_dir, database_url=url) as shelf:
        collection = await shelf.collection("animals")
        await shelf.ingest(collection, text("Herons eat fish."))
        this = where_records_are.node_of(Settings(data_dir=str(folder), database_url=url))
        first, second = beat(url, "first", seq=1), beat(url, "second")
        with closing(PostgresDatabase.open(url)) as database:
            database.writing(lambda db: nodes.leave(db, second))
            database.writing(
                lambda db: erasures.request(db, "document", Erased(documents=("x",)), ErasureTimes(settle_s=9e9))
            )
            due = database.reading(lambda db: erasures.listed(db, 1))
            database.writing(lambda db: erasures.passed(db, due, due[0].requested_at))
        found = await cluster(shelf)
        by_id = {one["id"]: one for one in found["nodes"]}
        assert set(by_id) == {this, first, second}
        assert all(set(one) == FIELDS for one in found["nodes"])
        assert found["records"]["kind"] == "postgres"
        assert found["records"]["server_version"].partition(".")[0].isdigit()
        assert found["leader"] == min(this, first)
        assert [one["id"] for one in found["nodes"] if one["leads"]] == [found["leader"]]
        assert [one["id"] for one in found["nodes"] if one["is_this"]] == [this]
        assert by_id[first]["behind"] == found["head"] - 1
        assert (by_id[first]["is_alive"], by_id[first]["age_s"] < 5) == (True, True)
        assert (by_id[second]["is_alive"], by_id[second]["seen_at"], by_id[second]["age_s"]) == (False, None, None)
        assert (found["last_pass"], by_id[first]["erased_pass"]) == (1, 0)


@pytest.fixture
async def alone(tmp_path: Path) -> AsyncIterator[PostgresServer]:
    with running_postgres(tmp_path / "postgres", durable=True) as server:
        yield server


@pytest.mark.parametrize("how", ["kill", "pause"])
async def test_a_database_that_cannot_be_reached_is_said_to_be(
    tmp_path: Path, models_dir: Path, alone: PostgresServer, how: str
) -> None:
    async with library_with_indexer(tmp_path / "data", models_dir, database_url=alone.create_database()) as shelf:
        getattr(alone, how)()
        try:
            found = await shelf.good("GET", "/v1/cluster")  # the operator on this machine needs no key
        finally:
            (alone.restart if how == "kill" else alone.resume)()
        assert found == {
            "records": {"kind": "postgres", "is_reachable": False, "server_version": None},
            "nodes": [],
            "leader": None,
            "head": None,
            "last_pass": None,
            "waiting_documents": None,
        }
        assert (await cluster(shelf))["records"]["is_reachable"]
