"""`anabranch ingest`: files and folders into a collection."""

import asyncio
import os
import stat
import sys
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import click
import msgspec
from rich.text import Text

from anabranch.app.records import folder_of
from anabranch.configuration.settings import Settings
from anabranch.domain.errors import (
    AnabranchError,
    ConfigurationError,
    Conflict,
    IndexFailed,
    InternalError,
    LimitReached,
    NotFound,
    UpstreamError,
)
from anabranch.domain.model import Value
from anabranch.entrypoints.cli.options import (
    chunking_given,
    chunking_options,
    json_option,
    pairs,
    permission_options,
    permissions_given,
    settings_option,
)
from anabranch.entrypoints.cli.resources import OPERATOR, alone, knowledge, records, require_model
from anabranch.entrypoints.cli.terminal import counted, flat, notes, output, print_json, progress
from anabranch.knowledge.knowledge import Knowledge
from anabranch.knowledge.model import Chunking, Collection, NewDocument
from anabranch.knowledge.parse.builder import mebibytes
from anabranch.network.addresses import parse

SCHEMES = ("http://", "https://")
SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules"})
# Suffixes that are skipped in a folder. Presentations and workbooks are tried, so that the user gets an error that says
# what to do about them; so is every file that is named on the command line.
_SKIPPED_SUFFIXES = (
    ".png .jpg .jpeg .gif .bmp .ico .svg .tif .tiff .webp .heic .mp3 .mp4 .m4a .mov .avi .mkv .wav .ogg .flac .webm "
    ".zip .gz .bz2 .xz .7z .rar .tar .tgz .jar .whl .exe .dll .so .dylib .o .a .class .pyc .bin .dat .db .sqlite "
    ".woff .woff2 .ttf .otf .eot .lock .map .swp .tmp .bak"
)
SKIPPED_SUFFIXES = frozenset(_SKIPPED_SUFFIXES.split())


class FoundFile(NamedTuple):
    """A document and its unique name: its path in the given folder, its file name, or its URL (then there is no path).
    `inside` is the folder that the file must be in when it is opened."""

    name: str
    path: Path | None = None
    inside: Path | None = None


class FoundFiles(NamedTuple):
    """`skipped` counts skipped files by reason; `leaving` names the symbolic links that leave the folder."""

    found: tuple[FoundFile, ...]
    skipped: Counter[str]
    leaving: tuple[str, ...]


def find_files(given: Sequence[str], *, follow_links: bool = False) -> FoundFiles:
    """All files and URLs that the arguments name, in order. Two different files of one name would replace each other:
    that is an error."""
    search = _Search(follow_links)
    by_name: dict[str, FoundFile] = {}
    for one in given:
        for found in [_address(one)] if one.startswith(SCHEMES) else search.files(Path(one)):
            other = by_name.setdefault(found.name, found)
            if found.path and other.path and not found.path.samefile(other.path):
                raise ConfigurationError(
                    f"{other.path} and {found.path} would both be named {found.name!r} and replace each other. "
                    f"Ingest the folder that holds both, or use two collections."
                )
    leaving = tuple(name for name in dict.fromkeys(search.leaving) if name not in by_name)
    return FoundFiles(tuple(by_name.values()), search.skipped, leaving)


def open_file(found: FoundFile) -> BinaryIO:
    """Open a file for reading. Inside a folder no symbolic link is followed: the path was resolved when the folder was
    walked, so a link on it was created since."""
    assert found.path is not None
    if found.inside is None:
        return found.path.open("rb")
    *folders, name = found.path.relative_to(found.inside).parts
    at = os.open(found.inside, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for folder in folders:
            below = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = below
        # Without O_NONBLOCK, a pipe that took the file's place would block until something is written to it.
        return os.fdopen(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at), "rb")
    finally:
        os.close(at)


def _address(url: str) -> FoundFile:
    try:
        parse(url)
    except UpstreamError as error:
        raise ConfigurationError(f"{url!r} cannot be fetched. {error.message}") from None
    return FoundFile(url)


class _Search:
    def __init__(self, follow_links: bool) -> None:
        self._follow_links = follow_links
        self.skipped: Counter[str] = Counter()
        self.leaving: list[str] = []

    def files(self, given: Path) -> Iterator[FoundFile]:
        """A path given on the command line is followed, even if it is a symbolic link."""
        try:
            mode = given.stat().st_mode
        except OSError as error:
            raise ConfigurationError(f"{given} cannot be read ({error.strerror}).") from None
        if stat.S_ISDIR(mode):
            top = given.resolve()
            for name, path in self._walk(top):
                yield FoundFile(_name(name), path, None if self._follow_links else top)
        elif stat.S_ISREG(mode):
            yield FoundFile(_name(Path(given.name)), given)
        else:
            raise ConfigurationError(f"{given} is neither a file nor a folder.")

    def _walk(self, top: Path) -> Iterator[tuple[Path, Path]]:
        """The name and resolved path of each file in a folder, once. Links come last, so that a file is named for its
        own path if that is in the folder."""
        seen: set[Path] = set()
        waiting = deque([(Path(), top)])
        while waiting:
            name, target = waiting.popleft()
            if self._skip("repeated link" if target in seen else None):
                continue
            for path in self._entries(target, seen) if target.is_dir() else (target,):
                below = name / path.relative_to(target)
                if path.is_symlink():
                    waiting.extend(self._followed(below, path, top))
                elif path not in seen and not self._skip(_skip_by_content(path)):
                    seen.add(path)
                    yield below, path

    def _entries(self, top: Path, seen: set[Path]) -> Iterator[Path]:
        """The files below a folder and the links to folders, without folders that were seen already."""
        for folder, folders, names in os.walk(top, onerror=lambda _: self._skip("folder that cannot be read")):
            here = Path(folder)
            if here in seen:
                folders.clear()
                continue
            seen.add(here)
            yield from (here / name for name in sorted(names) if not self._skip(_skip_by_name(name)))
            folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in SKIPPED_FOLDERS)
            yield from (here / name for name in folders if (here / name).is_symlink())

    def _followed(self, name: Path, link: Path, top: Path) -> Sequence[tuple[Path, Path]]:
        """The name and target of a link that may be followed. The end of a chain of links decides."""
        try:
            target = Path(os.path.realpath(link, strict=True))
        except OSError:
            self._skip("broken link")
            return ()
        if self._follow_links or target.is_relative_to(top):
            return ((name, target),)
        self.leaving.append(_name(name))
        return ()

    def _skip(self, reason: str | None) -> bool:
        """Whether there is a reason; it is counted."""
        if reason is not None:
            self.skipped[reason] += 1
        return reason is not None


def _skip_by_name(name: str) -> str | None:
    """The reason to skip a file because of its name, or None."""
    if name.startswith("."):
        return "hidden"
    suffix = Path(name).suffix.lower()
    return suffix if suffix in SKIPPED_SUFFIXES else None


def _skip_by_content(path: Path) -> str | None:
    """The reason to skip a file because of its content, or None. Unreadable files are tried, to show their error."""
    try:
        found = path.stat()
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode):  # reading a pipe would block
        return "not a file"
    return None if found.st_size else "empty"


def _name(path: Path) -> str:
    """File names may contain bytes that are not valid UTF-8."""
    return os.fsencode(path.as_posix()).decode("utf-8", "replace")


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
# A retry is a job of one document.
MAX_OPEN_RETRIES = 50
POLL_S = 0.1
# A document that crashes the indexer is given up after a few attempts; this many crashes without any result mean
# something else is wrong.
MAX_CRASHES = 10


class IngestOptions(Value):
    """What all documents of a run have in common (`described`), and where they go; a retry needs only `wait`."""

    wait: bool
    collection: str = ""
    described: NewDocument = NewDocument(source="file")
    chunking: dict[str, Any] = {}
    max_bytes: int = 0


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
@click.option("--connector", metavar="ID", help="The connector that sends the documents; filters find it.")
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
    connector: str | None,
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
    options = IngestOptions(
        collection=collection,
        described=NewDocument(
            source="file",
            connector_id=connector,
            title=title,
            metadata={**meta, **({"tags": list(tags)} if tags else {})},
            permissions=permissions_given(visibility, users, groups),
        ),
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
        work = partial(IngestRun.ingest, found=files.found)
        asyncio.run(_run(settings, options, f"Ingesting into {flat(collection)}", len(files.found), outcomes, work))
        if options.wait:
            _update_index(settings)
    except KeyboardInterrupt:
        _print_interrupted(outcomes, files.found)
        sys.exit(130)
    place = {one.name: at for at, one in enumerate(files.found)}
    outcomes.sort(key=lambda one: place.get(one.name, len(place)))
    outcomes += [IngestOutcome(name=name, outcome="skipped", error=LEAVES) for name in files.leaving]
    _report(options, files, outcomes, as_json=as_json)
    sys.exit(1 if any(one.outcome == "failed" for one in outcomes) else 0)


def retry(settings: Settings, documents: Mapping[str, str], *, wait: bool, as_json: bool) -> int:
    """Ingest failed documents again and print the outcomes; returns the exit status. `documents` has what the output
    calls each document, by its id or name."""
    outcomes: list[IngestOutcome] = []
    title = f"Ingesting {counted(len(documents), 'document')} again"
    work = partial(IngestRun.retry, documents=documents)
    asyncio.run(_run(settings, IngestOptions(wait=wait), title, len(documents), outcomes, work))
    if wait:
        _update_index(settings)
    count = Counter(one.outcome for one in outcomes)
    if as_json:
        print_json({"counts": {outcome: count[outcome] for outcome in ORDER}, "documents": outcomes})
    else:
        _print_outcomes(outcomes, count)
    return 1 if count["failed"] else 0


async def _run(
    settings: Settings,
    options: IngestOptions,
    title: str,
    total: int,
    outcomes: list[IngestOutcome],
    work: "Callable[[IngestRun, Knowledge], Awaitable[None]]",
) -> None:
    """Open the knowledge with an indexer, and let a run work on it, with a progress bar."""
    # The indexer's log is of use in a server; here only its errors are.
    quiet = settings if settings.log_level == "DEBUG" else msgspec.structs.replace(settings, log_level="ERROR")
    with progress(title) as advance:
        advance(0, total)

        def done(one: IngestOutcome) -> None:
            outcomes.append(one)
            advance(len(outcomes), total)

        run = IngestRun(options, done)
        async with knowledge(quiet, indexing=options.wait, died=run.crashed) as opened:
            await work(run, opened)


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

    async def ingest(self, knowledge: Knowledge, found: Iterable[FoundFile]) -> None:
        collection = await self._collection(knowledge)
        if self._options.wait:
            await self._finish_earlier(knowledge, collection)
        for one in found:
            document = await self._read(knowledge, collection, one)
            if document is not None:
                self._batch.append(document)
            if len(self._batch) == BATCH or sum(len(each.data) for each in self._batch) >= BATCH_BYTES:
                await self._send(knowledge, collection)
                await self._follow(knowledge, MAX_OPEN_JOBS)
        if self._batch:
            await self._send(knowledge, collection)
        await self._follow(knowledge, 0)

    async def retry(self, knowledge: Knowledge, documents: Mapping[str, str]) -> None:
        for document, name in documents.items():
            try:
                job = await knowledge.retry(OPERATOR, document)
            except (Conflict, NotFound) as error:  # the other documents are retried all the same
                self._done(IngestOutcome(name=name, outcome="failed", error=error.message))
                continue
            await self._sent(knowledge, job)
            await self._follow(knowledge, MAX_OPEN_RETRIES)
        await self._follow(knowledge, 0)

    async def _collection(self, knowledge: Knowledge) -> Collection:
        name = self._options.collection
        with suppress(NotFound):
            return (await knowledge.collection(OPERATOR, name)).collection
        with suppress(Conflict):  # another process has created it meanwhile
            await knowledge.create_collection(
                OPERATOR,
                name,
                chunking=msgspec.structs.replace(Chunking(), **self._options.chunking),
                default_permissions=self._options.described.permissions,
            )
        return (await knowledge.collection(OPERATOR, name)).collection

    async def _finish_earlier(self, knowledge: Knowledge, collection: Collection) -> None:
        """Wait for what an interrupted run left, so that it is not sent again."""
        last = await knowledge.last_item()
        before = None
        while waiting := await knowledge.waiting(collection, last):
            self._crashes = 0 if waiting != before else self._crashes
            before = waiting
            self._check_indexer()
            await asyncio.sleep(POLL_S)

    async def _read(self, knowledge: Knowledge, collection: Collection, found: FoundFile) -> NewDocument | None:
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

    async def _send(self, knowledge: Knowledge, collection: Collection) -> None:
        batch, self._batch = self._batch, []
        while True:
            try:
                job = await knowledge.ingest(OPERATOR, collection.id, batch, self._options.chunking)
            except LimitReached:
                if not self._options.wait:
                    raise
                self._check_indexer()
                await asyncio.sleep(POLL_S)
            else:
                return await self._sent(knowledge, job)

    async def _sent(self, knowledge: Knowledge, job: str) -> None:
        """Follow a job from here on; without waiting, its documents are only accepted."""
        if self._options.wait:
            self._open[job] = set()
            return
        for item in (await knowledge.job(OPERATOR, job)).items:
            self._done(IngestOutcome(name=item.name, outcome="accepted", document_id=item.document_id))

    async def _follow(self, knowledge: Knowledge, at_most: int) -> None:
        """Wait until at most so many jobs are open."""
        while len(self._open) > at_most:
            for identifier in list(self._open):
                await self._check_job(knowledge, identifier)
            self._check_indexer()
            if len(self._open) > at_most:
                await asyncio.sleep(POLL_S)

    async def _check_job(self, knowledge: Knowledge, identifier: str) -> None:
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
    from anabranch.app.search_index import embedder_of, index_writer  # noqa: PLC0415  numpy loads only where it is needed

    embedder = embedder_of(settings)
    with (
        suppress(Conflict, IndexFailed),  # a server brings the index up to date, too
        alone(folder_of(settings)),
        records(settings) as database,
        index_writer(settings, database, embedder) as writer,
    ):
        if writer.unindexed()[0]:
            with progress("Updating the index"):
                writer.fold()


def _report(options: IngestOptions, files: FoundFiles, outcomes: Sequence[IngestOutcome], *, as_json: bool) -> None:
    count = Counter(one.outcome for one in outcomes)
    if as_json:
        print_json(
            {
                "collection": options.collection,
                "counts": {outcome: count[outcome] for outcome in ORDER},
                "documents": outcomes,
                "skipped": files.skipped,
            }
        )
        return
    _print_outcomes(outcomes, count, before=f"{flat(options.collection)}: ", after=_skipped(files))


def _print_outcomes(
    outcomes: Sequence[IngestOutcome], count: "Counter[str]", *, before: str = "", after: str = ""
) -> None:
    """A line for each document, and one with the counts."""
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
    console.print(f"{before}{', '.join(parts)}{after}")
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
