"""`anabranch ingest`: files, folders and web pages into a collection, with what became of each."""

import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.text import Text

from anabranch.app.knowledge_opener import folder_of
from anabranch.configuration.settings import Settings
from anabranch.domain.errors import ConfigurationError, Conflict, NotFound
from anabranch.domain.model import Value
from anabranch.entrypoints.cli.files import FoundFile, FoundFiles, find_files
from anabranch.entrypoints.cli.options import (
    chunking_given,
    chunking_options,
    config_option,
    configured,
    json_option,
    pairs,
    permission_options,
    permissions_given,
)
from anabranch.entrypoints.cli.resources import OPERATOR, alone, embedding, knowledge, records, require_model
from anabranch.entrypoints.cli.terminal import counted, flat, notes, output, print_json, progress
from anabranch.knowledge.model import Collection, NewDocument, Permissions
from anabranch.knowledge.parsed import Chunking

if TYPE_CHECKING:
    from anabranch.entrypoints.cli.ingest_run import IngestOutcome
    from anabranch.knowledge.knowledge import Knowledge

SIGNS = {"failed": ("✗", "red"), "cancelled": ("✗", "yellow"), "unchanged": ("=", "dim"), "accepted": ("…", "dim")}
ORDER = ("added", "replaced", "updated", "unchanged", "accepted", "cancelled", "failed")
# Beyond this many, unchanged files are only counted.
LISTED = 20


class Order(Value):
    collection: str
    described: NewDocument
    chunking: dict[str, Any]
    permissions: Permissions | None
    wait: bool


@click.command("ingest")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option("-c", "--collection", required=True, metavar="NAME", help="Where to; made if it is missing.")
@chunking_options
@click.option("--tag", "tags", multiple=True, help="A tag for every document; repeatable.")
@click.option(
    "--meta", multiple=True, callback=pairs, metavar="KEY=VALUE", help="Said about every document; repeatable."
)
@permission_options
@click.option("--title", help="The title, for a single document.")
@click.option("--no-wait", is_flag=True, help="Only hand the documents over; a running server takes them in.")
@json_option
@config_option
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
    no_wait: bool,
    as_json: bool,
    config: Path | None,
) -> None:
    """Take files, folders and web pages into a collection.

    PATH is a file, a folder (with all that is in it) or an http(s) address. A file is known by its path below the
    folder, or by its name: run it again, and only what has changed is taken in anew. Without permissions, a document
    keeps those that it has, and a new one gets the collection's. The exit status is 1 if any document failed.
    """
    settings = configured(config)
    permissions = permissions_given(visibility, users, groups)
    metadata: dict[str, Any] = {**meta, **({"tags": list(tags)} if tags else {})}
    order = Order(
        collection=collection,
        described=NewDocument(source="file", title=title, metadata=metadata, permissions=permissions),
        chunking=chunking_given(chunking, chunk_size, overlap),
        permissions=permissions,
        wait=not no_wait,
    )
    require_model(settings)
    sought = find_files(paths)
    if not sought.found:
        raise ConfigurationError(f"There is no document in {', '.join(paths)}{_left_out(sought)}.")
    if title is not None and len(sought.found) > 1:
        raise click.UsageError("--title goes with a single document.")
    taken: list[IngestOutcome] = []
    try:
        embedder = asyncio.run(_ingest(settings, order, sought.found, taken))
        if order.wait:
            _fold(settings, embedder)
    except KeyboardInterrupt:
        _say_interrupted(taken, sought.found)
        sys.exit(130)
    from anabranch.entrypoints.cli.ingest_run import in_order  # noqa: PLC0415

    _report(order, sought, in_order(taken, sought.found), as_json=as_json)
    sys.exit(1 if any(one.outcome == "failed" for one in taken) else 0)


async def _ingest(settings: Settings, order: Order, found: Sequence[FoundFile], taken: "list[IngestOutcome]") -> str:
    """The name of the embedder with which it was done."""
    from anabranch.entrypoints.cli.ingest_run import IngestRun  # noqa: PLC0415  numpy loads only where it is needed

    # The indexer's log is the server's business; here only what goes wrong is of interest.
    quiet = settings if settings.log_level == "DEBUG" else msgspec.structs.replace(settings, log_level="ERROR")
    running: list[IngestRun] = []

    def died(status: int) -> None:
        for intake in running:
            intake.died(status)

    with progress(f"Taking into {flat(order.collection)}") as advance:
        advance(0, len(found))
        async with knowledge(quiet, indexing=order.wait, died=died) as room, embedding(settings) as embedder:

            def took(one: "IngestOutcome") -> None:
                taken.append(one)
                advance(len(taken), len(found))

            running.append(
                IngestRun(
                    room,
                    embedder,
                    await _collection(room, order),
                    described=order.described,
                    chunking=order.chunking,
                    max_bytes=settings.max_document_bytes,
                    took=took,
                )
            )
            await running[0].run(found, wait=order.wait)
            return embedder.name


async def _collection(room: "Knowledge", order: Order) -> Collection:
    with suppress(NotFound):
        return (await room.collection(OPERATOR, order.collection)).collection
    with suppress(Conflict):  # somebody else was faster
        await room.create_collection(
            OPERATOR,
            order.collection,
            chunking=msgspec.structs.replace(Chunking(), **order.chunking),
            default_permissions=order.permissions or Permissions(),
        )
    return (await room.collection(OPERATOR, order.collection)).collection


def _fold(settings: Settings, embedder: str) -> None:
    """Bring the index up to the records, unless somebody is there to do it: then the next search starts at once."""
    from anabranch.knowledge.index.manifest import Generations  # noqa: PLC0415
    from anabranch.knowledge.index.writer import IndexWriter  # noqa: PLC0415

    folder = folder_of(settings)
    with suppress(Conflict), alone(folder), records(settings) as database:
        writer = IndexWriter(database, Generations(folder / "index"), embedder)
        if writer.behind()[0]:
            with progress("Bringing the index up to date"):
                writer.fold()


def _report(order: Order, sought: FoundFiles, taken: "Sequence[IngestOutcome]", *, as_json: bool) -> None:
    count = Counter(one.outcome for one in taken)
    if as_json:
        counts = {outcome: count[outcome] for outcome in ORDER}
        print_json({"collection": order.collection, "counts": counts, "documents": taken, "skipped": sought.skipped})
        return
    console = output()
    for one in taken:
        if one.outcome == "unchanged" and count["unchanged"] > LISTED:
            continue
        sign, style = SIGNS.get(one.outcome, ("✓", "green"))
        chunks = f"  {counted(one.chunks, 'chunk')}" if one.chunks else ""
        console.print(Text.assemble((sign, style), f" {one.outcome:<9} {flat(one.name)}", (chunks, "dim")))
        if one.error:
            console.print(Text(f"  {flat(one.error)}", style="yellow"))
    parts = [f"{count[outcome]:,} {outcome}" for outcome in ORDER if count[outcome]]
    console.print(f"{flat(order.collection)}: {', '.join(parts)}{_left_out(sought)}")
    if count["accepted"]:
        notes().print("They are taken in when the server or the next ingest runs.")


def _left_out(sought: FoundFiles) -> str:
    if not sought.skipped:
        return ""
    reasons = ", ".join(f"{number} {reason}" for reason, number in sought.skipped.most_common(5))
    return f" (left out: {reasons}{', …' if len(sought.skipped) > 5 else ''})"


def _say_interrupted(taken: "Sequence[IngestOutcome]", found: Sequence[FoundFile]) -> None:
    done = sum(one.outcome not in ("failed", "cancelled") for one in taken)
    notes().print(
        f"Stopped after {done:,} of {counted(len(found), 'document')}. What was accepted is kept, and is taken in when "
        f"the server or the next ingest runs; run the same command again for the rest."
    )
