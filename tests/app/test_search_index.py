"""The settings of an index in OpenSearch, each with what it does."""

import asyncio
import ssl
import time
from base64 import b64encode
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import connector

from anabranch.app.search_index import index_writer, open_index
from anabranch.configuration.settings import Settings, load, secrets_of
from anabranch.domain.errors import IndexFailed
from anabranch.knowledge.index.opensearch.client import IndexUnreachable
from anabranch.knowledge.index.opensearch.writer import OpenSearchWriter
from anabranch.knowledge.records import index_position
from support.knowledge_fixtures import Workshop, workshop
from support.opensearch_client import outbound
from support.opensearch_server import new_index, shared_opensearch, why_missing
from support.tls_proxy import tls_proxy


@pytest.fixture
async def shop(tmp_path: Path) -> AsyncIterator[Workshop]:
    async with workshop(tmp_path) as opened:
        await opened.collection()
        await opened.put("Herons eat fish.")
        yield opened


def settings_of(shop: Workshop, **given: Any) -> Settings:
    return msgspec.structs.replace(load({}), data_dir=str(shop.folder), **given)


async def folded(shop: Workshop, settings: Settings) -> str:
    """The name of the index that was written with the settings."""

    def fold() -> str:
        with index_writer(settings, shop.database, shop.embedder.name) as writer:
            writer.fold()
        found = shop.database.reading(index_position.current)
        assert found is not None
        return found.name

    return await asyncio.to_thread(fold)


async def held(shop: Workshop, settings: Settings, path: str) -> Any:
    def ask() -> Any:
        with index_writer(settings, shop.database, shop.embedder.name) as writer:
            assert isinstance(writer, OpenSearchWriter)
            return writer._client.call("GET", path)

    return await asyncio.to_thread(ask)


@pytest.mark.cluster
@pytest.mark.skipif(why_missing() is not None, reason=str(why_missing()))
@pytest.mark.timeout(180)
async def test_a_new_index_has_the_name_shards_and_replicas_of_the_settings(shop: Workshop) -> None:
    url = new_index()
    settings = settings_of(shop, index_url=url, index_shards=3, index_replicas=0)
    name = await folded(shop, settings)
    assert name.startswith(f"{url.rpartition('/')[2]}-")
    [found] = (await held(shop, settings, f"{name}/_settings")).values()
    assert (found["settings"]["index"]["number_of_shards"], found["settings"]["index"]["number_of_replicas"]) == (
        "3",
        "0",
    )


@pytest.mark.cluster
@pytest.mark.skipif(why_missing() is not None, reason=str(why_missing()))
@pytest.mark.timeout(180)
@pytest.mark.parametrize("login", ["basic", "key"])
async def test_logins_over_tls(shop: Workshop, login: str, monkeypatch: pytest.MonkeyPatch) -> None:
    basic = f"Basic {b64encode(b'ada:p@ss').decode()}"
    server = shared_opensearch().nodes[0].url
    name = new_index().rpartition("/")[2]
    async with tls_proxy(server, [basic, "ApiKey secret"]) as (address, authority):
        trusting = ssl.create_default_context()
        authority.configure_trust(trusting)
        monkeypatch.setattr(connector, "_SSL_CONTEXT_VERIFIED", trusting)  # as with SSL_CERT_FILE
        given = {"index_url": f"{address}/{name}", "index_api_key": "secret"}
        if login == "basic":
            given = {"index_url": f"{address.replace('//', '//ada:p%40ss@')}/{name}"}
        settings = settings_of(shop, index_replicas=0, **given)
        assert (await folded(shop, settings)).startswith(name)
        wrong = settings_of(shop, index_url=f"{address.replace('//', '//ada:wrong@')}/{name}")
        with pytest.raises(IndexFailed, match=r"refuses the login \(HTTP 401\)") as raised:
            await folded(shop, wrong)
        assert "wrong" not in str(raised.value)


async def test_index_timeout_bounds_the_wait_for_a_silent_server(shop: Workshop) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    settings, given = settings_of(shop, index_url=f"http://127.0.0.1:{port}/docs", index_timeout=0.1), outbound()
    try:
        index: Any = open_index(settings, given, shop.embedder.name)
        began = time.monotonic()
        with pytest.raises(IndexUnreachable, match=r"does not answer within 0\.1 s"):
            await index._client.call("POST", "_msearch", b"")
        assert time.monotonic() - began < 2
    finally:
        await given.close()
        server.close()
        await server.wait_closed()


def test_the_login_is_a_secret() -> None:
    settings = load(
        {"AGGREGATOR_INDEX_URL": "https://ada:p4ssw0rd@host:9200/docs", "AGGREGATOR_INDEX_API_KEY": "k3y-of-ada"}
    )
    assert {"p4ssw0rd", "k3y-of-ada"} <= set(secrets_of(settings))


async def test_without_a_url_the_index_is_in_the_data_folder(shop: Workshop) -> None:
    with index_writer(settings_of(shop), shop.database, shop.embedder.name) as writer:
        await asyncio.to_thread(writer.fold)
    assert (shop.folder / "index" / "CURRENT").is_file()
