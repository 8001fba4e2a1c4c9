"""`anabranch ingest`: files, folders and web pages into a collection, with the outcome of each document."""

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.text import Text

from anabranch.app.knowledge_opener import folder_of
from anabranch.configuration.settings import Settings
from anabranch.domain.errors import AnabranchError, ConfigurationError, Conflict, InternalError, NotFound
from anabranch.domain.model import Value
from anabranch.entrypoints.cli.files import FoundFile, FoundFiles, find_files, open_file
from anabranch.entrypoints.cli.options import (
    chunking_given,
    chunking_options,
    json_option,
    pairs,
    permission_options,
    permissions_given,
    settings_option,
)
from anabranch.entrypoints.cli.resources import OPERATOR, alone, index_of, knowledge, records, require_model
from anabranch.entrypoints.cli.terminal import counted, flat, notes, output, print_json, progress
from anabranch.knowledge.model import Collection, NewDocument, Permissions
from anabranch.knowledge.parse.builder import mebibytes
from anabranch.knowledge.parsed import Chunking
from anabranch.models.factory import LocalEmbedder

if TYPE_CHECKING:
    from anabranch.knowledge.knowledge import Knowledge

SIGNS = {
    "failed": ("✗", "red"),
    "cancelled": ("✗", "yellow"),
    "skipped": ("-", "yellow"),
    "unchanged": ("=", "dim"),
    "accepted": ("…", "dim"),
}
ORDER = ("added", "replaced", "updated", "unchanged", "accepted", "cancelled", "skipped", "failed")
LEAVES = "The symbolic link leaves the folder; --follow-links allows it."
# If more files than this are unchanged, they are only counted.
LISTED = 20
BATCH = 50
BATCH_BYTES = 32 * 1024 * 1024
# At most this many jobs are open, so that a large folder is not copied into the records as a whole.
MAX_OPEN_JOBS = 3
POLL_S = 0.1
# A document that crashes the indexer is given up after a few attempts; this many crashes without any result mean
# something else is wrong.
MAX_CRASHES = 10


class IngestOptions(Value):
    """What all documents of a run have in common (`described`), and where they go."""

    collection: str
    described: NewDocument
    chunking: dict[str, Any]
    max_bytes: int
    wait: bool


class IngestOutcome(Value):
    """The outcome: added, replaced, updated, unchanged, failed, cancelled, skipped (a symbolic link that leaves
    the folder), or accepted (with --no-wait)."""

    name: str
    outcome: str
    document_id: str | None = None
    chunks: int = 0
    error: str | None = None


@click.command("ingest")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option(
    "-c", "--collection", required=True, metavar="NAME", help="Collection name; created if it does not exist."
)
@chunking_options
@click.option("--tag", "tags", multiple=True, help="A tag for every document; repeatable.")
@click.option(
    "--meta", multiple=True, callback=pairs, metavar="KEY=VALUE", help="Metadata of every document; repeatable."
)
@permission_options
@click.option("--title", help="The title, for a single document.")
@click.option("--follow-links", is_flag=True, help="Follow symbolic links that leave a folder.")
@click.option("--no-wait", is_flag=True, help="Do not wait; a running server ingests the documents.")
@json_option
@settings_option
def command(
    paths: tuple[str, ...],
    collection: str,
    chunking: str | None,
    chunk_size: int | None,
    overlap: int | None,
    tags: tuple[str, ...],
    meta: dict[str, str],
    visibility: str | None,
    users: tuple[str, ...],
    groups: tuple[str, ...],
    title: str | None,
    follow_links: bool,
    no_wait: bool,
    as_json: bool,
    settings: Settings,
) -> None:
    """Ingest files, folders and web pages into a collection.

    PATH is a file, a folder (with everything in it) or an http(s) URL. Symbolic links that leave a folder are skipped
    and listed; a PATH that is a link itself is followed. A document is identified by its path relative to the folder,
    or by its file name: run the command again, and only changed files are ingested. Without permissions, a document
    keeps those that it has, and a new one gets the collection's. The exit status is 1 if any document failed.
    """
    metadata: dict[str, Any] = {**meta, **({"tags": list(tags)} if tags else {})}
    permissions = permissions_given(visibility, users, groups)
    options = IngestOptions(
        collection=collection,
        described=NewDocument(source="file", title=title, metadata=metadata, permissions=permissions),
        chunking=chunking_given(chunking, chunk_size, overlap),
        max_bytes=settings.max_document_bytes,
        wait=not no_wait,
    )
    require_model(settings)
    files = find_files(paths, follow_links=follow_links)
    if not files.found:
        raise ConfigurationError(f"There is no document in {', '.join(paths)}{_skipped(files)}.{_leaving(files)}")
    if title is not None and len(files.found) > 1:
        raise click.UsageError("--title can be given for a single document only.")
    outcomes: list[IngestOutcome] = []
    try:
        asyncio.run(_ingest(settings, options, files.found, outcomes))
        if options.wait:
            _update_index(settings)
    except KeyboardInterrupt:
        _print_interrupted(outcomes, files.found)
        sys.exit(130)
    place = {one.name: at for at, one in enumerate(files.found)}
    outcomes.sort(key=lambda one: place.get(one.name, len(place)))
    links = [IngestOutcome(name=name, outcome="skipped", error=LEAVES) for name in files.leaving]
    _report(options, files, [*outcomes, *links], as_json=as_json)
    sys.exit(1 if any(one.outcome == "failed" for one in outcomes) else 0)


async def _ingest(
    settings: Settings, options: IngestOptions, found: Sequence[FoundFile], outcomes: list[IngestOutcome]
) -> None:
    # The indexer's log is of use in a server; here only its errors are.
    quiet = settings if settings.log_level == "DEBUG" else msgspec.structs.replace(settings, log_level="ERROR")
    with progress(f"Ingesting into {flat(options.collection)}") as advance:
        advance(0, len(found))

        def done(one: IngestOutcome) -> None:
            outcomes.append(one)
            advance(len(outcomes), len(found))

        run = IngestRun(options, done)
        async with knowledge(quiet, indexing=options.wait, died=run.crashed) as opened:
            await run.ingest(opened, found)


class IngestRun:
    """Sends files in batches, skips unchanged ones, and follows the jobs to their end. `done` gets each outcome as soon
    as it is known."""

    def __init__(self, options: IngestOptions, done: Callable[[IngestOutcome], None]) -> None:
        self._options = options
        self._done = done
        self._batch: list[NewDocument] = []
        self._open: dict[str, set[int]] = {}
        self._crashes = 0

    def crashed(self, _: int) -> None:
        """The indexer's process has ended; it is started again."""
        self._crashes += 1

    async def ingest(self, knowledge: "Knowledge", found: Iterable[FoundFile]) -> None:
        collection = await self._collection(knowledge)
        if self._options.wait:
            await self._finish_earlier(knowledge, collection)
        for one in found:
            document = await self._read(knowledge, collection, one)
            if document is None:
                continue
            self._batch.append(document)
            if len(self._batch) == BATCH or sum(len(each.data) for each in self._batch) >= BATCH_BYTES:
                await self._send(knowledge, collection)
                await self._follow(knowledge, MAX_OPEN_JOBS)
        if self._batch:
            await self._send(knowledge, collection)
        await self._follow(knowledge, 0)

    async def _collection(self, knowledge: "Knowledge") -> Collection:
        name = self._options.collection
        with suppress(NotFound):
            return (await knowledge.collection(OPERATOR, name)).collection
        with suppress(Conflict):  # another process has created it meanwhile
            await knowledge.create_collection(
                OPERATOR,
                name,
                chunking=msgspec.structs.replace(Chunking(), **self._options.chunking),
                default_permissions=self._options.described.permissions or Permissions(),
            )
        return (await knowledge.collection(OPERATOR, name)).collection

    async def _finish_earlier(self, knowledge: "Knowledge", collection: Collection) -> None:
        """Wait for what an interrupted run left, so that it is not sent again."""
        last = await knowledge.last_item()
        before = None
        while waiting := await knowledge.waiting(collection, last):
            self._crashes = 0 if waiting != before else self._crashes
            before = waiting
            self._check_indexer()
            await asyncio.sleep(POLL_S)

    async def _read(self, knowledge: "Knowledge", collection: Collection, found: FoundFile) -> NewDocument | None:
        """The document to send; None if it is unchanged or cannot be read."""
        if found.path is None:
            return msgspec.structs.replace(self._options.described, source="url", url=found.name)
        try:
            data = await asyncio.to_thread(self._content, found)
        except (OSError, AnabranchError) as error:
            reason = error.message if isinstance(error, AnabranchError) else f"It cannot be read ({error.strerror})."
            self._done(IngestOutcome(name=found.name, outcome="failed", error=reason))
            return None
        document = msgspec.structs.replace(self._options.described, source="file", filename=found.name, data=data)
        stored = await knowledge.unchanged(OPERATOR, collection, document, self._options.chunking)
        if stored is None:
            return document
        self._done(
            IngestOutcome(name=found.name, outcome="unchanged", document_id=stored.id, chunks=stored.chunk_count)
        )
        return None

    def _content(self, found: FoundFile) -> bytes:
        with open_file(found) as file:
            size, limit = os.fstat(file.fileno()).st_size, self._options.max_bytes
            if size > limit:
                raise AnabranchError(
                    f"The file has {mebibytes(size)}, more than the limit of {mebibytes(limit)}. Split it."
                )
            return file.read()

    async def _send(self, knowledge: "Knowledge", collection: Collection) -> None:
        batch, self._batch = self._batch, []
        job = await knowledge.ingest(OPERATOR, collection.id, batch, self._options.chunking)
        if self._options.wait:
            self._open[job] = set()
            return
        for item in (await knowledge.job(OPERATOR, job)).items:
            self._done(IngestOutcome(name=item.name, outcome="accepted", document_id=item.document_id))

    async def _follow(self, knowledge: "Knowledge", at_most: int) -> None:
        """Wait until at most so many jobs are open."""
        while len(self._open) > at_most:
            for identifier in list(self._open):
                await self._check_job(knowledge, identifier)
            self._check_indexer()
            if len(self._open) > at_most:
                await asyncio.sleep(POLL_S)

    async def _check_job(self, knowledge: "Knowledge", identifier: str) -> None:
        job = await knowledge.job(OPERATOR, identifier)
        reported = self._open[identifier]
        for item in job.items:
            if item.key not in reported and item.status in ("completed", "failed", "cancelled"):
                reported.add(item.key)
                self._crashes = 0
                self._done(
                    IngestOutcome(
                        name=item.name,
                        outcome=item.outcome or item.status,
                        document_id=item.document_id if item.status == "completed" else None,
                        chunks=item.chunk_count,
                        error=item.error,
                    )
                )
        if job.completed_at is not None:
            del self._open[identifier]

    def _check_indexer(self) -> None:
        if self._crashes >= MAX_CRASHES:
            raise InternalError(
                f"The indexer's process has ended {self._crashes} times without ingesting anything. The documents are "
                f"stored and wait; AGGREGATOR_LOG_LEVEL=DEBUG shows the cause."
            )


def _update_index(settings: Settings) -> None:
    """Index everything now, so that the next search starts quickly, unless another process runs an indexer."""
    from anabranch.knowledge.index.writer import IndexWriter  # noqa: PLC0415  numpy loads only where it is needed

    embedder = settings.embedding_model or LocalEmbedder.name
    with suppress(Conflict), alone(folder_of(settings)), records(settings) as database:
        writer = IndexWriter(database, index_of(settings), embedder)
        if writer.behind()[0]:
            with progress("Updating the index"):
                writer.fold()


def _report(options: IngestOptions, files: FoundFiles, outcomes: Sequence[IngestOutcome], *, as_json: bool) -> None:
    count = Counter(one.outcome for one in outcomes)
    if as_json:
        counts = {outcome: count[outcome] for outcome in ORDER}
        print_json(
            {"collection": options.collection, "counts": counts, "documents": outcomes, "skipped": files.skipped}
        )
        return
    console = output()
    for one in outcomes:
        if one.outcome == "unchanged" and count["unchanged"] > LISTED:
            continue
        sign, style = SIGNS.get(one.outcome, ("✓", "green"))
        chunks = f"  {counted(one.chunks, 'chunk')}" if one.chunks else ""
        console.print(Text.assemble((sign, style), f" {one.outcome:<9} {flat(one.name)}", (chunks, "dim")))
        if one.error:
            console.print(Text(f"  {flat(one.error)}", style="yellow"))
    parts = [f"{count[outcome]:,} {outcome}" for outcome in ORDER if count[outcome]]
    console.print(f"{flat(options.collection)}: {', '.join(parts)}{_skipped(files)}")
    if count["accepted"]:
        notes().print("The server or the next ingest processes them.")


def _skipped(files: FoundFiles) -> str:
    if not files.skipped:
        return ""
    reasons = ", ".join(f"{number} {reason}" for reason, number in files.skipped.most_common(5))
    return f" (left out: {reasons}{', …' if len(files.skipped) > 5 else ''})"


def _leaving(files: FoundFiles) -> str:
    names = ", ".join(flat(name) for name in files.leaving)
    return f" Symbolic links that leave the folder are skipped; --follow-links allows them: {names}." if names else ""


def _print_interrupted(outcomes: Sequence[IngestOutcome], found: Sequence[FoundFile]) -> None:
    done = sum(one.outcome not in ("failed", "cancelled") for one in outcomes)
    notes().print(
        f"Stopped after {done:,} of {counted(len(found), 'document')}. Accepted documents are stored, and the server "
        f"or the next ingest processes them; run the same command again for the rest."
    )
