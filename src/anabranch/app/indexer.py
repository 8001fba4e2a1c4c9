"""The indexer process: it reads its settings from the first line of standard input and stops when that closes."""

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial

import msgspec

from anabranch.app.audit_reader import reading_audit_log
from anabranch.app.erasure import eraser_for
from anabranch.app.knowledge_opener import folder_of
from anabranch.app.startup import outbound_for
from anabranch.configuration.settings import Settings
from anabranch.domain.audit import SERVER, acting, on_this_machine
from anabranch.domain.contracts import Outbound
from anabranch.domain.errors import AnabranchError, UpstreamError
from anabranch.knowledge.index.manifest import Generations
from anabranch.knowledge.index.writer import IndexWriter
from anabranch.knowledge.ingest import Fetched, Indexer, Ingestion
from anabranch.knowledge.model import Unprocessable
from anabranch.knowledge.parse import ParseLimits, Sandbox
from anabranch.knowledge.records import documents
from anabranch.knowledge.records.database import Database
from anabranch.models.factory import embedder_for
from anabranch.telemetry.log import Log, configured_log

FETCH_S = 60.0
NICE = 5


@asynccontextmanager
async def indexer(settings: Settings) -> AsyncIterator[Indexer]:
    """An indexer for the data folder; the caller holds the folder's lock."""
    folder = folder_of(settings)
    database = Database.open(folder)
    sandbox = Sandbox(
        ParseLimits(
            max_bytes=settings.max_document_bytes,
            max_pages=settings.max_document_pages,
            max_expanded=settings.max_document_expansion,
            timeout_s=settings.parse_timeout,
        )
    )
    try:
        # Documents and embeddings come over one client; the parser has its own limit for documents.
        async with outbound_for(settings, max(settings.max_document_bytes, settings.max_reply_bytes)) as outbound:
            embedder = embedder_for(settings, outbound, threads=settings.embedding_threads)
            database.reading(lambda db: documents.check_embedder(db, embedder.name))
            ingestion = Ingestion(database, embedder, sandbox.parse, partial(fetch_document, outbound))
            writer = IndexWriter(database, Generations(folder / "index"), embedder.name)
            erase = eraser_for(settings, database, writer).erase_due
            yield Indexer(database, ingestion, writer, retention_days=settings.query_log_days, erase=erase)
    finally:
        await sandbox.close()
        database.close()


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


async def run(settings: Settings, log: Log) -> None:
    acting.set(partial(on_this_machine, "indexer", SERVER))
    async with indexer(settings) as opened, reading_audit_log(settings, log):
        work = asyncio.create_task(opened.run())
        loop = asyncio.get_running_loop()

        def stop_at_end_of_input() -> None:
            sys.stdin.buffer.read()
            with suppress(RuntimeError):  # the loop may be closed already
                loop.call_soon_threadsafe(work.cancel)

        threading.Thread(target=stop_at_end_of_input, daemon=True).start()
        with suppress(asyncio.CancelledError):
            await work


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
