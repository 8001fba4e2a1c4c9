"""Opens the index of the settings: segments in the data folder, or OpenSearch. numpy loads with it."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing, contextmanager

from anabranch.app.records import folder_of, node_of, open_records
from anabranch.app.startup import LazyOutbound
from anabranch.configuration.settings import Settings
from anabranch.domain.contracts import Outbound
from anabranch.knowledge.index.contract import Index, IndexUpdates
from anabranch.knowledge.index.manifest import Generations, IndexManifest
from anabranch.knowledge.index.opensearch.client import BlockingClient, IndexAddress, OpenSearchClient
from anabranch.knowledge.index.opensearch.index import OpenSearchIndex
from anabranch.knowledge.index.opensearch.writer import OpenSearchWriter, Sizes
from anabranch.knowledge.index.reader import IndexReader
from anabranch.knowledge.index.writer import IndexWriter
from anabranch.knowledge.records.database import Database
from anabranch.models.factory import LocalEmbedder
from anabranch.network.addresses import AddressGuard
from anabranch.telemetry.log import Log


def segments_of(settings: Settings) -> Generations:
    """The folder of the segments; each node that shares the records has its own."""
    return Generations(folder_of(settings) / "index", node_of(settings))


def open_index(
    settings: Settings, outbound: Outbound, embedder: str, damaged: Callable[[str], None] = lambda _: None
) -> Index:
    """What searches read."""
    if settings.index_url is None:
        return IndexReader(segments_of(settings), damaged)
    return OpenSearchIndex(_client(settings, outbound), embedder, damaged)


@contextmanager
def index_writer(
    settings: Settings, database: Database, embedder: str, log: Log | None = None
) -> Iterator[IndexUpdates]:
    """What brings it up to date; the caller holds the folder's lock."""
    if settings.index_url is None:
        yield IndexWriter(database, segments_of(settings), embedder, log)
    else:
        with _opensearch(settings, database, embedder, log) as writer:
            yield writer


@contextmanager
def _opensearch(
    settings: Settings, database: Database, embedder: str, log: Log | None = None
) -> Iterator[OpenSearchWriter]:

    def connected() -> tuple[OpenSearchClient, Callable[[], Awaitable[None]]]:
        outbound = LazyOutbound(guard=AddressGuard(), max_reply_bytes=settings.max_reply_bytes)
        return _client(settings, outbound), outbound.close

    client = BlockingClient(connected)
    try:
        sizes = Sizes(shards=settings.index_shards, replicas=settings.index_replicas)
        yield OpenSearchWriter(database, client, embedder, node=node_of(settings), sizes=sizes, log=log)
    finally:
        client.close()


@contextmanager
def index_differences(settings: Settings) -> Iterator[Callable[[], Sequence[str]]]:
    """What compares an index in OpenSearch with the records."""
    with closing(open_records(settings)) as database, _opensearch(settings, database, embedder_of(settings)) as writer:
        yield lambda: writer.differences(lambda _: None)


def embedder_of(settings: Settings) -> str:
    """The name of the embedder of the settings, without loading it."""
    return settings.embedding_model or LocalEmbedder.name


def drop_index(settings: Settings) -> None:
    """Let searches read no index, because its vectors are replaced. One in OpenSearch names its embedder, and is no
    longer used anyway."""
    if settings.index_url is None:
        segments = segments_of(settings)
        segments.publish(IndexManifest(number=segments.current().number))


def _client(settings: Settings, outbound: Outbound) -> OpenSearchClient:
    assert settings.index_url is not None, "the caller has looked"
    address = IndexAddress.of(settings.index_url, settings.index_api_key)
    return OpenSearchClient(outbound, address, settings.index_timeout)
