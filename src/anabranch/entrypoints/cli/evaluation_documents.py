"""Ingests the documents of an evaluation into a temporary data folder."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from anabranch.configuration.settings import Settings
from anabranch.domain.errors import AnabranchError, ConfigurationError
from anabranch.entrypoints.cli.resources import OPERATOR, knowledge
from anabranch.entrypoints.cli.terminal import Advance, counted, flat, notes, progress
from anabranch.knowledge.knowledge import Knowledge
from anabranch.knowledge.model import Chunking, NewDocument

COLLECTION = "test"
BATCH = 500
POLL_S = 0.2


def text_document(identity: str, title: str, text: str) -> NewDocument:
    return NewDocument(source="text", data=f"{title}\n\n{text}".encode(), title=title or None, identity=identity)


@asynccontextmanager
async def ingested(
    settings: Settings, name: str, documents: Sequence[NewDocument], cut: Chunking
) -> AsyncIterator[tuple[Knowledge, dict[str, str]]]:
    """The documents of a dataset, ingested, and their ids by their identities."""
    async with knowledge(settings) as opened:
        await opened.create_collection(OPERATOR, COLLECTION, chunking=cut)
        with progress(f"Ingesting {flat(name)}", unit="documents") as advance:
            ids = await _ingest(opened, settings, name, documents, advance)
        yield opened, ids


async def _ingest(
    opened: Knowledge, settings: Settings, name: str, documents: Sequence[NewDocument], advance: Advance
) -> dict[str, str]:
    from anabranch.app.indexer import indexer  # noqa: PLC0415

    documents = [one for one in documents if one.data.strip()]
    if not documents:
        raise ConfigurationError(f"There is no document with text in {name}.")
    accepted = [
        await opened.ingest(OPERATOR, COLLECTION, documents[at : at + BATCH]) for at in range(0, len(documents), BATCH)
    ]

    async def report_progress() -> None:
        while True:
            advance(len(documents) - await opened.waiting(), len(documents))
            await asyncio.sleep(POLL_S)

    async with indexer(settings) as indexing:
        reporting = asyncio.create_task(report_progress())
        try:
            await indexing.drain()
        finally:
            reporting.cancel()
    items = [item for job in accepted for item in (await opened.job(OPERATOR, job)).items]
    failed = [item for item in items if item.status == "failed"]
    if failed:
        notes().print(f"{counted(len(failed), 'document')} failed; the first: {flat(failed[0].error or '')}")
    if len(failed) == len(items):
        raise AnabranchError("No document of the dataset could be ingested.")
    return {one.identity or "": item.document_id for one, item in zip(documents, items, strict=True)}


@contextmanager
def writing(folder: Path, what: str) -> Iterator[None]:
    """What is done to the folder of --output."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"--output: {folder} cannot be {what} ({error.strerror}).") from None
