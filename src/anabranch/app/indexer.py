"""The indexer process: it reads its settings from the first line of standard input and stops when that closes."""

import asyncio
import math
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path

import msgspec

from anabranch.app.audit_reader import reading_audit_log
from anabranch.app.erasure import eraser_for
from anabranch.app.index_scrubber import scrubbing
from anabranch.app.records import folder_of, has_records, is_unreachable, node_of, open_records
from anabranch.app.search_index import index_writer
from anabranch.app.startup import outbound_for
from anabranch.configuration.settings import Settings
from anabranch.domain.audit import SERVER, acting, on_this_machine
from anabranch.domain.contracts import Outbound
from anabranch.domain.errors import AnabranchError, ConfigurationError, UpstreamError
from anabranch.domain.shares import Limit
from anabranch.knowledge.disk import LEAST_FREE, NO_SPACE, is_nearly_full, keep_reserve
from anabranch.knowledge.ingest import Fetched, Indexer, Ingestion
from anabranch.knowledge.model import Unprocessable
from anabranch.knowledge.parse import ParseLimits, Parsers
from anabranch.knowledge.parse.confinement import APPLIED
from anabranch.knowledge.records import documents
from anabranch.knowledge.records.database import DiskFull
from anabranch.knowledge.records.nodes import Node
from anabranch.knowledge.records.sqlite import NAME
from anabranch.models.factory import embedder_for
from anabranch.policies.fair_threads import FairThreads
from anabranch.telemetry.log import Log, configured_log

FETCH_S = 60.0
NICE = 5
LOOK_S = 1.0
# Threads that chunk: an owner has two at a time.
CHUNKING = Limit(
    name="chunking",
    description="documents that are chunked at once",
    each=2,
    total=8,
    waiting=math.inf,
    queued=math.inf,
)


@asynccontextmanager
async def indexer(
    settings: Settings, confined: Callable[[Mapping[str, str]], None] = lambda _: None, log: Log | None = None
) -> AsyncIterator[Indexer]:
    """An indexer for the data folder; the caller holds the folder's lock. `confined` gets the restrictions of the first
    parser process, and `log` what is damaged."""
    database = open_records(settings)
    parsers = Parsers(
        ParseLimits(
            max_bytes=settings.max_document_bytes,
            max_pages=settings.max_document_pages,
            max_expanded=settings.max_document_expansion,
            timeout_s=settings.parse_timeout,
        ),
        started=confined,
    )
    embedding, chunking = FairThreads.of(settings.embedding_threads, "embedding"), FairThreads(CHUNKING)
    try:
        # Documents and embeddings come over one client; the parser has its own limit for documents.
        async with outbound_for(settings, max(settings.max_document_bytes, settings.max_reply_bytes)) as outbound:
            embedder = embedder_for(settings, outbound, threads=settings.embedding_threads, run=embedding.run)
            database.reading(lambda db: documents.check_embedder(db, embedder.name))
            fetch = partial(fetch_document, outbound)
            ingestion = Ingestion(database, embedder, parsers.parse, fetch, chunking.run)
            with index_writer(settings, database, embedder.name, log) as writer:
                erase = eraser_for(settings, database, writer).erase_due
                async with scrubbing(writer, settings.index_verify_interval, log):
                    yield Indexer(
                        *(database, ingestion, writer),
                        retention_days=settings.query_log_days,
                        erase=erase,
                        node=_node(node_of(settings)),
                    )
    finally:
        await parsers.close()
        embedding.close(wait=False)
        chunking.close(wait=False)
        database.close()


def _node(identifier: str) -> Node | None:
    if not identifier:
        return None
    started_at = time.time()
    return Node(
        id=identifier,
        name=socket.gethostname(),
        version=version("anabranch"),
        started_at=started_at,
        seen_at=started_at,
        seq=0,
        erased_pass=0,
    )


async def fetch_document(outbound: Outbound, url: str) -> Fetched:
    """Fetch a document by URL, through the address check."""
    try:
        async with asyncio.timeout(FETCH_S), outbound.request("GET", url, headers={}) as reply:
            if 300 <= reply.status < 400:
                raise Unprocessable(f"The address redirects to another ({reply.status}); ingest that one.")
            if reply.status != 200:
                raise Unprocessable(f"The address answered with {reply.status}.")
            return Fetched(await reply.read(), reply.content_type or None)
    except TimeoutError:
        raise Unprocessable(f"The address did not answer within {FETCH_S:.0f} seconds.") from None
    except UpstreamError as error:
        raise Unprocessable(f"The address cannot be fetched. {error.described(with_address=True)}") from error


async def when_there_is_room(
    folder: Path,
    work: Callable[[], Awaitable[None]],
    log: Log,
    *,
    erase: Callable[[], Awaitable[None]] | None = None,
    least_free: int = LEAST_FREE,
    look_s: float = LOOK_S,
    has_file: bool = True,
) -> None:
    """Run `work`, and again each time when it has ended because the disk was full and there is room again. It is also
    stopped when little is left, which is for those who delete: `erase` goes on."""
    while True:
        task = asyncio.ensure_future(work())
        try:
            await _until_full(folder, task, least_free, look_s, has_file=has_file)
        finally:
            task.cancel()
            await asyncio.wait([task])
        if not task.cancelled() and not means_full(failure := task.exception()):
            if failure is not None:
                raise failure
            return
        log.warning("disk_full", data_dir=str(folder), hint="ingesting and indexing wait until there is room again")
        await asyncio.sleep(look_s)
        while is_nearly_full(folder, least_free):
            if erase is not None:
                with suppress(DiskFull):
                    await erase()
            await asyncio.sleep(look_s)
        log.info("disk_has_room", data_dir=str(folder))


async def _until_full(
    folder: Path, task: "asyncio.Future[None]", least_free: int, look_s: float, *, has_file: bool
) -> None:
    while not task.done() and not is_nearly_full(folder, least_free):
        if has_file:
            try:
                size = (folder / NAME).stat().st_size
            except FileNotFoundError:
                raise missing(folder) from None
            keep_reserve(folder, size)
        await asyncio.wait([task], timeout=look_s)


def missing(folder: Path) -> ConfigurationError:
    return ConfigurationError(
        f"The records ({folder / NAME}) are gone. Stop the server, and put them back or restore a backup "
        "(anabranch restore)."
    )


def means_full(error: BaseException | None) -> bool:
    """Whether an error, or each of a group of errors, was caused by a full disk."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(means_full, error.exceptions))
    return isinstance(error, DiskFull) or (isinstance(error, OSError) and error.errno in NO_SPACE)


def log_missing(log: Log, restrictions: Mapping[str, str]) -> None:
    """Log what the kernel or the user of this process does not permit to take from parsers."""
    if missing := {name: reason for name, reason in restrictions.items() if reason != APPLIED}:
        log.warning("parser_restrictions_missing", restrictions=missing)


async def run(settings: Settings, log: Log) -> None:
    acting.set(partial(on_this_machine, "indexer", SERVER))
    if not has_records(settings):  # the server has made them; others in their place would be empty
        raise missing(folder_of(settings))
    work = asyncio.create_task(while_reachable(settings, log))
    loop = asyncio.get_running_loop()

    def stop_at_end_of_input() -> None:
        # Not `sys.stdin.read`: its lock, which this thread would hold, aborts a process that ends before its input.
        while os.read(sys.stdin.fileno(), 1024):
            pass
        with suppress(RuntimeError):  # the loop may be closed already
            loop.call_soon_threadsafe(work.cancel)

    threading.Thread(target=stop_at_end_of_input, daemon=True).start()
    with suppress(asyncio.CancelledError):
        await work


async def while_reachable(settings: Settings, log: Log) -> None:
    """Run an indexer; after an outage of the database, run it again."""
    while True:
        try:
            await _index(settings, log)
        except AnabranchError as error:
            if not is_unreachable(error):
                raise
            log.warning("records_unreachable", reason=error.message, hint="indexing goes on when they can be reached")
        else:
            return
        while not await asyncio.to_thread(_is_reachable, settings):  # noqa: ASYNC110  a server that starts tells nobody
            await asyncio.sleep(LOOK_S)
        log.info("records_reachable")


async def _index(settings: Settings, log: Log) -> None:
    async with indexer(settings, partial(log_missing, log), log) as opened, reading_audit_log(settings, log):
        has_file = settings.database_url is None
        await when_there_is_room(folder_of(settings), opened.run, log, erase=opened.erase_due, has_file=has_file)


def _is_reachable(settings: Settings) -> bool:
    try:
        open_records(settings).close()
    except ConfigurationError as error:
        if is_unreachable(error):
            return False
        raise
    return True


def main() -> None:
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=Settings)
    log = configured_log(settings)
    with suppress(OSError):
        os.nice(NICE)  # questions have priority over indexing
    log.info("indexer_started", data_dir=settings.data_dir)
    try:
        asyncio.run(run(settings, log))
    except AnabranchError as error:
        log.warning("indexer_failed", error=error.message)
        sys.exit(1)
    except Exception as error:
        log.error("indexer_crashed", exc_info=error)  # noqa: TRY400  not the logging module
        sys.exit(70)
    finally:
        log.info("indexer_stopped")
        log.flush()


if __name__ == "__main__":
    main()
