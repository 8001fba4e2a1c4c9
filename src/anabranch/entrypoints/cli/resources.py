"""Opens what commands need: records, knowledge, embedder, outbound HTTP, and the indexer lock."""

import asyncio
import fcntl
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from anabranch.app.knowledge_opener import KnowledgeOpener
from anabranch.app.records import folder_of, has_records, open_records
from anabranch.app.startup import outbound_for
from anabranch.configuration.settings import Settings
from anabranch.domain.audit import AuditEntry
from anabranch.domain.contracts import Embedder
from anabranch.domain.errors import ConfigurationError, Conflict, NotFound
from anabranch.knowledge.model import Caller
from anabranch.knowledge.records import audit
from anabranch.knowledge.records.database import Database, Session
from anabranch.knowledge.records.sqlite import NAME, SqliteDatabase
from anabranch.models.factory import embedder_for

if TYPE_CHECKING:
    from anabranch.knowledge.knowledge import Knowledge

T = TypeVar("T")

LOCK = "indexer.lock"
# A user who can run commands here can read the files as well.
OPERATOR = Caller(operator=True)


def exist(settings: Settings) -> bool:
    """Whether there are records. Commands that only read do not create them."""
    return has_records(settings)


def require_records(settings: Settings) -> None:
    if not exist(settings):
        if (folder_of(settings) / "index").is_dir():
            raise NotFound(
                f"The records ({NAME}) are missing in {folder_of(settings)}, although there is an index. Restore a "
                f"backup (anabranch restore)."
            )
        raise NotFound(
            f"There are no documents in {folder_of(settings)} yet. Ingest some with: "
            f"anabranch ingest FOLDER --collection NAME"
        )


def require_model(settings: Settings) -> None:
    """Fail at once if the embedding model is missing, not once per document."""
    if settings.embedding_url is None:
        from anabranch.models.minilm import read  # noqa: PLC0415  numpy loads only where it is needed

        read(Path(settings.models_dir).expanduser())


def records(settings: Settings) -> "closing[Database]":
    """The records only: works even if the embedder's settings are wrong."""
    return closing(open_records(settings))


def file_records(settings: Settings) -> "closing[SqliteDatabase]":
    """The records in a file; ConfigurationError if they are in PostgreSQL."""
    require_file(settings)
    return closing(SqliteDatabase.open(folder_of(settings)))


def require_file(settings: Settings) -> None:
    if settings.database_url is not None:
        raise ConfigurationError(
            "The records are in PostgreSQL (AGGREGATOR_DATABASE_URL). Back them up and restore them with its tools, "
            "such as pg_dump and pg_restore; every node builds its index again from them."
        )


@asynccontextmanager
async def knowledge(
    settings: Settings, *, indexing: bool = False, died: Callable[[int], None] = lambda _: None
) -> "AsyncIterator[Knowledge]":
    """The knowledge. With `indexing`, an indexer runs: a child of this process, or of another one."""
    async with outbound_for(settings) as out:
        opener = KnowledgeOpener(settings, out, indexing=indexing, died=died)
        try:
            yield await opener()
        finally:
            await opener.close()


def run(settings: Settings, work: "Callable[[Knowledge], Awaitable[T]]", *, create: bool = False) -> T:
    """Run an asynchronous function of the knowledge; NotFound if there are no records and none are to be created."""
    if not create:
        require_records(settings)

    async def opened() -> T:
        async with knowledge(settings) as found:
            return await work(found)

    return asyncio.run(opened())


def write(settings: Settings, work: Callable[[Session], T], *, deleting: bool = False) -> T:
    """Run one transaction on the records."""
    with records(settings) as database:
        return database.writing(work, deleting=deleting)


@contextmanager
def audited(settings: Settings, entry: AuditEntry) -> Iterator[None]:
    """Record what is about to be done outside of the records, and if it fails, that too; also on a full disk, because
    who copies the records to another disk may want to delete some."""
    write(settings, lambda db: audit.append(db, entry), deleting=True)
    try:
        yield
    except BaseException:
        failed = msgspec.structs.replace(entry, outcome="failed")
        write(settings, lambda db: audit.append(db, failed), deleting=True)
        raise


def read(settings: Settings, work: Callable[[Session], list[T]]) -> list[T]:
    """Read a list from the records; empty if there are none."""
    if not exist(settings):
        return []
    with records(settings) as database:
        return database.reading(work)


@asynccontextmanager
async def embedding(settings: Settings, *, threads: int) -> AsyncIterator[Embedder]:
    async with outbound_for(settings) as out:
        yield embedder_for(settings, out, threads=threads)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the indexer lock of the data folder; Conflict if another process holds it."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigurationError(f"AGGREGATOR_DATA_DIR: {folder} cannot be written ({error.strerror}).") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(
                f"{folder} is in use: a server or an ingest is running. Stop it or wait until it has finished, "
                f"and run this again."
            ) from None
        yield
    finally:
        os.close(descriptor)


@contextmanager
def cleaning_up() -> Iterator[None]:
    """SIGTERM and SIGHUP end the command as Ctrl-C does: temporary files are deleted."""

    def end(number: int, _: object) -> None:
        sys.exit(128 + number)

    numbers = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def is_indexed(folder: Path) -> bool:
    """Whether an indexer is running."""
    if not (folder / LOCK).exists():
        return False
    try:
        with alone(folder):
            return False
    except Conflict:
        return True
