"""What commands open: the records, the knowledge room, the embedder, and the lock that says who may write the index."""

import fcntl
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from anabranch.app.knowledge_opener import KnowledgeOpener, folder_of
from anabranch.app.outbound import outbound_for
from anabranch.configuration.settings import Settings
from anabranch.domain.contracts import Embedder
from anabranch.domain.errors import Conflict, NotFound
from anabranch.knowledge.model import Caller
from anabranch.knowledge.records.database import NAME, Database
from anabranch.models.factory import embedder_for

if TYPE_CHECKING:
    from anabranch.knowledge.knowledge import Knowledge

LOCK = "indexer.lock"
# Whoever can run commands here can read the files as well.
OPERATOR = Caller(operator=True)


def exist(settings: Settings) -> bool:
    """Whether there are records. Commands that only look do not make them."""
    return (folder_of(settings) / NAME).is_file()


def require_records(settings: Settings) -> None:
    if not exist(settings):
        raise NotFound(
            f"There is nothing in {folder_of(settings)} yet. Take documents in with: "
            f"anabranch ingest FOLDER --collection NAME"
        )


def require_model(settings: Settings) -> None:
    """Say at once that the embedding model is missing, rather than of each document in turn."""
    if settings.embedding_url is None:
        from anabranch.models.minilm import read  # noqa: PLC0415  numpy loads only where it is needed

        read(Path(settings.models_dir).expanduser())


@contextmanager
def records(settings: Settings) -> Iterator[Database]:
    """The records alone: what needs no embedder also works when its settings are wrong."""
    database = Database.open(folder_of(settings))
    try:
        yield database
    finally:
        database.close()


@asynccontextmanager
async def knowledge(
    settings: Settings, *, indexing: bool = False, died: Callable[[int], None] = lambda _: None
) -> "AsyncIterator[Knowledge]":
    """The room. With `indexing` there is somebody who takes documents in: this process's child, or another's."""
    async with outbound_for(settings) as out:
        rooms = KnowledgeOpener(settings, out, indexing=indexing, died=died)
        try:
            yield await rooms()
        finally:
            await rooms.close()


@asynccontextmanager
async def embedding(settings: Settings, *, threads: int = 1) -> AsyncIterator[Embedder]:
    async with outbound_for(settings) as out:
        yield embedder_for(settings, out, threads=threads)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the data folder's lock, as whoever runs its indexer does; Conflict if somebody else has it."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(
                f"{folder} is in use: a server or an ingest is running. Stop it, or wait until it is done, "
                f"and run this again."
            ) from None
        yield
    finally:
        os.close(descriptor)


def is_indexed(folder: Path) -> bool:
    """Whether somebody runs the indexer now."""
    if not (folder / LOCK).exists():
        return False
    try:
        with alone(folder):
            return False
    except Conflict:
        return True
