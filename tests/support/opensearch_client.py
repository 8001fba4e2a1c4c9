"""Clients of the OpenSearch server of the tests."""

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from anabranch.app.startup import LazyOutbound
from anabranch.knowledge.index.opensearch.client import BlockingClient, IndexAddress, OpenSearchClient
from anabranch.network.addresses import AddressGuard
from support.opensearch_server import new_index

INDEX = "ANABRANCH_TEST_INDEX"
INDICES: dict[str, str] = {}
TIMEOUT_S = 30.0


def index_for(folder: Path) -> str | None:
    """The address of the index for a data folder; None if it is in the folder, as usual. `make test-cluster` sets the
    variable."""
    if os.environ.get(INDEX) != "opensearch":
        return None
    return INDICES.setdefault(folder.resolve().as_posix(), new_index())


def outbound() -> LazyOutbound:
    return LazyOutbound(guard=AddressGuard(), max_reply_bytes=100_000_000)


def client_of(url: str, given: LazyOutbound) -> OpenSearchClient:
    return OpenSearchClient(given, IndexAddress.of(url), TIMEOUT_S)


def blocking_client(url: str) -> BlockingClient:
    def connected() -> tuple[OpenSearchClient, Callable[[], Awaitable[None]]]:
        made = outbound()
        return client_of(url, made), made.close

    return BlockingClient(connected)
